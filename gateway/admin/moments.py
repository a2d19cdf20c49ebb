"""Moments as callers write them."""

from datetime import datetime


def moment(given: datetime | None) -> datetime | None:
    """The same. Raises ValueError without a time zone: two machines would read it differently."""
    if given is not None and given.tzinfo is None:
        raise ValueError("a moment needs its time zone, like 2026-12-31T23:59:59Z")
    return given
