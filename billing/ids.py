"""UUIDv7 ids: the first 48 bits are the time of making, in milliseconds since 1970, so ids sort by time (RFC 9562)."""

from datetime import UTC, datetime
from uuid import UUID, SafeUUID

from uuid_utils import uuid7

_UNKNOWN = SafeUUID.unknown
_VERSION_AND_VARIANT = (7 << 76) | (0b10 << 62)


def new_id() -> UUID:
    """A new UUIDv7; later ids of one process are greater."""
    return _standard(uuid7().bytes)


def new_written_id() -> tuple[UUID, str]:
    """A new id, and the same as text."""
    made = uuid7()
    return _standard(made.bytes), str(made)


def _standard(data: bytes) -> UUID:
    """Python's own UUID of what is one for certain: its constructor's checks take longer than all the rest."""
    made = object.__new__(UUID)
    object.__setattr__(made, "int", int.from_bytes(data, "big"))
    object.__setattr__(made, "is_safe", _UNKNOWN)
    return made


def smallest_id(moment: datetime) -> UUID:
    """The smallest UUIDv7 of `moment` (to the millisecond): `id >= smallest_id(t)` reads as "made at t or later".

    Raises ValueError when `moment` has no time zone or lies before 1970.
    """
    if moment.tzinfo is None:
        raise ValueError("the moment needs a time zone")
    since = moment - datetime(1970, 1, 1, tzinfo=UTC)
    milliseconds = (since.days * 86_400 + since.seconds) * 1000 + since.microseconds // 1000
    if milliseconds < 0:
        raise ValueError(f"a UUIDv7 cannot tell a time before 1970: {moment}")
    return UUID(int=(milliseconds << 80) | _VERSION_AND_VARIANT)
