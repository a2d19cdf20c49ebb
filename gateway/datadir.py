"""The data folder of one `farthing up`: made, checked, locked, and given a starting configuration."""

import contextlib
import fcntl
import os
import tomllib
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any


class DataDirError(RuntimeError):
    """The folder cannot be used; the message says why and what to do."""


@contextlib.contextmanager
def locked(data_dir: Path) -> Iterator[None]:
    """Make the folder if need be and hold its lock inside: one `farthing up` a folder.

    Raises DataDirError when it cannot be written, or when another process (named by its pid) holds it.
    """
    try:
        data_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        (data_dir / "logs").mkdir(exist_ok=True)
        lock = (data_dir / "up.lock").open("a+")
    except OSError as error:
        raise DataDirError(
            f"cannot write to the data folder {data_dir}: {error.strerror}. Choose another with --data-dir"
        ) from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the kernel drops it when we die
        except BlockingIOError:
            lock.seek(0)
            raise DataDirError(
                f"another `farthing up` (pid {lock.read().strip() or 'unknown'}) is using {data_dir}."
                " Stop it, or give this one a --data-dir of its own"
            ) from None
        lock.truncate(0)
        lock.write(f"{os.getpid()}\n")
        lock.flush()
        yield


def log_file(data_dir: Path, name: str) -> Path:
    """`logs/NAME.log`, empty; what was in it stays as `logs/NAME.log.1`."""
    log = data_dir / "logs" / f"{name}.log"
    if log.exists():
        log.replace(log.with_suffix(".log.1"))
    log.touch()
    return log


def configuration(data_dir: Path) -> tuple[Path, dict[str, Any]]:
    """`farthing.toml` and what is in it, made from the starter on the first run and kept ever after."""
    path = data_dir / "farthing.toml"
    if not path.exists():
        path.write_text((files("gateway") / "starter.toml").read_text(encoding="utf-8"), encoding="utf-8")
    try:
        return path, tomllib.loads(path.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise DataDirError(f"{path} is not valid TOML: {error}") from error
