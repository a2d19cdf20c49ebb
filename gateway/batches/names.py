"""Ids as OpenAI's clients see them: `file-` and `batch_`, then a UUID's 32 hexadecimal digits."""

import re
from uuid import UUID

_DIGITS = re.compile(r"[0-9a-f]{32}")


def file_name(identifier: UUID) -> str:
    return f"file-{identifier.hex}"


def batch_name(identifier: UUID) -> str:
    return f"batch_{identifier.hex}"


def file_id(name: str) -> UUID | None:
    """None when there cannot be a file of this id."""
    return _parse(name, "file-")


def batch_id(name: str) -> UUID | None:
    return _parse(name, "batch_")


def _parse(name: str, prefix: str) -> UUID | None:
    digits = name.removeprefix(prefix)
    return UUID(digits) if name.startswith(prefix) and _DIGITS.fullmatch(digits) else None
