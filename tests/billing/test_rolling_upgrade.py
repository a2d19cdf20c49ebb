"""A gateway of the version before, still running on a schema that is newer than it: what it writes is taken."""

import asyncio
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sqlalchemy import delete, select, text
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

import migrations
from billing.partitions import is_partition
from billing.rollups import refresh
from billing.spool import Spool
from billing.tables import usage_day, usage_day_tag, usage_hour, usage_hour_tag
from billing.tables.usage import CACHED_ANSWERS
from tests.billing.samples import an_operation
from tests.billing.test_rollups import store

BEFORE = "0012"
"""The schema of the oldest version that may run on. Later ones only add what it need not know."""
ROLLUPS = (usage_hour, usage_day, usage_hour_tag, usage_day_tag)

Columns = dict[str, dict[str, bool]]
"""Table -> column -> whether an INSERT must name it."""


async def columns(conn: AsyncConnection) -> Columns:
    query = text("""
        SELECT table_name, column_name, is_nullable = 'NO' AND column_default IS NULL AND is_identity = 'NO' AS needed
        FROM information_schema.columns WHERE table_schema = 'public'
    """)
    found: Columns = {}
    for row in await conn.execute(query):
        if not is_partition(row.table_name):
            found.setdefault(row.table_name, {})[row.column_name] = row.needed
    return found


async def before_and_now(database_url: str, engine: AsyncEngine) -> tuple[Columns, Columns]:
    await asyncio.to_thread(migrations.downgrade, database_url, BEFORE)
    async with engine.connect() as conn:
        before = await columns(conn)
    await engine.dispose()
    await asyncio.to_thread(migrations.upgrade, database_url)
    async with engine.connect() as conn:
        return before, await columns(conn)


async def test_no_table_needs_or_lacks_what_the_version_before_does_not_know(
    database_url: str, engine: AsyncEngine
) -> None:
    before, now = await before_and_now(database_url, engine)
    assert before["operation"]["id"] and not before["operation"]["recorded_at"]
    for table, known in before.items():
        assert known.keys() <= now[table].keys(), f"{table} has lost a column"
        needed = {name for name, is_needed in now[table].items() if is_needed}
        assert needed <= known.keys(), f"a row of {table} is refused without {needed - known.keys()}"


async def test_it_goes_on_summing_up(database_url: str, engine: AsyncEngine, tmp_path: Path) -> None:
    before, _ = await before_and_now(database_url, engine)
    spool = Spool(tmp_path)
    await store(engine, spool, [an_operation(tags={"feature": "search"}, started_at=datetime.now(UTC))])
    await spool.close()
    await refresh(engine)
    async with engine.begin() as conn:
        for table in ROLLUPS:
            rows: Sequence[Any] = (await conn.execute(select(table))).mappings().all()
            await conn.execute(delete(table))
            names = before[table.name]
            insert = f"INSERT INTO {table} ({', '.join(names)}) VALUES ({', '.join(f':{name}' for name in names)})"
            await conn.execute(text(insert), [{name: row[name] for name in names} for row in rows])
            again = (await conn.execute(select(table))).mappings().all()
            assert rows and [dict(row) for row in again] == [dict(row) for row in rows]
            assert {row[name] for row in again for name in CACHED_ANSWERS} == {0}
