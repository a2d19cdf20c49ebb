"""Partitions: of the ledger by day, by range of the UUIDv7 id; of its sums by month. A default one catches the rest.

Retention drops a day's or month's table; nothing is ever refused because its day has no table yet.
"""

import re
from collections.abc import Iterator
from datetime import UTC, date, datetime, time, timedelta
from uuid import UUID

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from billing.ids import smallest_id

BY_DAY = {"operation": "id", "attempt": "operation_id", "payload": "operation_id"}
"""Partitioned table -> the id whose range decides the partition."""
BY_MONTH = {f"usage_{step}": "bucket" for step in ("hour", "day", "hour_tag", "day_tag")}
"""The same, of time."""
PARTITIONED = BY_DAY | BY_MONTH

DAYS_AHEAD = 7
EVERY_SECONDS = 600.0
LOCK_SECONDS = 0.5

_NAME = re.compile(rf"^(({'|'.join(BY_DAY)})_(default|\d{{8}})|({'|'.join(BY_MONTH)})_(default|\d{{6}}))$")
_LAST_MILLISECOND = int(datetime(9999, 12, 30, tzinfo=UTC).timestamp()) * 1000
_LOCK = 0x6661727468_02  # "farth", 2: one maker of partitions at a time


def is_partition(table: str) -> bool:
    """Whether `table` is named like a partition (`operation_20261129`, `usage_hour_202611`, `attempt_default`)."""
    return _NAME.match(table) is not None


def partition_name(table: str, day: date) -> str:
    """Of the partition that has `day`."""
    return f"{table}_{day:%Y%m%d}" if table in BY_DAY else f"{table}_{day:%Y%m}"


async def give_way(conn: AsyncConnection) -> None:
    """Let the rest of `conn`'s transaction fail, rather than hold up others, where it would wait long for a lock.

    Shorter than PostgreSQL's pause before it looks for a deadlock: whoever makes or drops a partition yields, nobody
    else does.
    """
    await conn.execute(text(f"SET LOCAL lock_timeout = '{LOCK_SECONDS:g}s'"))


async def make_ahead(engine: AsyncEngine) -> None:
    """Make the partitions of the days to come. Raises what the database raises; the next turn does what is left."""
    async with engine.begin() as conn:
        await give_way(conn)
        await ensure_partitions(conn, DAYS_AHEAD)


async def ensure_partitions(conn: AsyncConnection, days_ahead: int) -> list[str]:
    """Make the partitions of today (UTC, by the database's clock) and `days_ahead` more; return the names made.

    Rows that already wait in the default partition for one of these days move into it. Runs inside the caller's
    transaction; partitions that exist are left alone.
    """
    now: datetime = (await conn.execute(text("SELECT now()"))).scalar_one()
    today = now.astimezone(UTC).date()
    made = []
    for table in PARTITIONED:
        for day in (today + timedelta(days=n) for n in range(days_ahead + 1)):
            if await ensure_partition(conn, table, day):
                made.append(partition_name(table, day))
    return made


async def ensure_partition(conn: AsyncConnection, table: str, day: date) -> bool:
    """Make the partition of `table` that has `day`, as `ensure_partitions` does; return whether it was not there."""
    name = partition_name(table, day)
    # Not to_regclass: that may remember from before the lock that there was none.
    exists = text("SELECT 1 FROM pg_class WHERE relname = :name AND pg_table_is_visible(oid)")
    if (await conn.execute(exists, {"name": name})).scalar() is not None:
        return False
    await conn.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _LOCK})
    if (await conn.execute(exists, {"name": name})).scalar() is not None:
        return False
    for statement in _make(table, name, day):
        await conn.execute(text(statement))
    return True


async def partitions(conn: AsyncConnection, table: str) -> list[date]:
    """The days (of months: the first of each) that have a partition of `table` to themselves, oldest first."""
    query = text("SELECT inhrelid::regclass::text FROM pg_inherits WHERE inhparent = CAST(:table AS regclass)")
    suffixes = (str(name).rpartition("_")[2] for name in (await conn.execute(query, {"table": table})).scalars())
    return sorted(
        datetime.strptime(each, "%Y%m%d" if table in BY_DAY else "%Y%m").date()
        for each in suffixes
        if each != "default"
    )


async def first_in_default(conn: AsyncConnection, table: str) -> date | None:
    """The day of the first row in the default partition of `table`; None when that is empty."""
    key = PARTITIONED[table]
    first = text(f"SELECT {key} FROM {table}_default ORDER BY {key} LIMIT 1")  # noqa: S608 - names are ours
    value = (await conn.execute(first)).scalar_one_or_none()
    if value is None:
        return None
    moment = value if isinstance(value, datetime) else datetime(1970, 1, 1, tzinfo=UTC) + _age(value)
    return moment.astimezone(UTC).date()


def _age(identifier: UUID) -> timedelta:
    """Since 1970. An id that is no UUIDv7 may tell a time that no date can: it counts as new, and stays."""
    return timedelta(milliseconds=min(identifier.int >> 80, _LAST_MILLISECOND))


def range_of(table: str, day: date) -> tuple[str, str]:
    """First value in the partition of `table` that has `day`, and first after it, as text."""
    if table in BY_DAY:
        start, end = (datetime.combine(day + timedelta(days=n), time(), UTC) for n in (0, 1))
        return str(smallest_id(start)), str(smallest_id(end))
    first = day.replace(day=1)
    return f"{first} 00:00Z", f"{(first + timedelta(days=31)).replace(day=1)} 00:00Z"


def _make(table: str, name: str, day: date) -> Iterator[str]:
    """Build the partition's table apart and attach it: that locks the parent less than CREATE … PARTITION OF does."""
    key, spare = PARTITIONED[table], f"{table}_default"
    start, end = range_of(table, day)
    yield f"CREATE TABLE {name} (LIKE {table} INCLUDING ALL)"
    # No f-string below takes anything from outside: names are ours, ids are hexadecimal, times are dates.
    yield (
        f"WITH moved AS (DELETE FROM {spare} WHERE {key} >= '{start}' AND {key} < '{end}' RETURNING *) "  # noqa: S608
        f"INSERT INTO {name} SELECT * FROM moved"
    )
    yield f"ALTER TABLE {table} ATTACH PARTITION {name} FOR VALUES FROM ('{start}') TO ('{end}')"
