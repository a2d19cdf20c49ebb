"""Replicas that are gone for good, and those that only could not be heard for a while."""

import asyncio
from decimal import Decimal

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from billing import lease_rounds, settlements
from billing.leases import BudgetExhausted, Leases, LimitExceeded
from billing.lost_replicas import free_leases, list_leases
from billing.notices import Notices
from tests.billing.replicas import a_replica, admit, budget, budgets_of, limit, row, until, wrong_sums


async def silent(engine: AsyncEngine, seconds: int, *replicas: str) -> None:
    """As if these had not been heard of for so long."""
    query = text("UPDATE replica SET renewed_at = now() - make_interval(secs => :seconds) WHERE name = ANY(:names)")
    async with engine.begin() as conn:
        await conn.execute(query, {"seconds": seconds, "names": list(replicas)})


async def dead(engine: AsyncEngine, name: str = "dead.1", amount: str = "6") -> None:
    """A process that leased and was killed."""
    leases = Leases(engine, name, "USD", Notices(engine))
    task = asyncio.create_task(leases.run())
    await admit(leases, amount, key="k")
    task.cancel()


async def test_an_operator_frees_what_a_lost_replica_had(engine: AsyncEngine) -> None:
    await budget(engine, "key", "k", "10")
    await limit(engine, "key", "k", "concurrent", 5)
    await limit(engine, "key", "k", "requests", 50)
    await dead(engine)
    async with a_replica(engine, "live.1") as leases:
        with pytest.raises(BudgetExhausted):
            await admit(leases, "5", key="k")
        async with engine.begin() as conn:
            with pytest.raises(ValueError, match=r"dead\.1 was heard of \d seconds ago: it lives"):
                await free_leases(conn, "dead.1")
            with pytest.raises(ValueError, match=r"nobody\.1 has no lease; `farthing leases list`"):
                await free_leases(conn, "nobody.1")
        await silent(engine, 40, "dead.1")
        async with engine.begin() as conn:
            (found,) = [held for held in await list_leases(conn) if held.replica == "dead.1"]
            assert (found.alive, found.leases, found.held["USD"] >= 6) == (False, 2, True)
            assert found.held["concurrent"] >= 1 and "requests" not in found.held
            assert await free_leases(conn, "dead.1") == 2
        await asyncio.sleep(1.1)
        await admit(leases, "9.9", key="k")
    assert await wrong_sums(engine) == []


async def test_a_replica_that_was_freed_and_lives_stops_spending_what_is_not_its_own(engine: AsyncEngine) -> None:
    """It learns it before it takes anything more, or at its next sign of life."""
    await budget(engine, "key", "k", "100")
    async with a_replica(engine, "a.1") as leases:
        hold = await admit(leases, "6", key="k")
        (account,) = leases._pool.accounts.values()
        assert account.pot is not None and account.pot.free > 0
        await silent(engine, 40, "a.1")
        async with engine.begin() as conn:
            await free_leases(conn, "a.1")
        await asyncio.sleep(1.1)
        await admit(leases, "90", key="k")
        assert (await budgets_of(engine))["k"].leased == account.pot.granted >= 96, "what the first call holds, too"
        assert await wrong_sums(engine) == []
        leases.settle(hold, Decimal(6), 0)
        async with engine.begin() as conn:
            await settlements.settle(conn, [row(hold, "6")])
        assert (await budgets_of(engine))["k"].settled == 6


async def test_an_outage_of_the_database_makes_nobody_lost(
    engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Afterwards all have been silent for long. The first who speaks again does not free the calls of the others."""
    monkeypatch.setattr(lease_rounds, "RENEW_SECONDS", 0.2)
    monkeypatch.setattr(lease_rounds, "LOST_SECONDS", 1.0)
    monkeypatch.setattr(lease_rounds, "TICK_SECONDS", 0.05)
    await limit(engine, "key", "k", "concurrent", 3)
    async with a_replica(engine, "a.1") as one, a_replica(engine, "b.1") as two:
        await admit(one, "0", key="k")
        await admit(two, "0", key="k")
        store = one._rounds._store, two._rounds._store
        renewals = [kept.renew for kept in store]

        async def away() -> bool:
            raise ConnectionError("the database is away")

        for kept in store:
            monkeypatch.setattr(kept, "renew", away)
        await asyncio.sleep(1.5)
        monkeypatch.setattr(store[0], "renew", renewals[0])
        await asyncio.sleep(0.7)
        async with engine.connect() as conn:
            assert len(await list_leases(conn)) == 2
        monkeypatch.setattr(store[1], "renew", renewals[1])
        await asyncio.sleep(1.5)
        async with engine.connect() as conn:
            assert all(found.held["concurrent"] >= 1 for found in await list_leases(conn))
        monkeypatch.setattr(store[1], "renew", away)  # now it alone is silent

        async def freed() -> bool:
            async with engine.connect() as conn:
                return [found.replica for found in await list_leases(conn) if found.held] == ["a.1"]

        async with asyncio.timeout(20):
            while not await freed():  # noqa: ASYNC110 - it happens in the database
                await asyncio.sleep(0.1)


async def test_a_new_process_waits_before_it_calls_others_lost(engine: AsyncEngine) -> None:
    await limit(engine, "key", "k", "concurrent", 1)
    await dead(engine, amount="0")
    await silent(engine, 40, "dead.1")
    async with a_replica(engine, "new.1") as leases:
        await until(lambda: leases._rounds._renewed > 0)
        await asyncio.sleep(0.2)
        with pytest.raises(LimitExceeded):
            await admit(leases, "0", key="k")
