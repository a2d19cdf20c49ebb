"""Clocks that jump back, and replicas whose clocks differ: ids, partitions and sums are still right."""

import random
from datetime import UTC, datetime, timedelta
from pathlib import Path
from uuid import UUID

from sqlalchemy import func, select, text
from sqlalchemy.ext.asyncio import AsyncEngine

from billing.ids import new_id, smallest_id
from billing.partitions import ensure_partition, partition_name
from billing.rollups import refresh
from billing.spool import Spool
from billing.tables import operation, usage_day
from billing.tables.usage import OWNERS
from billing.usage_rows import floor
from tests.billing.test_partitions import time_of
from tests.billing.test_rollups import Expected, made_at, store, stored, sums

MIDNIGHT = datetime(2026, 11, 29, tzinfo=UTC)
SECOND = timedelta(seconds=1)
HOUR = timedelta(hours=1)


async def test_a_jump_back_over_midnight_and_two_replicas_apart(engine: AsyncEngine, tmp_path: Path) -> None:
    """One replica is 30 s ahead; the other's clock goes back an hour at half past midnight.

    A process that runs on makes ids as of before the jump (they only grow) with times after it; one that starts makes
    both anew.
    """
    luck = random.Random(5)
    expected, spools = Expected(), [Spool(tmp_path / str(n)) for n in range(2)]
    async with engine.begin() as conn:
        for day in (MIDNIGHT - HOUR, MIDNIGHT):
            for table in ("operation", "attempt"):
                await ensure_partition(conn, table, day.date())
    for n in range(120):
        now = MIDNIGHT - 30 * SECOND + n * SECOND
        back = now - HOUR if n >= 60 else now
        made = [
            (spools[0], made_at(luck, now + 30 * SECOND)),
            (spools[1], made_at(luck, back)),
            (spools[1], made_at(luck, back, id=UUID(int=smallest_id(max(now, back)).int | luck.getrandbits(60)))),
        ]
        expected.records |= {record.id: record for _, record in made}
        for spool, record in made:
            await spool.append(record)
    for spool in spools:
        await store(engine, spool, [])
        await store(engine, spool, expected.records.values())  # again, all of it, through either
    await refresh(engine)
    assert await sums(engine, stored(usage_day, OWNERS)) == expected.owners(lambda at: floor(at, "day"))
    async with engine.connect() as conn:
        where = text("SELECT id, tableoid::regclass::text FROM operation")
        for identifier, partition in await conn.execute(where):
            assert partition == partition_name("operation", time_of(identifier))
        assert (await conn.execute(select(func.count()).select_from(operation))).scalar_one() == len(expected.records)
    for spool in spools:
        await spool.close()


def test_ids_of_one_process_only_grow() -> None:
    ids = [new_id() for _ in range(10_000)]
    assert ids == sorted(set(ids))
