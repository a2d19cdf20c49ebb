"""Margins by model, user and scenario; with idle time beside the lines or inside them they add up to the bill."""

from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

import pytest
from sqlalchemy import insert
from sqlalchemy.ext.asyncio import AsyncConnection

from billing.devices import take_over
from billing.ids import new_id
from billing.margins import MarginLine, margins
from billing.prices import Price
from billing.records import TokenClasses
from billing.tables import adjustment
from tests.billing.samples import an_attempt, an_operation
from tests.billing.stored import store

START = datetime.now(UTC) - timedelta(hours=2)
END = START + timedelta(hours=3)
HOURLY = Price(
    book="cost", model="", upstream="gpu", currency="USD", device_hour=Decimal(36), id=new_id(), effective_at=START
)


async def call(conn: AsyncConnection, model: str, scenario: str | None, seconds: float | None, **changes: Any) -> Any:
    cost = None if seconds is None else Decimal(repr(seconds)) / 100
    one = an_attempt(
        1,
        model=model,
        upstream="gpu",
        tokens=TokenClasses(input_fresh=1),
        prefill_device_seconds=seconds,
        decode_device_seconds=None if seconds is None else 0.0,
        **{"billed": Decimal(1), "cost": cost} | changes,
    )
    tags = {} if scenario is None else {"scenario": scenario}
    record = an_operation(
        started_at=START + timedelta(minutes=1),
        model=model,
        tags=tags,
        billed=one.billed,
        cost=one.cost,
        attempts=[one],
    )
    await store(conn, record)
    return record


async def idle(conn: AsyncConnection, wall: float, idle: float, price: Price | None = HOURLY) -> None:
    await take_over(conn, "gpu", "a", wall_seconds=wall, idle_seconds=idle, price=price, currency="USD")


def by_name(lines: list[MarginLine]) -> dict[str | None, MarginLine]:
    return {line.name: line for line in lines}


async def test_lines_by_model_and_by_scenario(conn: AsyncConnection) -> None:
    await call(conn, "small", "chat", 2.0)
    await call(conn, "small", "search", 3.0)
    await call(conn, "large", None, 5.0, billed=Decimal("0.01"))
    found = by_name((await margins(conn, START, END, "model")).lines)
    assert found["small"].margin == 2 - Decimal("0.05")
    assert (found["large"].cost, found["large"].margin) == (Decimal("0.05"), Decimal("-0.04"))
    scenarios = by_name((await margins(conn, START, END, "tag:scenario")).lines)
    assert {name: line.cost for name, line in scenarios.items()} == {
        "chat": Decimal("0.02"),
        "search": Decimal("0.03"),
        None: Decimal("0.05"),
    }


@pytest.mark.parametrize("by", ["org", "team", "user", "key", "upstream"])
async def test_every_grouping_sums_the_same(conn: AsyncConnection, by: str) -> None:
    await call(conn, "small", None, 1.0)
    await call(conn, "large", None, 2.0)
    (line,) = (await margins(conn, START, END, by)).lines
    assert (line.attempts, line.billed, line.cost) == (2, 2, Decimal("0.03"))


async def test_unknown_money_is_counted_and_makes_no_margin(conn: AsyncConnection) -> None:
    await call(conn, "small", None, 1.0)
    await call(conn, "small", None, None)
    (line,) = (await margins(conn, START, END, "model")).lines
    assert (line.cost, line.cost_unknown, line.margin) == (Decimal("0.01"), 1, None)


async def test_adjustments_are_in_it(conn: AsyncConnection) -> None:
    known, unknown = await call(conn, "m", None, 1.0), await call(conn, "m", None, None, billed=None)
    for record in (known, unknown):
        row = {
            "id": new_id(), "operation_id": record.id, "number": 1, "started_at": record.started_at,
            "currency": "USD", "billed_delta": Decimal("0.5"), "cost_delta": Decimal(0), "reason": "r", "actor": "a",
        }  # fmt: skip
        await conn.execute(insert(adjustment).values(row))
    (line,) = (await margins(conn, START, END, "model")).lines
    assert (line.billed, line.billed_unknown, line.cost, line.cost_unknown) == (2, 0, Decimal("0.01"), 0)


async def test_all_costs_with_idle_time_are_the_device_bill(conn: AsyncConnection) -> None:
    await call(conn, "small", None, 1.0)
    await call(conn, "large", None, 6.0)
    await idle(conn, 17.0, 10.0)
    bill = Decimal("0.17")
    apart = await margins(conn, START, END, "model")
    assert [(line.upstream, line.seconds, line.cost) for line in apart.idle] == [("gpu", 10, Decimal("0.1"))]
    assert sum(line.cost or 0 for line in apart.lines) + Decimal("0.1") == bill
    spread = await margins(conn, START, END, "model", spread_idle=True)
    assert spread.idle == []
    assert sum((line.cost or 0) + line.idle_cost for line in spread.lines) == bill
    found = by_name(spread.lines)
    assert found["small"].idle_cost.quantize(Decimal("1E-15")) == (Decimal("0.1") / 7).quantize(Decimal("1E-15"))
    assert found["large"].margin == 1 - Decimal("0.06") - found["large"].idle_cost


async def test_idle_time_that_nobody_can_bear_stays_a_line(conn: AsyncConnection) -> None:
    await idle(conn, 10.0, 10.0)
    assert [line.cost for line in (await margins(conn, START, END, "model", spread_idle=True)).idle] == [Decimal("0.1")]
    await call(conn, "small", None, 1.0)
    await take_over(conn, "gpu", "b", wall_seconds=1.0, idle_seconds=1.0, price=None, currency="USD")
    found = await margins(conn, START, END, "model", spread_idle=True)
    assert [line.cost for line in found.idle] == [None], "unknown, so nobody's share is known"
    assert found.lines[0].idle_cost == 0


async def test_what_margins_can_not_be_by(conn: AsyncConnection) -> None:
    for by in ("weather", "tag:", "tag"):
        with pytest.raises(ValueError, match="use model, upstream"):
            await margins(conn, START, END, by)
