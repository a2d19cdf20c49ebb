"""Rate limits: requests and tokens a minute, calls at once, over replicas and one real PostgreSQL."""

import asyncio
from contextlib import AsyncExitStack

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from billing import lease_rounds, settlements
from billing.leases import BudgetExhausted, Hold, Leases, LimitExceeded
from billing.limits import list_limits, remove_limit, set_limit
from billing.notices import Notices
from tests.billing.replicas import a_replica, admit, budget, limit, until


@pytest.fixture(autouse=True)
async def early_in_a_minute(engine: AsyncEngine) -> None:
    """So that no test sees two windows."""
    async with engine.connect() as conn:
        second = (await conn.execute(text("SELECT extract(second FROM clock_timestamp())"))).scalar_one()
    if second > 48:
        await asyncio.sleep(60.1 - float(second))


async def admitted(*calls: object) -> tuple[list[Hold], list[LimitExceeded]]:
    results = await asyncio.gather(*calls, return_exceptions=True)  # type: ignore[arg-type]
    refused = [result for result in results if isinstance(result, LimitExceeded)]
    holds = [result for result in results if isinstance(result, Hold)]
    assert len(holds) + len(refused) == len(results), results
    return holds, refused


async def test_requests_a_minute_are_shared_by_replicas_to_the_last(engine: AsyncEngine) -> None:
    await limit(engine, "key", "k", "requests", 20)
    async with AsyncExitStack() as stack:
        replicas = [await stack.enter_async_context(a_replica(engine, f"place{n}.run")) for n in range(4)]
        holds, refused = await admitted(*(admit(replicas[n % 4], "0", key="k") for n in range(60)))
        assert len(holds) == 20
        assert {(error.kind, error.scope_kind, error.scope_id, error.limit) for error in refused} == {
            ("requests", "key", "k", 20)
        }
        assert all(error.retry_after is not None and 0 < error.retry_after <= 60 for error in refused)
        assert str(refused[0]) == "the key's limit of 20 requests a minute is reached"
        for hold in holds:
            replicas[0].settle(hold, None, 0)  # over, and used all the same
        with pytest.raises(LimitExceeded):
            await admit(replicas[0], "0", key="k")


async def test_the_headers_name_the_tightest_limit(engine: AsyncEngine, leases: Leases) -> None:
    await limit(engine, "org", "o", "requests", 100)
    await limit(engine, "key", "k", "requests", 10)
    await limit(engine, "user", "u", "tokens", 1000)
    first, second = [await admit(leases, "0", 100, org="o", key="k", user="u") for _ in range(2)]
    assert first.requests is not None and first.tokens is not None
    assert first.requests[:2] == (10, 9) and 0 < first.requests.reset_seconds <= 60
    assert first.tokens[:2] == (1000, 900)
    assert second.requests is not None and second.requests.remaining == 8
    plain = await admit(leases, "0", 100, model="m")
    assert (plain.requests, plain.tokens) == (None, None)


async def test_tokens_are_reserved_and_corrected(engine: AsyncEngine, leases: Leases) -> None:
    await limit(engine, "key", "k", "tokens", 1000)
    assert (await leases.left({"key": ["k"]})).tokens == 1000
    assert (await leases.left({"key": ["other"]})).tokens is None
    hold = await admit(leases, "0", 900, key="k")
    with pytest.raises(LimitExceeded, match="could use 200 tokens and the key's limit of 1000 tokens a minute has 100"):
        await admit(leases, "0", 200, key="k")
    leases.settle(hold, None, 300)
    assert (await leases.left({"key": ["k"]})).tokens == 700
    over = await admit(leases, "0", 100, key="k")
    leases.settle(over, None, 650)  # the upstream ignored max_tokens
    assert (await leases.left({"key": ["k"]})).tokens == 50
    with pytest.raises(LimitExceeded) as caught:
        await admit(leases, "0", 1001, key="k")
    assert caught.value.retry_after is None  # no wait helps
    released = await admit(leases, "0", 50, key="k")
    leases.release(released)
    assert (await leases.left({"key": ["k"]})).tokens == 50


