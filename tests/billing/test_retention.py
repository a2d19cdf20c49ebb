"""What is old goes by partitions, and what it came to stays."""

import asyncio
import random
from collections.abc import AsyncIterator
from datetime import UTC, date, datetime, time, timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

import asyncpg
import pytest
from sqlalchemy import func, insert, select, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncEngine

from billing.filters import Filters
from billing.gaps import Gap, gap, gap_of_sums
from billing.ids import smallest_id
from billing.measures import summed
from billing.partitions import BY_MONTH, ensure_partition, partitions
from billing.records import OperationRecord
from billing.retention import Keep, enforce, expired
from billing.rollups import refresh
from billing.spool import Spool
from billing.tables import operation, payload, usage_day, usage_hour, usage_hour_tag
from billing.usage_rows import usage_rows
from tests.billing.test_rollups import made_at, store

TODAY = datetime.combine(datetime.now(UTC).date(), time(), UTC)
DAY = timedelta(days=1)


@pytest.fixture
async def spool(tmp_path: Path) -> AsyncIterator[Spool]:
    spool = Spool(tmp_path)
    yield spool
    await spool.close()


async def some(engine: AsyncEngine, spool: Spool, *days_ago: int, each: int = 5) -> list[OperationRecord]:
    luck = random.Random(7)
    records = [made_at(luck, TODAY - n * DAY + luck.random() * DAY) for n in days_ago for _ in range(each)]
    await store(engine, spool, records)
    return records


async def of(engine: AsyncEngine, table: str) -> list[date]:
    async with engine.connect() as conn:
        return await partitions(conn, table)


async def all_sums(engine: AsyncEngine) -> list[Any]:
    """What the hours, days and tags came to, and what a reader is told."""
    found: list[Any] = []
    async with engine.connect() as conn:
        for table in (usage_hour, usage_day, usage_hour_tag):
            found.append((await conn.execute(select(*summed(table)))).one())
        rows = await usage_rows(conn, TODAY - 500 * DAY)
        found.append((await conn.execute(select(*summed(rows)))).one())
    return found


async def count(engine: AsyncEngine, table: Any) -> int:
    async with engine.connect() as conn:
        return int((await conn.execute(select(func.count()).select_from(table))).scalar_one())


async def test_old_days_go_and_what_they_came_to_stays(engine: AsyncEngine, spool: Spool) -> None:
    await some(engine, spool, 0, 1, 29, 30, 31, 40)
    await refresh(engine)
    before = await all_sums(engine)
    keep = Keep(operations=30)
    gone = await enforce(engine, keep)
    assert gone == [f"{table}_{TODAY - n * DAY:%Y%m%d}" for n in (40, 31) for table in ("operation", "attempt")]
    assert await count(engine, operation) == 20
    assert await all_sums(engine) == before
    assert await enforce(engine, keep) == []


async def test_sums_stay_exact_when_a_row_of_a_dropped_day_arrives(engine: AsyncEngine, spool: Spool) -> None:
    """It is stored, counted, and goes with the next turn; an hour that straddles the days keeps both parts."""
    luck = random.Random(1)
    midnight = TODAY - 40 * DAY
    late_id = UUID(int=smallest_id(midnight - timedelta(seconds=1)).int + 1)
    straddling = made_at(luck, midnight + timedelta(seconds=1), id=late_id)
    await store(engine, spool, [straddling, *(made_at(luck, midnight + n * timedelta(minutes=1)) for n in range(9))])
    keep = Keep(operations=40)
    assert [name[:9] for name in await enforce(engine, keep)] == ["operation", "attempt_2"]
    await refresh(engine)
    async with engine.connect() as conn:
        rows = select(usage_day.c.bucket, func.sum(usage_day.c.operations)).group_by(usage_day.c.bucket)
        assert [tuple(row) for row in await conn.execute(rows)] == [(midnight, 10)]

    late = [made_at(luck, midnight - timedelta(minutes=n)) for n in (1, 2)]
    for record in late:
        await store(engine, spool, [record])
        await refresh(engine)
        before = await all_sums(engine)
        assert len(await enforce(engine, keep)) == 2
        assert await all_sums(engine) == before
    assert before[0].operations == before[3].operations == 12
    assert await count(engine, operation) == 9


