"""Secrets that the configuration only points at: in an environment variable, or in a file."""

import os
from pathlib import Path

from pydantic import SecretStr


def read_secret(env: str | None, file: Path | None, name: str) -> SecretStr | None:
    """What the settings `<name>_env` or `<name>_file` point at; None where neither is given.

    Raises ValueError when it cannot be had, or could not stand in an HTTP header.
    """
    if env is not None:
        key = os.environ.get(env)
        if not key:
            raise ValueError(f"the environment variable {env} named by {name}_env is not set")
    elif file is not None:
        try:
            key = file.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
            raise ValueError(f"{name}_file {file} cannot be read: {reason}") from None
        if not key:
            raise ValueError(f"{name}_file {file} is empty")
    else:
        return None
    if not key.isprintable() or not key.isascii():
        raise ValueError("its key has characters that no HTTP header can carry")
    return SecretStr(key)
