"""Day partitions of `operation` and `attempt`, by range of the UUIDv7 id; a default partition catches every other id.

Retention drops a day's table; nothing is ever refused because its day has no table yet.
"""

import re
from collections.abc import Iterator
from datetime import UTC, date, datetime, time, timedelta

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from billing.ids import smallest_id

PARTITIONED = {"operation": "id", "attempt": "operation_id"}
"""Partitioned table -> the column whose range decides the partition."""

_NAME = re.compile(rf"^({'|'.join(PARTITIONED)})_(default|\d{{8}})$")
_LOCK = 0x6661727468_02  # "farth", 2: one maker of partitions at a time


def is_partition(table: str) -> bool:
    """Whether `table` is named like a partition (`operation_20261129`, `attempt_default`)."""
    return _NAME.match(table) is not None


def partition_name(table: str, day: date) -> str:
    return f"{table}_{day:%Y%m%d}"


async def ensure_partitions(conn: AsyncConnection, days_ahead: int) -> list[str]:
    """Make the partitions of today (UTC, by the database's clock) and `days_ahead` more; return the names made.

    Rows that already wait in the default partition for one of these days move into it. Runs inside the caller's
    transaction; partitions that exist are left alone.
    """
    await conn.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _LOCK})
    now: datetime = (await conn.execute(text("SELECT now()"))).scalar_one()
    today = now.astimezone(UTC).date()
    made = []
    for table, key in PARTITIONED.items():
        for day in (today + timedelta(days=n) for n in range(days_ahead + 1)):
            name = partition_name(table, day)
            if (await conn.execute(text("SELECT to_regclass(:name)"), {"name": name})).scalar_one() is None:
                for statement in _make(table, key, day):
                    await conn.execute(text(statement))
                made.append(name)
    return made


def _make(table: str, key: str, day: date) -> Iterator[str]:
    """Build the day's table apart and attach it: that locks the parent less than CREATE … PARTITION OF does."""
    name, spare = partition_name(table, day), f"{table}_default"
    start = smallest_id(datetime.combine(day, time(), UTC))
    end = smallest_id(datetime.combine(day + timedelta(days=1), time(), UTC))
    yield f"CREATE TABLE {name} (LIKE {table} INCLUDING ALL)"
    # No f-string below takes anything from outside: names are ours, ids are hexadecimal.
    yield (
        f"WITH moved AS (DELETE FROM {spare} WHERE {key} >= '{start}' AND {key} < '{end}' RETURNING *) "  # noqa: S608
        f"INSERT INTO {name} SELECT * FROM moved"
    )
    yield f"ALTER TABLE {table} ATTACH PARTITION {name} FOR VALUES FROM ('{start}') TO ('{end}')"
