"""Days that retention has dropped from the ledger: what reads its rows lacks them, what reads the sums does not, unless
the sums of them are dropped too."""

from datetime import UTC, date, datetime, timedelta

import msgspec
from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncConnection

from billing.filters import Filters
from billing.tables import usage_dropped, usage_hour


class Gap(msgspec.Struct, frozen=True, kw_only=True):
    """Days (UTC) with operations that are in the ledger no longer."""

    days: int
    first: date
    last: date
    without_sums: int
    """Of `days`, the first so many: what they came to is dropped too."""

    def __str__(self) -> str:
        which = f"{self.first}" if self.days == 1 else f"{self.days} days from {self.first} to {self.last}"
        return f"retention has dropped {which} from the ledger: what was called then is not in this; {self._sums()}"

    def _sums(self) -> str:
        if not self.without_sums:
            return "`farthing usage --by user` still has what it came to"
        if self.without_sums == self.days:
            return "what it came to is dropped too"
        first = "the first day" if self.without_sums == 1 else f"the first {self.without_sums} days"
        return f"`farthing usage --by user` still has what it came to, but for {first}"


async def gap(
    conn: AsyncConnection,
    start: datetime,
    end: datetime,
    filters: Filters = Filters(),  # noqa: B008 - frozen
) -> Gap | None:
    """What operations that started in [start, end) and answer `filters` (its tag apart) have lost; None: nothing.

    Of days without sums nobody knows any more whose they were: they count whatever `filters` says.
    """
    dropped, bucket = usage_hour.c.dropped, usage_hour.c.bucket
    query = select(dropped).where(dropped.is_not(None), bucket > start - timedelta(hours=1), bucket < end).distinct()
    for name in ("org_id", "team_id", "user_id", "key_id", "model", "currency"):
        if (value := getattr(filters, name)) is not None:
            query = query.where(usage_hour.c[name] == value)
    with_sums = {*(await conn.execute(query)).scalars()}
    return _of(with_sums, await _without_sums(conn, start, end))


async def gap_of_sums(conn: AsyncConnection, start: datetime, end: datetime) -> Gap | None:
    """What the sums of [start, end) lack."""
    return _of(set(), await _without_sums(conn, start, end))


async def _without_sums(conn: AsyncConnection, start: datetime, end: datetime) -> set[date]:
    first, last = (moment.astimezone(UTC).date() for moment in (start, end - timedelta.resolution))
    query = select(usage_dropped.c.day).where(usage_dropped.c.day.between(first, last))
    return {*(await conn.execute(query)).scalars()}


def _of(with_sums: set[date], without: set[date]) -> Gap | None:
    days = with_sums | without
    if not days:
        return None
    return Gap(days=len(days), first=min(days), last=max(days), without_sums=len(without))