async def test_a_call_at_once_too_many_is_refused_until_one_ends(engine: AsyncEngine) -> None:
    await limit(engine, "tag", "app=search", "concurrent", 3)
    async with a_replica(engine, "a.1") as one, a_replica(engine, "b.1") as two:
        calls = (admit(leases, "0", tag="app=search") for leases in (one, two) * 4)
        holds, refused = await admitted(*calls)
        assert (len(holds), len(refused)) == (3, 5)
        assert str(refused[0]) == "the tag's limit of 3 calls at the same time is reached"
        assert refused[0].retry_after is not None
        for leases, other in ((one, two), (two, one)):  # whoever holds, the other can have it
            mine = [hold for hold in holds if hold.replica == leases._replica]
            if mine:
                leases.settle(mine[0], None, 0)
                await asyncio.sleep(1.1)
                other.release(await admit(other, "0", tag="app=search"))


async def test_calls_at_once_of_a_lost_replica_are_free_after_a_while(
    engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    await limit(engine, "key", "k", "concurrent", 1)
    lost = Leases(engine, "lost.1", "USD", Notices(engine))
    task = asyncio.create_task(lost.run())
    await admit(lost, "0", key="k")
    task.cancel()
    async with a_replica(engine) as leases:
        with pytest.raises(LimitExceeded):
            await admit(leases, "0", key="k")
        monkeypatch.setattr(lease_rounds, "LOST_SECONDS", 0)
        await asyncio.sleep(0.1)
        leases._rounds._renew_at = 0.0
        await asyncio.sleep(1.1)
        await admit(leases, "0", key="k")


async def test_who_was_taken_for_lost_knows_it(engine: AsyncEngine, leases: Leases) -> None:
    """It admits no more until what it still has running is over."""
    await limit(engine, "key", "k", "concurrent", 1)
    hold = await admit(leases, "0", key="k")
    async with engine.begin() as conn:
        assert await settlements.free_lost(conn, 0) == 1
    leases._rounds._renew_at = 0.0
    (account,) = leases._pool.accounts.values()
    await until(lambda: account.pot is not None and account.pot.free < 0)
    with pytest.raises(LimitExceeded):
        await admit(leases, "0", key="k")
    leases.settle(hold, None, 0)
    await asyncio.sleep(1.1)
    await admit(leases, "0", key="k")


async def test_a_limit_and_a_budget_are_all_or_nothing(engine: AsyncEngine, leases: Leases) -> None:
    await limit(engine, "key", "k", "requests", 2)
    await budget(engine, "user", "u", "1")
    with pytest.raises(BudgetExhausted):
        await admit(leases, "2", key="k", user="u")
    await admit(leases, "0.5", key="k", user="u")
    await admit(leases, "0.5", key="k", user="u")
    with pytest.raises(BudgetExhausted):  # of both, what does not pass by waiting
        await admit(leases, "0.5", key="k", user="u")


async def test_limits_are_set_changed_listed_and_removed(engine: AsyncEngine) -> None:
    first = await limit(engine, "key", "k", "requests", 5)
    assert await limit(engine, "key", "k", "requests", 7) == first
    await limit(engine, "model", "m", "concurrent", 0)
    async with a_replica(engine) as leases:
        await admit(leases, "0", key="k")
        with pytest.raises(LimitExceeded, match="limit of 0 calls"):
            await admit(leases, "0", model="m")
        async with engine.begin() as conn:
            found = {limit.kind: (limit.scope_kind, limit.limit, limit.leased) for limit in await list_limits(conn)}
            assert found == {"requests": ("key", 7, 1), "concurrent": ("model", 0, 0)}
            assert await remove_limit(conn, first)
            assert not await remove_limit(conn, first)
            for wrong, sentence in [
                (("key", "k", "money", 1), "'money' is not a kind of limit; use one of requests, tokens, concurrent"),
                (("key", "k", "tokens", -1), "must be 0 or more"),
                (("tag", "x", "tokens", 1), "write it as name=value"),
            ]:
                with pytest.raises(ValueError, match=sentence):
                    await set_limit(conn, *wrong)  # type: ignore[arg-type]
        await asyncio.sleep(0.5)
        for _ in range(20):
            await admit(leases, "0", key="k")
