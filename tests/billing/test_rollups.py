"""Rollups against a recomputation in Python of what the ledger was given: late, repeated and adjusted."""

import asyncio
import random
from collections import defaultdict
from collections.abc import Callable, Iterable
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy import Table, func, insert, select, text
from sqlalchemy.ext.asyncio import AsyncEngine

from billing.ids import new_id, smallest_id
from billing.ledger import Ledger
from billing.measures import summed
from billing.records import TOKEN_CLASSES, OperationRecord, TokenClasses
from billing.rollups import recompute, refresh, stale_hours
from billing.spool import Spool
from billing.tables import adjustment, usage_day, usage_day_tag, usage_hour, usage_hour_tag
from billing.tables.usage import AMOUNTS, COUNTS, MEASURES, OWNERS, SUMS, TAGS
from billing.usage_rows import floor, tag_usage_rows, usage_rows
from tests.billing.samples import KEY, ORG, an_attempt, an_operation

NOW = datetime(2026, 11, 29, 14, 30, 17, 123456, tzinfo=UTC)
HOUR = timedelta(hours=1)

Sums = dict[tuple[Any, ...], dict[str, Any]]


def made_at(luck: random.Random, at: datetime, **changes: Any) -> OperationRecord:
    status = luck.choice(["ok", "ok", "ok", "client_closed", "upstream_error", "refused", "invalid"])
    attempts = [
        an_attempt(
            number + 1,
            price_version_id=None,
            started_at=at,
            cost=luck.choice([None, Decimal(luck.randrange(10**9)) / 10**12]),
            tokens=TokenClasses(**{name: luck.choice([0, luck.randrange(1000)]) for name in TOKEN_CLASSES}),
        )
        for number in range(0 if status in ("refused", "invalid") else luck.choice([1, 1, 2]))
    ]
    fields: dict[str, Any] = {
        "id": UUID(int=smallest_id(at).int | luck.getrandbits(60)),
        "started_at": at,
        "user_id": luck.choice([None, KEY, ORG]),
        "key_id": luck.choice([KEY, ORG]),
        "model": luck.choice([None, "small-model", "big"]),
        "requested_model": luck.choice(["auto", "big"]),
        "currency": luck.choice(["USD", "USD", "EUR"]),
        "tags": luck.choice([{}, {"feature": "search"}, {"feature": "chat", "句": "ä" * 300}]),
        "status": status,
        "billed": luck.choice([None, Decimal(luck.randrange(10**9)) / 10**15]),
        "cost": luck.choice([None, Decimal(luck.randrange(10**9)) / 10**12]),
        "attempts": attempts,
    }
    return an_operation(**fields | changes)


async def store(engine: AsyncEngine, spool: Spool, records: Iterable[OperationRecord]) -> None:
    await asyncio.gather(*(spool.append(record) for record in records))
    await Ledger(engine, spool).drain()


async def adjust(engine: AsyncEngine, record: OperationRecord, billed: Decimal | None, cost: Decimal | None) -> None:
    values = {"id": new_id(), "operation_id": record.id, "number": 1, "started_at": record.started_at}
    values |= {"currency": record.currency, "billed_delta": billed, "cost_delta": cost, "reason": "r", "actor": "a"}
    async with engine.begin() as conn:
        await conn.execute(insert(adjustment).values(values))


