"""Moments and periods as callers write them."""

from datetime import datetime


def moment(given: datetime | None) -> datetime | None:
    """The same. Raises ValueError without a time zone: two machines would read it differently."""
    if given is not None and given.tzinfo is None:
        raise ValueError("a moment needs its time zone, like 2026-12-31T23:59:59Z")
    return given


def period(start: datetime, end: datetime) -> tuple[datetime, datetime]:
    """The same, from start to end. Raises ValueError when it is empty, or an end has no time zone."""
    moment(start)
    moment(end)
    if start >= end:
        raise ValueError("the period is empty: its end must be after its start")
    return start, end
