"""What the partitions of the ledger and its sums take on the disk."""

from datetime import date

import msgspec
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from billing.partitions import PARTITIONED, partition_name, partitions

_SIZE = text("""
    SELECT pg_total_relation_size(oid) AS bytes, nullif(reltuples, -1)::bigint AS rows
    FROM pg_class WHERE oid = CAST(:name AS regclass)
""")


class Stored(msgspec.Struct, frozen=True, kw_only=True):
    partition: str
    day: date | None
    """Its day, or the first of its month; None of a default partition."""
    rows: int | None
    """As PostgreSQL last estimated them; None where it never did."""
    bytes: int
    """With its indexes."""


async def stored(conn: AsyncConnection) -> list[Stored]:
    """Every partition, the oldest first, those without a day last."""
    found = []
    for table in PARTITIONED:
        days: list[date | None] = [*await partitions(conn, table), None]
        for day in days:
            name = f"{table}_default" if day is None else partition_name(table, day)
            row = (await conn.execute(_SIZE, {"name": name})).one()
            found.append(Stored(partition=name, day=day, rows=row.rows, bytes=row.bytes))
    return sorted(found, key=lambda each: (each.day is None, each.day or date.max, each.partition))