class Expected:
    """What every operation and adjustment so far comes to."""

    def __init__(self) -> None:
        self.records: dict[UUID, OperationRecord] = {}
        self.adjusted: dict[UUID, list[tuple[Decimal | None, Decimal | None]]] = defaultdict(list)

    def owners(self, start_of: Callable[[datetime], Any], since: datetime | None = None) -> Sums:
        return self._sums(start_of, since, lambda each: [tuple(getattr(each, name) or None for name in OWNERS)])

    def tags(self, start_of: Callable[[datetime], Any]) -> Sums:
        def about(each: OperationRecord) -> list[tuple[Any, ...]]:
            return [(each.org_id, k, v[:256], each.model or None, each.currency) for k, v in each.tags.items()]

        return self._sums(start_of, None, about)

    def _sums(
        self,
        start_of: Callable[[datetime], Any],
        since: datetime | None,
        about: Callable[[OperationRecord], list[tuple[Any, ...]]],
    ) -> Sums:
        sums: Sums = defaultdict(lambda: dict.fromkeys(COUNTS + AMOUNTS, 0) | dict.fromkeys(SUMS))
        for each in self.records.values():
            if since is None or each.started_at >= since:
                for names in about(each):
                    for name, value in self._measures(each).items():
                        if value is not None:
                            found = sums[start_of(each.started_at), *names]
                            found[name] = value + (found[name] or 0)
        return dict(sums)

    def _measures(self, each: OperationRecord) -> dict[str, Any]:
        dispatched = each.status not in ("refused", "invalid")
        deltas = self.adjusted[each.id]
        billed, recorded = each.billed, each.cost
        if recorded is None and any(delta is not None for _, delta in deltas):  # then attempt 1's is known
            others = [one.cost for one in each.attempts if one.number != 1]
            if None in others:
                deltas = [(delta, None) for delta, _ in deltas]
            else:
                known = [one.cost for one in each.attempts if one.cost is not None]
                recorded = sum(known, Decimal(0)) if known else None
        cost = recorded
        for more_billed, more_cost in deltas:
            billed = billed if more_billed is None else (billed or 0) + more_billed
            cost = cost if more_cost is None else (cost or 0) + more_cost
        tokens = {name: sum(getattr(one.tokens, name) for one in each.attempts) for name in TOKEN_CLASSES}
        return {
            "operations": 1,
            "failed": each.status == "upstream_error",
            "refused": each.status == "refused",
            "invalid": each.status == "invalid",
            "client_closed": each.status == "client_closed",
            "routed": dispatched and each.requested_model == "auto",
            "cache_hits": sum(one.tokens.input_cached > 0 for one in each.attempts),
            **tokens,
            "billed_unknown": dispatched and billed is None,
            "cost_unknown": dispatched and cost is None,
            "cache_saved_unknown": tokens["input_cached"],
            "billed": each.billed,
            "cost": recorded,
            "margin": None if billed is None or cost is None else billed - cost,
            "billed_adjustment": sum((b for b, _ in deltas if b is not None), Decimal(0)),
            "cost_adjustment": sum((c for _, c in deltas if c is not None), Decimal(0)),
            "cache_saved": 0,
        }


async def sums(engine: AsyncEngine, query: Any) -> Sums:
    """The rows of `query`: what they are about -> their measures."""
    async with engine.connect() as conn:
        found = {}
        for row in (await conn.execute(query)).mappings():
            about = tuple(value or None for name, value in row.items() if name not in MEASURES)
            assert about not in found
            found[about] = {name: row[name] for name in MEASURES}
    return found


def stored(table: Table, about: tuple[str, ...]) -> Any:
    columns = [table.c.bucket, *(table.c[name] for name in about)]
    return select(*columns, *summed(table)).group_by(*columns)


