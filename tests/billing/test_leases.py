"""Admission against budgets in a real PostgreSQL: never over, all or nothing, settled once."""

import asyncio
import random
from collections.abc import AsyncIterator
from decimal import Decimal
from uuid import UUID

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from billing import holds
from billing.budgets import Budget, list_budgets, remove_budget, set_budget
from billing.ids import new_id
from billing.leases import BudgetExhausted, Budgets, OtherCurrencyError, UnpricedError

REPLICA = "place.run"


@pytest.fixture
async def engine(database_url: str) -> AsyncIterator[AsyncEngine]:
    engine = create_async_engine(database_url, pool_size=20)
    yield engine
    await engine.dispose()


async def limit(engine: AsyncEngine, kind: str, scope: str, amount: str, **terms: object) -> UUID:
    terms = {"window": "none", "currency": "USD"} | terms
    async with engine.begin() as conn:
        return await set_budget(conn, kind, scope, limit=Decimal(amount), **terms)  # type: ignore[arg-type]


async def settle(engine: AsyncEngine, operation: UUID, billed: str | None) -> None:
    async with engine.begin() as conn:
        await holds.settle(conn, {operation: None if billed is None else Decimal(billed)})


async def budgets_of(engine: AsyncEngine) -> dict[str, Budget]:
    async with engine.connect() as conn:
        return {budget.scope_id: budget for budget in await list_budgets(conn)}


async def test_a_budget_for_one_call_admits_one_of_fifty(database_url: str, engine: AsyncEngine) -> None:
    await limit(engine, "key", "k", "0.01", window="day")
    engines = [create_async_engine(database_url, pool_size=5) for _ in range(4)]
    gateways = [Budgets(engine, f"place{n}.run", "USD") for n, engine in enumerate(engines)]
    calls = (gateways[n % 4].admit(new_id(), {"key": "k"}, Decimal("0.01")) for n in range(50))
    results = await asyncio.gather(*calls, return_exceptions=True)
    assert results.count(None) == 1
    assert sum(isinstance(result, BudgetExhausted) for result in results) == 49
    assert (await budgets_of(engine))["k"].leased == Decimal("0.01")
    for other in engines:
        await other.dispose()


async def test_nested_scopes_are_all_or_nothing(engine: AsyncEngine) -> None:
    await limit(engine, "org", "o", "10")
    await limit(engine, "user", "u", "1")
    gateway = Budgets(engine, REPLICA, "USD")
    await gateway.admit(new_id(), {"org": "o", "user": "u", "team": "without budget"}, Decimal("0.75"))
    with pytest.raises(BudgetExhausted) as caught:
        await gateway.admit(new_id(), {"org": "o", "user": "u"}, Decimal("0.5"))
    assert (caught.value.scope_kind, caught.value.scope_id) == ("user", "u")
    assert (caught.value.limit, caught.value.remaining) == (Decimal(1), Decimal("0.25"))
    assert "the user's budget of 1 USD has 0.25 left" in str(caught.value)
    assert (await budgets_of(engine))["o"].leased == Decimal("0.75")
    assert await gateway.remaining({"org": "o", "user": "u"}) == Decimal("0.25")
    await gateway.admit(new_id(), {"org": "o", "user": "u"}, Decimal("0.25"))  # the last cent is still handed out


async def test_the_refusal_names_the_reset(engine: AsyncEngine) -> None:
    await limit(engine, "team", "t", "1", window="month", time_zone="Asia/Tokyo")
    with pytest.raises(BudgetExhausted, match=r"by the month has 1 left; it resets at 20\d\d-\d\d-\d\d 15:00 UTC"):
        await Budgets(engine, REPLICA, "USD").admit(new_id(), {"team": "t"}, Decimal(2))


async def test_a_soft_budget_counts_and_never_refuses(engine: AsyncEngine) -> None:
    await limit(engine, "key", "k", "1", hard=False)
    gateway = Budgets(engine, REPLICA, "USD")
    operation = new_id()
    await gateway.admit(operation, {"key": "k"}, Decimal(5))
    await gateway.admit(new_id(), {"key": "k"}, None)  # unpriced, nothing to count
    assert await gateway.remaining({"key": "k"}) is None
    await settle(engine, operation, "4.5")
    budget = (await budgets_of(engine))["k"]
    assert (budget.leased, budget.settled, budget.remaining) == (Decimal(0), Decimal("4.5"), Decimal(0))


