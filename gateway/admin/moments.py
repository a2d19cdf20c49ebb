"""Moments and periods as callers write them."""

from datetime import UTC, datetime

EARLIEST, LATEST = datetime(1971, 1, 1, tzinfo=UTC), datetime(9000, 1, 1, tzinfo=UTC)
"""Ids carry the time, and know none before 1970."""


def moment(given: datetime | None) -> datetime | None:
    """The same. Raises ValueError without a time zone: two machines would read it differently."""
    if given is not None and given.tzinfo is None:
        raise ValueError("a moment needs its time zone, like 2026-12-31T23:59:59Z")
    return given


def period(start: datetime, end: datetime) -> tuple[datetime, datetime]:
    """The same, from start to end. Raises ValueError when it is empty or absurd, or an end has no time zone."""
    moment(start)
    moment(end)
    if start < EARLIEST or end > LATEST:
        raise ValueError(f"the period must lie between the years {EARLIEST.year} and {LATEST.year}")
    if start >= end:
        raise ValueError("the period is empty: its end must be after its start")
    return start, end
