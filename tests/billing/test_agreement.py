"""Whoever asks what it came to is told the same: usage, dashboards, exports, margins and what invoices are made of."""

import random
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from uuid import UUID

import pytest
from random_ledger import move_in, operations, store, sum_exactly
from sqlalchemy import insert
from sqlalchemy.ext.asyncio import AsyncEngine

from billing import rollups
from billing.breakdown import usage_by
from billing.charge import EXACT
from billing.charged import charged
from billing.ids import new_id
from billing.margins import margins
from billing.records import OperationRecord
from billing.reports import total_spending
from billing.retention import Keep, enforce
from billing.tables import adjustment

NAMES = ("billed", "cost", "margin")
Deltas = dict[tuple[UUID, int], list[Decimal | None]]
"""Of billed and cost, by attempt."""


async def adjust(engine: AsyncEngine, rng: random.Random, records: list[OperationRecord], deltas: Deltas) -> None:
    """As re-rating does: what is billed of the attempt that the caller pays, and the cost of any."""
    async with engine.begin() as conn:
        for record in rng.sample([each for each in records if each.attempts], 12):
            one = rng.choice(record.attempts)
            billed = Decimal(rng.randrange(-999, 999)).scaleb(-15) if one.billable and rng.random() < 0.7 else None
            cost = Decimal(rng.randrange(-999, 999)).scaleb(-15) if billed is None or rng.random() < 0.5 else None
            row = {"id": new_id(), "operation_id": record.id, "number": one.number, "started_at": record.started_at}
            row |= {"currency": "USD", "billed_delta": billed, "cost_delta": cost, "reason": "r", "actor": "a"}
            await conn.execute(insert(adjustment).values(row))
            before = deltas.setdefault((record.id, one.number), [None, None])
            for place, delta in enumerate((billed, cost)):
                if delta is not None:
                    before[place] = EXACT.add(before[place] or Decimal(0), delta)


def expected(records: Iterable[OperationRecord], deltas: Deltas) -> tuple[list[Decimal], Decimal]:
    """Billed, cost and margin of the operations of which they are known, and the cost of all attempts."""
    sums, of_attempts = [Decimal(0)] * 3, Decimal(0)
    for record in records:
        amounts: list[Decimal | None] = []
        for place, name in enumerate(("billed", "cost")):
            parts = [
                None if amount is None and delta is None else EXACT.add(amount or Decimal(0), delta or Decimal(0))
                for one in record.attempts
                for amount, delta in [(getattr(one, name), deltas.get((record.id, one.number), [None, None])[place])]
            ]
            if record.cached is not None:
                parts = [getattr(record, name)]
            amounts.append(None if None in parts or not parts else sum_exactly(parts))
            if name == "cost":
                of_attempts = sum_exactly([of_attempts, *parts])
        billed, cost = amounts
        amounts.append(None if billed is None or cost is None else EXACT.subtract(billed, cost))
        sums = [EXACT.add(total, amount or Decimal(0)) for total, amount in zip(sums, amounts, strict=True)]
    return sums, of_attempts


@pytest.mark.parametrize("seed", range(2))
async def test_all_tell_the_same(engine: AsyncEngine, seed: int) -> None:
    """With adjustments, over hours that are summed up and hours that are not; and what stays once days are dropped."""
    rng = random.Random(seed)
    end = datetime.now(UTC)
    start = (end - timedelta(days=5)).replace(minute=0, second=0, microsecond=0)
    async with engine.begin() as conn:
        records = list(operations(rng, await move_in(conn, rng), start, end, 120))
        await store(conn, records)
    deltas: Deltas = {}
    for zone in ("Asia/Kolkata", "America/New_York"):
        await adjust(engine, rng, records, deltas)
        wanted, of_attempts = expected(records, deltas)
        async with engine.connect() as conn:
            for dimensions in ([], ["user"], ["day"], ["hour", "model"]):
                rows = await usage_by(conn, dimensions, start, end, time_zone=zone)
                assert [sum_exactly([getattr(row, name) for row in rows]) for name in NAMES] == wanted
            (spent,) = await total_spending(conn, [start])
            assert [getattr(spent.windows[0], name) for name in NAMES] == wanted
            assert sum_exactly([each.amount async for each in charged(conn, "sale", start, end)]) == wanted[0]
            assert sum_exactly([each.amount async for each in charged(conn, "cost", start, end)]) == of_attempts
            lines = (await margins(conn, start, end, "model")).lines
            assert sum_exactly([line.billed for line in lines]) == wanted[0]
            assert sum_exactly([line.cost for line in lines]) == of_attempts
        await rollups.refresh(engine)
    assert await enforce(engine, Keep(operations=2))
    async with engine.connect() as conn:
        rows = await usage_by(conn, ["user"], start, end)
        assert [sum_exactly([getattr(row, name) for row in rows]) for name in NAMES] == wanted
