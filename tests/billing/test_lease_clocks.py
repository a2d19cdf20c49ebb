"""Windows and clocks: the database decides which window it is, and none is opened twice."""

import asyncio
from datetime import datetime, timedelta
from decimal import Decimal

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from billing import lease_rounds, settlements
from billing import leases as leases_module
from billing.leases import BudgetExhausted, Leases
from tests.billing.replicas import a_replica, admit, budget, row, wrong_sums


async def shift_clock(engine: AsyncEngine, interval: str) -> None:
    """Make the database's clock wrong by so much."""
    await _set_clock(engine, f"pg_catalog.clock_timestamp() + interval '{interval}'")


async def stop_clock(engine: AsyncEngine, moment: datetime) -> None:
    """Make the database's clock stand still."""
    await _set_clock(engine, f"timestamptz '{moment.isoformat()}'")


async def _set_clock(engine: AsyncEngine, now: str) -> None:
    async with engine.begin() as conn:
        await conn.execute(text("CREATE SCHEMA IF NOT EXISTS clock"))
        await conn.execute(
            text(
                "CREATE OR REPLACE FUNCTION clock.clock_timestamp() RETURNS timestamptz LANGUAGE sql AS "
                f"$$ SELECT {now} $$"
            )
        )
        name = (await conn.execute(text("SELECT current_database()"))).scalar_one()
        await conn.execute(text(f"ALTER DATABASE {name} SET search_path = clock, pg_catalog, public"))
    await engine.dispose()  # a connection takes the setting when it is made


def past(leases: Leases, time: timedelta) -> None:
    """As when so much time, and with it the window of now, has passed on this replica's own, monotonic clock."""
    clock = leases._pool._clock
    assert clock is not None
    leases._pool.set_clock(clock[0] + time, clock[1])
    for account in leases._pool.accounts.values():
        assert account.pot is not None
        account.pot.ends = 0.0


async def test_a_window_that_ends_is_left_in_order(engine: AsyncEngine) -> None:
    """Its lease goes back, what is held there is charged there, and the next window is asked of the database."""
    await budget(engine, "key", "k", "10", window="hour")
    async with a_replica(engine) as leases:
        hold = await admit(leases, "1", key="k")
        await shift_clock(engine, "1 hour")
        past(leases, timedelta(hours=1))
        later = await admit(leases, "10", key="k")
        assert later.charges[0].starts_at > hold.charges[0].starts_at
        leases.settle(hold, Decimal("0.5"), 0)
        leases.settle(later, Decimal(10), 0)
        async with engine.begin() as conn:
            await settlements.settle(conn, [row(hold, "0.5"), row(later, "10")])
        await asyncio.sleep(2 * lease_rounds.TICK_SECONDS + 0.2)
        query = text("SELECT settled, leased FROM budget_window ORDER BY starts_at")
        async with engine.connect() as conn:
            assert [tuple(found) for found in await conn.execute(query)] == [(Decimal("0.5"), 0), (10, 0)]


async def test_a_clock_that_jumps_back_opens_no_window_twice(engine: AsyncEngine) -> None:
    await budget(engine, "key", "k", "10", window="hour")
    async with a_replica(engine, "a.1") as one, a_replica(engine, "b.1") as two:
        first = await admit(one, "10", key="k")
        await shift_clock(engine, "-1 hour")
        earlier = await admit(two, "10", key="k")  # the window of that hour, for the first time
        assert earlier.charges[0].starts_at < first.charges[0].starts_at
        with pytest.raises(BudgetExhausted):
            await admit(one, "1", key="k")
        await shift_clock(engine, "0")
        await asyncio.sleep(leases_module.BARREN_SECONDS)
        for leases in (one, two):
            leases._pool.matching.unknown.add(("key", "k"))  # it looks at the time again
            past(leases, timedelta(0))
            with pytest.raises(BudgetExhausted):
                await admit(leases, "1", key="k")
        assert await wrong_sums(engine) == []


async def test_a_replica_whose_own_clock_is_wrong_agrees_with_the_others(
    engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody asks the wall clock of the replica: it could say anything."""
    await budget(engine, "key", "k", "10", window="hour")
    async with a_replica(engine, "a.1") as one:
        right = await admit(one, "1", key="k")
    monkeypatch.setattr("time.time", lambda: 0.0)
    async with a_replica(engine, "b.1") as two:
        assert (await admit(two, "1", key="k")).charges[0].starts_at == right.charges[0].starts_at


async def test_a_call_from_the_window_before_does_not_cost_the_lease_of_now(engine: AsyncEngine) -> None:
    """Else every call of the new window would wait for the database, for as long as the old call runs."""
    await budget(engine, "key", "k", "10", window="hour")
    async with a_replica(engine) as leases:
        hold = await admit(leases, "1", key="k")
        await shift_clock(engine, "1 hour")
        past(leases, timedelta(hours=1))
        leases.release(await admit(leases, "1", key="k"))
        query = text("SELECT leased FROM budget_window ORDER BY starts_at")
        for released in (False, True):
            await asyncio.sleep(2 * lease_rounds.TICK_SECONDS + 0.2)
            async with engine.connect() as conn:
                old, new = (await conn.execute(query)).scalars()
            assert (old == 0, released or new > 0) == (released, True)
            leases.release(hold)
