"""Device hours: every second of every engine process once, however often and by whomever its counters are read."""

import asyncio
import itertools
from datetime import UTC, datetime, timedelta
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from billing.devices import _shares, device_hours, take_over
from billing.ids import new_id
from billing.prices import Price

ALWAYS = (datetime(2000, 1, 1, tzinfo=UTC), datetime(2100, 1, 1, tzinfo=UTC))
PRICE = Price(
    book="cost", model="", upstream="gpu", currency="USD", device_hour=Decimal(36), id=new_id(), effective_at=ALWAYS[0]
)


async def read(
    conn: AsyncConnection, wall: float, idle: float, instance: str = "a", price: Price | None = PRICE
) -> None:
    await take_over(conn, "gpu", instance, wall_seconds=wall, idle_seconds=idle, price=price, currency="USD")


async def totals(conn: AsyncConnection) -> tuple[Decimal, Decimal, Decimal, Decimal | None, Decimal | None]:
    hours = await device_hours(conn, *ALWAYS)
    names = ("wall_seconds", "busy_seconds", "idle_seconds", "busy_cost", "idle_cost")
    columns = [[getattr(hour, name) for hour in hours] for name in names]
    return tuple(None if None in column else sum(column, Decimal(0)) for column in columns)  # type: ignore[return-value]


async def test_counters_are_taken_over_once_and_cost_their_time(conn: AsyncConnection) -> None:
    await read(conn, 10.0, 4.0)
    await read(conn, 10.0, 4.0)
    await read(conn, 100.0, 64.5)
    await read(conn, 40.0, 20.0)  # of a replica that was slower to tell
    assert await totals(conn) == (100, Decimal("35.5"), Decimal("64.5"), Decimal("0.355"), Decimal("0.645"))


async def test_a_restarted_engine_counts_from_nothing(conn: AsyncConnection) -> None:
    await read(conn, 50.0, 50.0)
    await read(conn, 7.0, 0.5, "b")
    await read(conn, 8.0, 1.0, "b")
    assert (await totals(conn))[:3] == (58, 7, 51)


async def test_an_engine_whose_upstream_is_renamed_loses_no_second(conn: AsyncConnection) -> None:
    async def renamed(wall: float, idle: float) -> None:
        await take_over(conn, "cuda", "a", wall_seconds=wall, idle_seconds=idle, price=PRICE, currency="USD")

    await read(conn, 10.0, 4.0)
    await renamed(11.0, 4.0)
    assert [(hour.upstream, hour.wall_seconds) for hour in await device_hours(conn, *ALWAYS)] == [("gpu", 10)]
    await conn.execute(text("UPDATE device_account SET read_at = read_at - interval '61 seconds'"))
    await renamed(75.0, 60.0)
    await read(conn, 76.0, 60.0)  # by a replica that has the old name yet
    sums = dict.fromkeys(("gpu", "cuda"), Decimal(0))
    for hour in await device_hours(conn, *ALWAYS):
        sums[hour.upstream] += hour.wall_seconds
    assert sums == {"gpu": 10, "cuda": 65}
    assert (await totals(conn))[:3] == (75, 15, 60)


async def test_replicas_that_look_at_once(engine: AsyncEngine) -> None:
    async def replica(step: int) -> None:
        for number in range(20):
            async with engine.begin() as connection:
                await read(connection, float(number * 5 + step), float(number))

    await asyncio.gather(*(replica(step) for step in range(5)))
    async with engine.connect() as connection:
        assert (await totals(connection))[:3] == (99, 80, 19)


async def test_two_upstreams_that_lead_to_one_engine_pay_for_it_once(conn: AsyncConnection) -> None:
    await read(conn, 10.0, 4.0)
    await take_over(conn, "other", "a", wall_seconds=12.0, idle_seconds=4.0, price=PRICE, currency="USD")
    await read(conn, 14.0, 4.0)
    assert (await totals(conn))[:3] == (14, 10, 4)


async def test_time_without_a_price_has_no_cost(conn: AsyncConnection) -> None:
    await read(conn, 10.0, 4.0, price=None)
    assert (await totals(conn))[3:] == (None, None)
    await conn.execute(text("UPDATE device_hour SET starts_at = starts_at - interval '3 hours'"))
    await read(conn, 20.0, 4.0)
    assert {hour.busy_cost for hour in await device_hours(conn, *ALWAYS)} == {None, Decimal("0.1")}


@pytest.mark.parametrize(("wall", "idle"), [(1.0, 2.0), (-1.0, 0.0), (float("nan"), 0.0), (1e12, 0.0)])
async def test_impossible_counters_are_refused(conn: AsyncConnection, wall: float, idle: float) -> None:
    with pytest.raises(ValueError, match="cannot be"):
        await read(conn, wall, idle)


seconds = st.decimals(min_value=0, max_value=100_000, places=6)


@given(st.datetimes(datetime(2026, 1, 1), datetime(2027, 1, 1)), seconds, st.floats(0, 1))
def test_cut_at_the_hours_nothing_is_lost_or_made(now: datetime, wall: Decimal, part: float) -> None:
    idle = min((wall * Decimal(part)).quantize(Decimal("1E-9")), wall)
    shares = list(_shares(now.replace(tzinfo=UTC), wall, idle))
    assert sum(share.wall for share in shares) == wall
    assert sum(share.idle for share in shares) == idle
    assert all(0 <= share.idle <= share.wall <= 3600 + Decimal("0.001") for share in shares)
    hours = [share.starts_at for share in shares]
    assert hours == sorted(set(hours)) and all(
        later - hour == timedelta(hours=1) for hour, later in itertools.pairwise(hours)
    )