@pytest.mark.parametrize("seed", range(3))
async def test_rollups_are_what_the_ledger_comes_to(engine: AsyncEngine, tmp_path: Path, seed: int) -> None:
    """Rows land late and again, some are adjusted; rollups are refreshed now and then, and read at any time."""
    luck = random.Random(seed)
    expected, spool = Expected(), Spool(tmp_path)
    for _ in range(6):
        spread = luck.choice([HOUR, timedelta(days=3), timedelta(days=70)])
        records = [made_at(luck, NOW - luck.random() * spread) for _ in range(luck.randrange(1, 60))]
        again = luck.sample(sorted(expected.records.values(), key=lambda each: each.id), min(5, len(expected.records)))
        await store(engine, spool, records + again)
        expected.records |= {record.id: record for record in records}
        for record in luck.sample(records, len(records) // 4):
            delta = luck.choice([None, Decimal(luck.randrange(-1000, 1000)) / 10**9])
            other = Decimal(5) / 10**7 if delta is None or luck.random() < 0.3 else None
            expected.adjusted[record.id].append((delta, other))
            await adjust(engine, record, delta, other)
        if luck.random() < 0.5:
            await refresh(engine)
        start = luck.choice([NOW - luck.random() * spread, floor(NOW - spread, "day"), floor(NOW - HOUR, "hour")])
        cut = start + luck.random() * spread
        async with engine.connect() as conn:
            rows = await usage_rows(conn, start, cuts=[cut], step=luck.choice(["hour", "day"]))
        columns = [(rows.c.at >= cut).label("after"), *(rows.c[name] for name in OWNERS)]
        read = await sums(engine, select(*columns, *summed(rows)).group_by(*columns))
        assert read == expected.owners(lambda at, cut=cut: at >= cut or None, start)
    async with engine.connect() as conn:
        rows = await tag_usage_rows(conn, NOW - timedelta(days=100))
    columns = [func.max("x").label("x"), *(rows.c[name] for name in TAGS)]
    assert await sums(engine, select(*columns, *summed(rows)).group_by(*columns[1:])) == expected.tags(lambda _: "x")

    await refresh(engine)
    for hourly, daily, about, wanted in (
        (usage_hour, usage_day, OWNERS, expected.owners),
        (usage_hour_tag, usage_day_tag, TAGS, expected.tags),
    ):
        assert await sums(engine, stored(hourly, about)) == wanted(lambda at: floor(at, "hour"))
        assert await sums(engine, stored(daily, about)) == wanted(lambda at: floor(at, "day"))
    async with engine.connect() as conn:
        assert await stale_hours(conn) == []
    await spool.close()


async def test_what_lands_while_an_hour_is_recomputed_is_not_forgotten(engine: AsyncEngine, tmp_path: Path) -> None:
    spool = Spool(tmp_path)
    await store(engine, spool, [an_operation(started_at=NOW)])
    async with engine.begin() as conn:
        await recompute(conn, await stale_hours(conn))
        await store(engine, spool, [an_operation(started_at=NOW)])
    async with engine.connect() as conn:
        assert await stale_hours(conn) == [floor(NOW, "hour")]
    await refresh(engine)
    async with engine.connect() as conn:
        assert (await conn.execute(select(usage_hour.c.operations))).scalars().all() == [2]
    await spool.close()


async def test_two_who_refresh_while_rows_land_take_turns(engine: AsyncEngine, tmp_path: Path) -> None:
    luck = random.Random(4)
    spools = [Spool(tmp_path / str(n)) for n in range(2)]

    async def land(spool: Spool) -> None:
        for _ in range(8):
            await store(engine, spool, [made_at(luck, NOW - luck.random() * 3 * HOUR) for _ in range(20)])

    async def again() -> None:
        for _ in range(8):
            await refresh(engine)

    await asyncio.gather(*(land(spool) for spool in spools), again(), again())
    await refresh(engine)
    async with engine.connect() as conn:
        assert (await conn.execute(select(func.sum(usage_day.c.operations)))).scalar_one() == 320
    for spool in spools:
        await spool.close()


async def test_partitions_are_made_for_the_months_that_are_summed_up(engine: AsyncEngine, tmp_path: Path) -> None:
    spool = Spool(tmp_path)
    await store(engine, spool, [an_operation(started_at=NOW - timedelta(days=400))])
    await refresh(engine)
    async with engine.connect() as conn:
        for table in ("usage_hour", "usage_day", "usage_hour_tag", "usage_day_tag"):
            where = text(f"SELECT DISTINCT tableoid::regclass::text FROM {table}")
            assert (await conn.execute(where)).scalars().all() == [f"{table}_202510"]
    await spool.close()