async def test_each_has_its_own_days(engine: AsyncEngine, spool: Spool) -> None:
    records = await some(engine, spool, 1, 70, 200, each=1)
    bodies = {"request": b"{}", "request_bytes": 2, "answer": b"", "answer_bytes": 0}
    async with engine.begin() as conn:
        await conn.execute(insert(payload), [bodies | {"operation_id": record.id} for record in records])
    await refresh(engine)
    await enforce(engine, Keep(operations=None, payloads=1))
    assert await count(engine, payload) == 1
    assert await count(engine, operation) == 3
    await enforce(engine, Keep(operations=60, rollups=100))
    assert await count(engine, operation) == 1
    assert await count(engine, usage_day) == 2
    for table in BY_MONTH:
        assert len(await of(engine, table)) == 2


async def test_days_without_sums_are_not_forgotten(engine: AsyncEngine, spool: Spool) -> None:
    await some(engine, spool, 1, 70, 200, 201, each=1)
    await refresh(engine)
    keep = Keep(operations=60, rollups=100)
    with_sums, without = (TODAY - 70 * DAY).date(), [(TODAY - n * DAY).date() for n in (201, 200)]
    for _ in range(2):  # and the next turn changes nothing
        await enforce(engine, keep)
        async with engine.connect() as conn:
            whole, old, recent = [
                await gap(conn, TODAY - first * DAY, TODAY - last * DAY)
                for first, last in ((300, 0), (201, 200), (200 - 1, 71))
            ]
            of_sums = await gap_of_sums(conn, TODAY - 300 * DAY, TODAY)
            of_nobody = await gap(conn, TODAY - 300 * DAY, TODAY, Filters(org_id=UUID(int=1)))
        assert whole == Gap(days=3, first=without[0], last=with_sums, without_sums=2)
        assert str(whole).endswith("`farthing usage --by user` still has what it came to, but for the first 2 days")
        assert old == Gap(days=1, first=without[0], last=without[0], without_sums=1)
        assert str(old).endswith("what was called then is not in this; what it came to is dropped too")
        assert recent is None
        assert of_sums == of_nobody == Gap(days=2, first=without[0], last=without[1], without_sums=2)


async def test_nothing_is_dropped_under_a_reader_and_the_next_turn_does_it(engine: AsyncEngine, spool: Spool) -> None:
    await some(engine, spool, 1, 40)
    keep = Keep(operations=30)
    async with engine.connect() as reader:
        await reader.execute(select(operation))
        with pytest.raises(DBAPIError, match="lock timeout"):
            await enforce(engine, keep)
        assert await count(engine, operation) == 10
    assert len(await enforce(engine, keep)) == 2
    assert await count(engine, operation) == 5


async def test_rows_that_come_while_a_day_goes_are_not_lost(engine: AsyncEngine, spool: Spool, tmp_path: Path) -> None:
    luck = random.Random(2)
    await some(engine, spool, 40, each=50)

    async def come(number: int) -> None:
        own = Spool(tmp_path / f"more{number}")
        for _ in range(5):
            record = made_at(luck, TODAY - 40 * DAY + luck.random() * DAY)
            await own.append(record)
            for _ in range(10):
                try:
                    await store(engine, own, [])
                except (DBAPIError, asyncpg.PostgresError):  # its partition went, or a deadlock; the ledger tries again
                    continue
                break
        assert own.depth == 0
        await own.close()

    async def go() -> None:
        for _ in range(5):
            try:
                await enforce(engine, Keep(operations=30))
            except DBAPIError:
                continue

    await asyncio.gather(*(come(n) for n in range(3)), go())
    await refresh(engine)
    assert (await all_sums(engine))[0].operations == 65


async def test_what_would_go_is_listed(engine: AsyncEngine) -> None:
    async with engine.begin() as conn:
        await ensure_partition(conn, "operation", TODAY.date() - 10 * DAY)
        await ensure_partition(conn, "usage_hour", date(2020, 1, 15))
        found = await expired(conn, Keep(operations=9, rollups=9))
        assert [(each.day, each.tables) for each in found] == [
            (TODAY.date() - 10 * DAY, ("operation",)),
            (date(2020, 1, 1), ("usage_hour",)),
        ]
        assert await expired(conn, Keep(operations=10)) == []
        assert (await conn.execute(text("SELECT to_regclass('usage_hour_202001')"))).scalar_one() is not None


@pytest.mark.parametrize(
    ("days", "why"),
    [
        ({"operations": 0}, "operations cannot be kept for 0 days"),
        ({"payloads": -1}, "payloads cannot be kept for -1 days"),
        ({"rollups": 30}, "at least as long"),
        ({"operations": 31, "rollups": 30}, "at least as long"),
    ],
)
def test_what_cannot_be_meant_is_refused(days: dict[str, int], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        Keep(**days)
