"""Retention: what is older than it is kept for goes by whole partitions, never row by row.

Before a day of the ledger goes, what it came to is written into the rollups apart (`dropped`), so that they stay as
they are, also when a row of that day arrives afterwards. Old rows that wait in a default partition get their own first.
Dropping waits for others' locks only shortly, and has its next turn.
"""

from datetime import UTC, date, datetime, timedelta
from uuid import UUID

import msgspec
import structlog
from sqlalchemy import select, text
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from billing.partitions import (
    BY_MONTH,
    ensure_partition,
    first_in_default,
    give_way,
    partition_name,
    partitions,
    range_of,
)
from billing.rollups import lay_aside
from billing.tables import operation, usage_dropped, usage_hour

EVERY_SECONDS = 3600.0

log = structlog.get_logger(__name__)


class Keep(msgspec.Struct, frozen=True, kw_only=True):
    """For how many whole days each is kept, beside the running one; None: for ever.

    Raises ValueError where rollups would go before the operations that they sum up.
    """

    operations: int | None = None
    """With their attempts."""
    payloads: int | None = None
    rollups: int | None = None
    """By whole months."""

    def __post_init__(self) -> None:
        for name, days in msgspec.structs.asdict(self).items():
            if days is not None and days < 1:
                raise ValueError(f"{name} cannot be kept for {days} days; give 1 or more, or nothing to keep them")
        if self.rollups is not None and (self.operations is None or self.operations > self.rollups):
            raise ValueError("rollups must be kept at least as long as the operations that they sum up")

    def groups(self) -> list[tuple[tuple[str, ...], int]]:
        """Tables whose partitions go together, and after how many days; without what is kept for ever."""
        groups = {("operation", "attempt"): self.operations, ("payload",): self.payloads, (*BY_MONTH,): self.rollups}
        return [(tables, days) for tables, days in groups.items() if days is not None]


class Expired(msgspec.Struct, frozen=True, kw_only=True):
    """Partitions that go together."""

    day: date
    """Theirs; the first of a month where they are a month's."""
    tables: tuple[str, ...]
    """Whose partitions they are."""

    @property
    def names(self) -> list[str]:
        return [partition_name(table, self.day) for table in self.tables]


async def enforce(engine: AsyncEngine, keep: Keep) -> list[str]:
    """Drop what is older than `keep` says; return the names of the partitions that went.

    Raises what the database raises, a lock that could not be had in time among it; what went until then is gone.
    """
    async with engine.connect() as conn:
        today = await _today(conn)
    for tables, days in keep.groups():
        for table in tables:
            await _empty_default(engine, table, today - timedelta(days=days))
    async with engine.connect() as conn:
        old = await expired(conn, keep)
    for each in old:
        async with engine.begin() as conn:
            await give_way(conn)
            if "operation" in each.tables:
                # From here on nothing is added to the day, and what is late goes elsewhere.
                await conn.execute(text(f"LOCK TABLE {', '.join(each.names)} IN SHARE MODE"))
                start, end = (UUID(bound) for bound in range_of("operation", each.day))
                await lay_aside(conn, each.day, (operation.c.id >= start) & (operation.c.id < end))
            if usage_hour.name in each.tables:
                await _note_days(conn, each.day)
            await conn.execute(text(f"DROP TABLE {', '.join(each.names)}"))
        log.info("partitions_dropped", partitions=each.names)
    return [name for each in old for name in each.names]


async def _note_days(conn: AsyncConnection, month: date) -> None:
    """Keep of which days of the ledger a month's sums were all that there was: they are about to go."""
    dropped = usage_hour.c.dropped
    days = select(dropped).where(dropped >= month, dropped < _next(usage_hour.name, month)).distinct()
    await conn.execute(insert(usage_dropped).from_select(["day"], days).on_conflict_do_nothing())


async def expired(conn: AsyncConnection, keep: Keep) -> list[Expired]:
    """The partitions that are older than `keep` says, oldest first; rollups last, as what goes is laid aside there."""
    today = await _today(conn)
    found = []
    for tables, days in keep.groups():
        whose: dict[date, list[str]] = {}
        for table in tables:
            for day in await partitions(conn, table):
                if _next(table, day) <= today - timedelta(days=days):
                    whose.setdefault(day, []).append(table)
        found += [Expired(day=day, tables=tuple(those)) for day, those in whose.items()]
    return sorted(found, key=lambda each: (each.tables[0] in BY_MONTH, each.day))


async def _empty_default(engine: AsyncEngine, table: str, before: date) -> None:
    """Give old rows in the default partition partitions of their own, one transaction each."""
    while True:
        async with engine.begin() as conn:
            await give_way(conn)
            day = await first_in_default(conn, table)
            if day is None or _next(table, day) > before or not await ensure_partition(conn, table, day):
                return


def _next(table: str, day: date) -> date:
    """The first day after the partition of `table` that has `day`."""
    return (
        day + timedelta(days=1) if table not in BY_MONTH else (day.replace(day=1) + timedelta(days=31)).replace(day=1)
    )


async def _today(conn: AsyncConnection) -> date:
    now: datetime = (await conn.execute(text("SELECT now()"))).scalar_one()
    return now.astimezone(UTC).date()