async def test_an_unpriced_call_is_refused_under_a_hard_budget_only(engine: AsyncEngine) -> None:
    gateway = Budgets(engine, REPLICA, "USD")
    await gateway.admit(new_id(), {"key": "k"}, None)
    await limit(engine, "key", "k", "100")
    with pytest.raises(UnpricedError, match="no complete price") as caught:
        await gateway.admit(new_id(), {"key": "k"}, None)
    assert caught.value.scope_kind == "key"


async def test_a_budget_in_another_currency_is_never_compared_with_charges(engine: AsyncEngine) -> None:
    gateway, scopes = Budgets(engine, REPLICA, "USD"), {"key": "k", "team": "t"}
    await limit(engine, "key", "k", "1000")
    await limit(engine, "team", "t", "1000", currency="EUR")
    for amount in (Decimal(1), Decimal(0), None):
        with pytest.raises(OtherCurrencyError, match=r"the team's budget of 1000 EUR cannot pay for .* in USD"):
            await gateway.admit(new_id(), scopes, amount)
    with pytest.raises(OtherCurrencyError):
        await gateway.remaining(scopes)
    assert (await budgets_of(engine))["k"].leased == 0
    await Budgets(engine, REPLICA, "EUR").admit(new_id(), {"team": "t"}, Decimal(1))


async def test_a_soft_budget_in_another_currency_counts_no_call(engine: AsyncEngine) -> None:
    gateway, scopes = Budgets(engine, REPLICA, "USD"), {"key": "k", "team": "t"}
    await limit(engine, "key", "k", "5")
    await limit(engine, "team", "t", "1", currency="EUR", hard=False)
    await gateway.admit(new_id(), scopes, Decimal(4))
    budgets = await budgets_of(engine)
    assert (budgets["k"].leased, budgets["t"].leased) == (4, 0)
    with pytest.raises(BudgetExhausted, match="the key's budget of 5 USD"):
        await gateway.admit(new_id(), scopes, Decimal(2))


async def test_a_budget_keeps_its_currency(engine: AsyncEngine) -> None:
    old = await limit(engine, "key", "k", "1")
    with pytest.raises(ValueError, match="another currency than EUR; remove that one first"):
        await limit(engine, "key", "k", "2", currency="EUR")
    async with engine.begin() as conn:
        await remove_budget(conn, old)
    await limit(engine, "key", "k", "2", currency="EUR")
    assert (await budgets_of(engine))["k"].currency == "EUR"


async def test_a_free_call_passes_an_exhausted_budget(engine: AsyncEngine) -> None:
    await limit(engine, "key", "k", "1")
    gateway = Budgets(engine, REPLICA, "USD")
    operation = new_id()
    await gateway.admit(operation, {"key": "k"}, Decimal(1))
    await settle(engine, operation, "3")  # the charge exceeds the hold: recorded as it is
    assert (await budgets_of(engine))["k"].settled == 3
    await gateway.admit(new_id(), {"key": "k"}, Decimal(0))
    with pytest.raises(BudgetExhausted, match="has 0 left"):
        await gateway.admit(new_id(), {"key": "k"}, Decimal("0.000001"))


async def test_a_hold_is_settled_once_and_released_once(engine: AsyncEngine) -> None:
    await limit(engine, "key", "k", "10")
    gateway = Budgets(engine, REPLICA, "USD")
    one, two = new_id(), new_id()
    for operation in (one, two):
        await gateway.admit(operation, {"key": "k"}, Decimal(2))
    for _ in range(3):
        await settle(engine, one, "1.5")
        await gateway.release(two)
        await settle(engine, two, "9")
    budget = (await budgets_of(engine))["k"]
    assert (budget.leased, budget.settled) == (Decimal(0), Decimal("1.5"))


async def test_an_admission_cut_off_is_taken_back(engine: AsyncEngine) -> None:
    await limit(engine, "key", "k", "10")
    gateway = Budgets(engine, REPLICA, "USD")
    cut_off = set()
    for microseconds in range(0, 12_000, 200):
        operation = new_id()
        try:
            async with asyncio.timeout(microseconds / 1e6):
                await gateway.admit(operation, {"key": "k"}, Decimal("0.1"))
        except TimeoutError:
            cut_off.add(operation)
    assert len(cut_off) > 5
    await gateway.admit(new_id(), {"key": "k"}, Decimal(0))
    async with engine.connect() as conn:
        held = (await conn.execute(text("SELECT operation_id FROM hold"))).scalars().all()
    assert not cut_off & set(held)


