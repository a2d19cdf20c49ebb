"""The data folder of one `farthing up`: made, checked, locked, and given a starting configuration."""

import contextlib
import fcntl
import json
import os
import shutil
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
        lock = (data_dir / "up.lock").open("a+b", buffering=0)
    except OSError as error:
        raise _unwritable(data_dir, error) from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the kernel drops it when we die
            lock.truncate(0)
            lock.write(b"%d\n" % os.getpid())
        except BlockingIOError:
            lock.seek(0)
            raise DataDirError(
                f"another `farthing up` (pid {lock.read().decode(errors='replace').strip() or 'unknown'}) is using"
                f" {data_dir}. Stop it, or give this one a --data-dir of its own"
            ) from None
        except OSError as error:
            raise _unwritable(data_dir, error) from error
        yield


def log_file(data_dir: Path, name: str) -> Path:
    """`logs/NAME.log`, empty; what was in it stays as `logs/NAME.log.1`. Raises DataDirError."""
    log = data_dir / "logs" / f"{name}.log"
    try:
        if log.exists():
            log.replace(log.with_suffix(".log.1"))
        log.touch()
    except OSError as error:
        raise _unwritable(data_dir, error) from error
    return log


def configuration(data_dir: Path) -> tuple[Path, dict[str, Any]]:
    """`farthing.toml` and what is in it, made from the starter on the first run and kept ever after.

    Of its contents only what `farthing up` itself uses is checked; the gateway checks all of it. Raises DataDirError.
    """
    path = data_dir / "farthing.toml"
    try:
        if not path.exists() or path.stat().st_size == 0:  # an empty one holds nothing that could be lost
            replace_file(path, (files("gateway") / "starter.toml").read_bytes())
        config = tomllib.loads(path.read_bytes().decode("utf-8"))
    except OSError as error:
        raise DataDirError(f"cannot read or make the configuration {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise DataDirError(f"{path} is not UTF-8 text (byte {error.start}): save it as UTF-8") from error
    except tomllib.TOMLDecodeError as error:
        raise DataDirError(f"{path} is not valid TOML: {error}") from error
    for name in ("roles", "models"):
        if not isinstance(config.get(name, {}), dict):
            raise DataDirError(f"{path}: `{name}` must be a table, like [{name}], not {config[name]!r}")
    for role, model in config.get("roles", {}).items():
        if not (isinstance(model, str) and model.strip() and "\0" not in model):
            raise DataDirError(f"{path}: roles.{role} must be the name of a model, not {model!r}")
    return path, config


def add_model(path: Path, config: dict[str, Any], model: str) -> None:
    """Append an unpriced model on the upstream `engine` to `path`, whose contents are `config`, and to `config`.

    Raises DataDirError, and leaves the file as it is, when a table appended to it would not be read as that.
    """
    name = json.dumps(model, ensure_ascii=False)
    entry = f'\n[models.{name}] # added by `farthing up`; give it a price to bill it\nupstreams = ["engine"]\n'
    models = {**config.get("models", {}), model: {"upstreams": ["engine"]}}
    try:
        data = path.read_bytes() + entry.encode()
        if _parsed(data) != {**config, "models": models}:
            raise DataDirError(
                f"{path} has no entry for the model {model!r} and none can be appended to it as it is written (`models`"
                f' is not made of [models.…] tables). Add {name} = {{ upstreams = ["engine"] }} to `models` by hand'
            )
        replace_file(path, data)
    except OSError as error:
        raise DataDirError(f"cannot add the model {model!r} to {path}: {error.strerror}") from error
    config["models"] = models


def replace_file(path: Path, data: bytes) -> None:
    """Write a whole file in one step: after a crash or on a full disk there is the old one or the new one."""
    target = path.resolve()  # of a symbolic link what it points to
    draft = target.with_name(f"{target.name}.tmp")
    try:
        with draft.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        if target.exists():
            shutil.copymode(target, draft)
        draft.replace(target)
    except OSError:
        draft.unlink(missing_ok=True)
        raise


def _parsed(data: bytes) -> dict[str, Any] | None:
    try:
        return tomllib.loads(data.decode("utf-8"))
    except ValueError:
        return None


def _unwritable(data_dir: Path, error: OSError) -> DataDirError:
    return DataDirError(f"cannot write to the data folder {data_dir}: {error.strerror}. Choose another with --data-dir")
