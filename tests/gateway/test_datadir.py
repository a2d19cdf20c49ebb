"""The data folder of `farthing up`: a full disk, a damaged or unusual farthing.toml, and no traceback for any of it."""

import errno
import os
import tomllib
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from gateway import datadir
from gateway.datadir import DataDirError
from gateway.up import add_missing_models

STARTER = (files("gateway") / "starter.toml").read_bytes()


def full_disk(_: int) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_at_the_first_start_leaves_no_half_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full_disk)
        with pytest.raises(DataDirError, match=r"farthing\.toml: No space left on device"):
            datadir.configuration(tmp_path)
    assert list(tmp_path.iterdir()) == []
    path, config = datadir.configuration(tmp_path)
    assert path.read_bytes() == STARTER
    assert config["roles"] and list(tmp_path.iterdir()) == [path]


def test_an_empty_configuration_is_made_again_and_any_other_kept(tmp_path: Path) -> None:
    path = tmp_path / "farthing.toml"
    path.touch()
    datadir.configuration(tmp_path)
    assert path.read_bytes() == STARTER
    path.write_bytes(b"# mine\r\n")
    assert datadir.configuration(tmp_path) == (path, {})
    assert path.read_bytes() == b"# mine\r\n"


@pytest.mark.parametrize("what", ["a folder", "a disk that is full"])
def test_a_lock_that_cannot_be_written_is_a_sentence(tmp_path: Path, what: str) -> None:
    if what == "a folder":
        (tmp_path / "up.lock").mkdir()
    else:
        (tmp_path / "up.lock").symlink_to("/dev/full")
    with pytest.raises(DataDirError, match=r"cannot write to the data folder .*--data-dir"), datadir.locked(tmp_path):
        pass


def test_the_lock_names_who_has_it(tmp_path: Path) -> None:
    with datadir.locked(tmp_path):
        with pytest.raises(DataDirError, match=f"pid {os.getpid()}"), datadir.locked(tmp_path):
            pass
        assert (tmp_path / "up.lock").read_text() == f"{os.getpid()}\n"
    with datadir.locked(tmp_path):
        pass


def test_logs_that_cannot_be_written_are_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(DataDirError, match="cannot write to the data folder"):
        datadir.log_file(tmp_path / "none", "engine")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b'currency = "\xff"', r"farthing\.toml is not UTF-8 text \(byte 12\)"),
        (b"[roles", r"farthing\.toml is not valid TOML"),
        (b'roles = "x"', r"farthing\.toml: `roles` must be a table"),
        (b"models = 5", r"farthing\.toml: `models` must be a table"),
        (b"[roles]\nsmall = 5", r"farthing\.toml: roles\.small must be the name of a model, not 5"),
        (b'[roles]\nlarge = ""', r"farthing\.toml: roles\.large must be the name of a model"),
    ],
)
def test_a_damaged_configuration_is_named_and_kept(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "farthing.toml"
    path.write_bytes(content)
    with pytest.raises(DataDirError, match=said):
        datadir.configuration(tmp_path)
    assert path.read_bytes() == content


def test_a_configuration_that_is_a_folder(tmp_path: Path) -> None:
    (tmp_path / "farthing.toml").mkdir()
    with pytest.raises(DataDirError, match=r"farthing\.toml: Is a directory"):
        datadir.configuration(tmp_path)


@pytest.mark.parametrize("content", [b"models = { }", b'models = { a = { upstreams = ["engine"] } }\n'])
def test_a_model_is_never_appended_where_it_would_break_the_file(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "farthing.toml"
    path.write_bytes(content)
    served = {"small": "a", "large": "odd.name"}
    with pytest.raises(DataDirError, match=r'Add "[a-z.]+" = \{ upstreams = \["engine"\] \} to `models` by hand'):
        add_missing_models(served, tomllib.loads(content.decode()), path)
    assert path.read_bytes() == content


@pytest.mark.parametrize(
    "content",
    [b"", b"[models]", b"models.a.context = 5", b"[models.a]\r\nupstreams = ['engine']", b"[models]\na.price = {}\n"],
)
@pytest.mark.parametrize("model", ["b", 'odd "name".v1', "ä😀"])
def test_an_appended_model_is_read_as_that(tmp_path: Path, content: bytes, model: str) -> None:
    real = tmp_path / "elsewhere.toml"
    real.write_bytes(content)
    real.chmod(0o640)
    path = tmp_path / "farthing.toml"
    path.symlink_to(real)
    config: dict[str, Any] = tomllib.loads(content.decode())
    before = dict(config.get("models", {}))
    datadir.add_model(path, config, model)
    datadir.add_model(path, config, "second")
    assert real.read_bytes().startswith(content)
    assert tomllib.loads(path.read_text(encoding="utf-8")) == config
    assert config["models"] == {**before, model: {"upstreams": ["engine"]}, "second": {"upstreams": ["engine"]}}
    assert path.is_symlink() and real.stat().st_mode & 0o777 == 0o640


def test_a_full_disk_while_adding_a_model_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, config = datadir.configuration(tmp_path)
    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(DataDirError, match=r"cannot add the model 'mine' to .*: No space left"):
        datadir.add_model(path, config, "mine")
    assert path.read_bytes() == STARTER and "mine" not in config["models"]