async def test_a_later_process_frees_what_a_dead_one_left_and_nothing_else(engine: AsyncEngine) -> None:
    await limit(engine, "key", "k", "10")
    dead, live, other = new_id(), new_id(), new_id()
    for replica, operation in (("place.1", dead), ("place.2", live), ("place2.1", other)):
        await Budgets(engine, replica, "USD").admit(operation, {"key": "k"}, Decimal(1))
    async with engine.begin() as conn:
        assert await holds.release_earlier_runs(conn, "place.2") == 1
        left = (await conn.execute(text("SELECT operation_id FROM hold"))).scalars().all()
    assert set(left) == {live, other}
    assert (await budgets_of(engine))["k"].leased == 2


async def test_a_budget_can_be_changed_and_removed_under_way(engine: AsyncEngine) -> None:
    budget_id = await limit(engine, "key", "k", "10")
    gateway = Budgets(engine, REPLICA, "USD")
    operation = new_id()
    await gateway.admit(operation, {"key": "k"}, Decimal(4))
    assert await limit(engine, "key", "k", "5") == budget_id
    assert await gateway.remaining({"key": "k"}) == 1
    async with engine.begin() as conn:
        assert await remove_budget(conn, budget_id)
        assert not await remove_budget(conn, budget_id)
    await settle(engine, operation, "3")
    assert await gateway.remaining({"key": "k"}) is None


@pytest.mark.parametrize("amount", [Decimal(-1), Decimal("NaN")])
async def test_a_hold_never_gives_money(engine: AsyncEngine, amount: Decimal) -> None:
    await limit(engine, "key", "k", "1")
    with pytest.raises(ValueError, match="amount is"):
        await Budgets(engine, REPLICA, "USD").admit(new_id(), {"key": "k"}, amount)
    with pytest.raises(ValueError, match="limit is"):
        await limit(engine, "key", "k2", str(amount))


async def test_bad_budgets_are_refused_with_a_sentence(engine: AsyncEngine) -> None:
    with pytest.raises(ValueError, match="not a time zone"):
        await limit(engine, "key", "k", "1", time_zone="Mars/Olympus")
    with pytest.raises(ValueError, match="'fortnight' is not a window; use one of hour, day, week, month, none"):
        await limit(engine, "key", "k", "1", window="fortnight")
    with pytest.raises(ValueError, match="'planet' is not a scope"):
        await limit(engine, "planet", "k", "1")


@pytest.mark.parametrize("seed", range(3))
async def test_whatever_the_order_a_hard_budget_is_never_exceeded(engine: AsyncEngine, seed: int) -> None:
    """Many workers admit, release and settle at random over nested scopes while a watcher reads the sums."""
    chance = random.Random(seed)
    kinds = ("org", "team", "user", "key")
    for kind in kinds:
        for scope in ("a", "b"):
            await limit(engine, kind, kind + scope, str(Decimal(chance.randrange(200, 1500)) / 100), window="none")
    admitted = settled = Decimal(0)

    async def worker(number: int) -> None:
        nonlocal admitted, settled
        luck = random.Random(seed * 1000 + number)
        gateway = Budgets(engine, f"place{number % 3}.run", "USD")
        for _ in range(25):
            operation, amount = new_id(), Decimal(luck.randrange(0, 100)) / 100
            scopes = {kind: kind + luck.choice("ab") for kind in luck.sample(kinds, luck.randrange(1, 5))}
            try:
                await gateway.admit(operation, scopes, amount)  # type: ignore[arg-type]
            except BudgetExhausted:
                continue
            if luck.random() < 0.3:
                await gateway.release(operation)
            else:
                await settle(engine, operation, str(amount * luck.randrange(0, 101) / 100))

    over: list[Budget] = []

    async def watch() -> None:
        while True:
            over.extend(b for b in (await budgets_of(engine)).values() if b.leased + b.settled > b.limit_amount)
            await asyncio.sleep(0.005)

    watcher = asyncio.create_task(watch())
    await asyncio.gather(*(worker(number) for number in range(12)))
    watcher.cancel()
    assert over == []
    budgets = await budgets_of(engine)
    assert all(budget.leased == 0 for budget in budgets.values())
    assert max(budget.settled for budget in budgets.values()) > 1
