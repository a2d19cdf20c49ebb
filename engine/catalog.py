"""The models that can be named: what they are, where they come from, and whether they are on this machine."""

import fcntl
import os
import time
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from engine import model_sources
from engine.model_sources import CatalogError as CatalogError
from engine.model_sources import HubSource, PackageSource, Progress

CATALOG_FILE = Path(__file__).with_name("catalog.toml")


@dataclass(frozen=True, slots=True)
class Entry:
    """One model of the catalogue."""

    name: str
    architecture: str
    parameters: str
    licence: str
    size: int
    """Bytes on disk; approximate for hub models."""
    source: PackageSource | HubSource
    sha256: str | None
    """Of the one file of a package model; None for hub models."""

    @property
    def path(self) -> Path:
        """Where the model is once it has been pulled: a GGUF file, or a folder."""
        return models_folder() / (f"{self.name}.gguf" if isinstance(self.source, PackageSource) else self.name)

    @property
    def present(self) -> bool:
        """Whether the model is on this machine; only what was complete and checked ever got its final name."""
        if isinstance(self.source, HubSource):
            return self.path.is_dir()
        return self.path.is_file() and self.path.stat().st_size == self.size


def models_folder() -> Path:
    """$FARTHING_MODELS, or ~/.cache/farthing/models."""
    return Path(os.environ.get("FARTHING_MODELS") or "~/.cache/farthing/models").expanduser().absolute()


def entries() -> dict[str, Entry]:
    """The catalogue, by name, in its own order."""
    with CATALOG_FILE.open("rb") as file:
        tables = tomllib.load(file)
    return {
        name: Entry(
            name,
            table["architecture"],
            table["parameters"],
            table["licence"],
            table["size"],
            PackageSource(**table["package"]) if "package" in table else HubSource(**table["hub"]),
            table.get("sha256"),
        )
        for name, table in tables.items()
    }


def find(name: str) -> Entry:
    """The catalogue's entry; raises CatalogError naming the ones there are."""
    known = entries()
    if name not in known:
        raise CatalogError(f"no model is called {name!r}. The catalogue has: {', '.join(known)}.")
    return known[name]


def pull(name: str, progress: Progress | None = None) -> Path:
    """Path of the model, fetched first if it is not here. Raises CatalogError.

    An interrupted pull goes on where it stopped. Of two pulls of one model at once, the second waits for the first.
    """
    entry = find(name)
    report = progress or (lambda done, total: None)
    if not entry.present:
        _make_folder()
        with _lock(entry, report):
            if not entry.present:
                if isinstance(entry.source, HubSource):
                    model_sources.fetch_hub(entry.source, entry.size, entry.path, report)
                else:
                    model_sources.fetch_package(entry.source, entry.size, entry.sha256 or "", entry.path, report)
    report(entry.size, entry.size)
    return entry.path


def resolve(name_or_path: str, progress: Progress | None = None) -> Path:
    """Path of a model given by its catalogue name (fetched if needed), or by a GGUF file's or a folder's path."""
    if name_or_path in entries():
        return pull(name_or_path, progress)
    path = Path(name_or_path).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise CatalogError(f"{path} is not a model folder: it has no config.json")
        return path
    if path.is_file():
        with path.open("rb") as file:
            if file.read(4) != b"GGUF":
                raise CatalogError(f"{path} is not a GGUF file; give a GGUF file or a folder with safetensors files")
        return path
    raise CatalogError(
        f"{name_or_path!r} is neither a model of the catalogue nor a file or folder here. "
        f"The catalogue has: {', '.join(entries())}."
    )


def verify(name: str) -> None:
    """Hash a model on this machine again. Raises CatalogError if it is not here or is not what was fetched."""
    entry = find(name)
    if not entry.present:
        raise CatalogError(f"{name} is not on this machine: pull it first")
    if isinstance(entry.source, HubSource):
        damaged = ", ".join(model_sources.damaged_files(entry.path))
    else:
        damaged = entry.path.name if model_sources.sha256(entry.path) != entry.sha256 else ""
    if damaged:
        raise CatalogError(f"{name} is damaged ({damaged}): remove it and pull it again")


def remove(name: str) -> bool:
    """Delete a model and what an interrupted pull left of it; False when there was nothing. Raises CatalogError."""
    entry = find(name)
    paths = [path for path in (entry.path, *model_sources.leftovers(entry.path)) if path.exists()]
    if paths:
        with _lock(entry, lambda done, total: None):
            for path in paths:
                model_sources.delete(path)
    return bool(paths)


def _make_folder() -> None:
    folder = models_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CatalogError(
            f"the models' folder {folder} can't be made ({error.strerror}): set FARTHING_MODELS to one you can write to"
        ) from error


@contextmanager
def _lock(entry: Entry, report: Progress) -> Iterator[None]:
    """Hold the model's lock; while another process holds it, report how far that one is."""
    path = models_folder() / f".{entry.name}.lock"
    try:
        file = path.open("wb")
    except OSError as error:
        raise CatalogError(
            f"the models' folder can't be written to ({path}: {error.strerror}): set FARTHING_MODELS to one you can"
        ) from error
    with file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                partial = model_sources.partial_path(entry.path)
                if partial.is_file():
                    report(min(partial.stat().st_size, entry.size), entry.size)
                time.sleep(model_sources.POLL_SECONDS)
        yield
