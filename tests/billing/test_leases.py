"""Leases out of a real PostgreSQL: never over, all or nothing, to the last cent, and no query while a lease lasts."""

import asyncio
import random
from contextlib import AsyncExitStack
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import event, text
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from billing import leases as leases_module
from billing import settlements, wallets
from billing.allowances import ScopeKind
from billing.budgets import list_budgets, remove_budget
from billing.leases import BudgetExhausted, Leases, Need, OtherCurrencyError, UnpricedError
from billing.ledger import Ledger
from billing.notices import Notices
from billing.spool import Spool
from tests.billing.replicas import a_replica, admit, admit_to, budget, budgets_of, row, until, wrong_sums


async def charge(engine: AsyncEngine, *rows: Any) -> None:
    async with engine.begin() as conn:
        await settlements.settle(conn, rows)


async def test_a_budget_for_one_call_admits_one_of_fifty(engine: AsyncEngine) -> None:
    await budget(engine, "key", "k", "0.01", window="day")
    async with AsyncExitStack() as stack:
        replicas = [await stack.enter_async_context(a_replica(engine, f"place{n}.run")) for n in range(4)]
        calls = (admit(replicas[n % 4], "0.01", key="k") for n in range(50))
        results = await asyncio.gather(*calls, return_exceptions=True)
        assert sum(isinstance(result, BudgetExhausted) for result in results) == 49
        assert (await budgets_of(engine))["k"].leased == Decimal("0.01")
        for number, result in enumerate(results):
            if not isinstance(result, BaseException):
                replicas[number % 4].release(result)
    assert (await budgets_of(engine))["k"].leased == 0  # what is not used goes back at the end


async def test_what_another_replica_holds_unused_is_given_back_for_the_last_call(engine: AsyncEngine) -> None:
    await budget(engine, "key", "k", "10")
    async with a_replica(engine, "a.1") as one, a_replica(engine, "b.1") as two:
        one.release(await admit(one, "6", key="k"))
        two.release(await admit(two, "4", key="k"))
        assert (await budgets_of(engine))["k"].leased == 10
        hold = await admit(two, "10", key="k")
        with pytest.raises(BudgetExhausted, match="has 0 left"):
            await admit(one, "0.01", key="k")
        two.settle(hold, Decimal(9), 0)
        await charge(engine, row(hold, "9"))
        await asyncio.sleep(leases_module.BARREN_SECONDS)
        one.release(await admit(one, "1", key="k"))
        assert await wrong_sums(engine) == []


async def test_both_ask_each_other_and_one_gets_it(engine: AsyncEngine) -> None:
    await budget(engine, "key", "k", "10")
    async with a_replica(engine, "a.1") as one, a_replica(engine, "b.1") as two:
        one.release(await admit(one, "6", key="k"))
        two.release(await admit(two, "4", key="k"))
        calls = (admit(leases, "10", key="k") for leases in (one, two))
        results = await asyncio.gather(*calls, return_exceptions=True)
        assert sum(isinstance(result, BudgetExhausted) for result in results) == 1


async def test_nested_scopes_are_all_or_nothing(engine: AsyncEngine, leases: Leases) -> None:
    await budget(engine, "org", "o", "10")
    await budget(engine, "user", "u", "1")
    await admit(leases, "0.75", org="o", user="u", team="without budget")
    with pytest.raises(BudgetExhausted) as caught:
        await admit(leases, "0.5", org="o", user="u")
    assert (caught.value.scope_kind, caught.value.scope_id) == ("user", "u")
    assert (caught.value.limit, caught.value.remaining) == (Decimal(1), Decimal("0.25"))
    assert "the user's budget of 1 USD has 0.25 left" in str(caught.value)
    assert (await leases.left({"org": ["o"], "user": ["u"]})).money == Decimal("0.25")
    await admit(leases, "0.25", org="o", user="u")  # the last cent is still handed out
    await admit(leases, "9", org="o")  # and of the refused call nothing is held in the org
    assert (await leases.left({"org": ["o"]})).money == 0


async def test_the_refusal_names_the_reset(engine: AsyncEngine, leases: Leases) -> None:
    await budget(engine, "team", "t", "1", window="month", time_zone="Asia/Tokyo")
    with pytest.raises(BudgetExhausted, match=r"by the month has 0 left; it resets at 20\d\d-\d\d-\d\d 15:00 UTC"):
        await admit(leases, "1", team="t")
        await admit(leases, "1", team="t")


async def test_a_soft_budget_counts_and_never_refuses(engine: AsyncEngine, leases: Leases) -> None:
    await budget(engine, "key", "k", "1", hard=False)
    hold = await admit(leases, "5", key="k")
    await admit(leases, None, key="k")  # unpriced, nothing to count
    assert (await leases.left({"key": ["k"]})).money is None
    leases.settle(hold, Decimal("4.5"), 0)
    await charge(engine, row(hold, "4.5"))
    found = (await budgets_of(engine))["k"]
    assert (found.leased, found.settled) == (Decimal(0), Decimal("4.5"))


async def test_an_unpriced_call_is_refused_under_a_hard_budget_only(engine: AsyncEngine, leases: Leases) -> None:
    await admit(leases, None, key="k")
    await budget(engine, "key", "k", "100")
    await until(lambda: bool(leases._pool.accounts))
    with pytest.raises(UnpricedError, match="no complete price") as caught:
        await admit(leases, None, key="k")
    assert caught.value.scope_kind == "key"


async def test_a_budget_in_another_currency_is_never_compared_with_charges(engine: AsyncEngine) -> None:
    await budget(engine, "key", "k", "1000")
    await budget(engine, "team", "t", "1000", currency="EUR")
    async with a_replica(engine) as leases:
        for amount in ("1", "0", None):
            with pytest.raises(OtherCurrencyError, match=r"the team's budget of 1000 EUR cannot pay for .* in USD"):
                await admit(leases, amount, key="k", team="t")
        with pytest.raises(OtherCurrencyError):
            await leases.left({"key": ["k"], "team": ["t"]})
        assert (await budgets_of(engine))["k"].leased == 0
    async with a_replica(engine, currency="EUR") as leases:
        await admit(leases, "1", team="t")


async def test_a_soft_budget_in_another_currency_counts_no_call(engine: AsyncEngine, leases: Leases) -> None:
    await budget(engine, "key", "k", "5")
    await budget(engine, "team", "t", "1", currency="EUR", hard=False)
    hold = await admit(leases, "4", key="k", team="t")
    assert len(hold.charges) == 1
    with pytest.raises(BudgetExhausted, match="the key's budget of 5 USD"):
        await admit(leases, "2", key="k", team="t")


async def test_a_free_call_passes_an_exhausted_budget(engine: AsyncEngine, leases: Leases) -> None:
    await budget(engine, "key", "k", "1")
    hold = await admit(leases, "1", key="k")
    leases.settle(hold, Decimal(3), 0)
    await charge(engine, row(hold, "3"))  # the charge exceeds the hold: it counts as it is
    found = (await budgets_of(engine))["k"]
    assert (found.leased, found.settled) == (0, 3)
    free = await admit(leases, "0", key="k")
    assert [part.held for part in free.charges] == [0]
    with pytest.raises(BudgetExhausted, match="has 0 left"):
        await admit(leases, "0.000001", key="k")


async def test_a_hold_ends_once(engine: AsyncEngine, leases: Leases) -> None:
    await budget(engine, "key", "k", "10")
    one, two = await admit(leases, "2", key="k"), await admit(leases, "2", key="k")
    for _ in range(3):
        leases.settle(one, Decimal("1.5"), 0)
        leases.release(two)
        leases.settle(two, Decimal(9), 0)
    assert (await leases.left({"key": ["k"]})).money == Decimal("8.5")
    with pytest.raises(BudgetExhausted):
        await admit(leases, "8.51", key="k")
    await admit(leases, "8.5", key="k")


async def test_an_admission_cut_off_holds_nothing(engine: AsyncEngine, leases: Leases) -> None:
    await budget(engine, "key", "k", "10")
    cut_off, holds = 0, []
    for microseconds in range(0, 12_000, 200):
        try:
            async with asyncio.timeout(microseconds / 1e6):
                await leases.left({"key": [f"{microseconds}"]})  # waits for the database
                holds.append(await admit(leases, "0.1", key="k", user=f"{microseconds}"))
        except TimeoutError:
            cut_off += 1
    assert cut_off > 5
    (account,) = leases._pool.accounts.values()
    assert sum(pot.open for pot in account.pots.values()) == len(holds)


async def test_the_hot_path_asks_the_database_nothing(engine: AsyncEngine, leases: Leases) -> None:
    scopes: dict[ScopeKind, list[str]] = {"org": ["o"], "key": ["k"], "tag": ["a=b", "c=d"], "model": ["m"]}
    await budget(engine, "org", "o", "1000", window="month")
    await budget(engine, "key", "k", "1000", window="day", rollover=True)
    await budget(engine, "model", "m", "1000", also={"tag": "c=d"})
    async with engine.begin() as conn:
        await wallets.top_up(conn, await wallets.create_wallet(conn, "org", "o", currency="USD"), Decimal(1000))
    leases.release(await admit_to(leases, scopes, Need(Decimal("0.01"), 100)))
    statements: list[str] = []

    @event.listens_for(engine.sync_engine, "before_cursor_execute")
    def count(*arguments: Any) -> None:
        statements.append(arguments[2])

    for _ in range(1000):
        call = admit_to(leases, scopes, Need(Decimal("0.01"), 100))
        with pytest.raises(StopIteration) as done:  # it does not even suspend
            call.send(None)
        leases.settle(done.value.value, Decimal("0.001"), 50)
        assert (await leases.left(scopes)).money is not None
    assert statements == []
    began, calls = asyncio.get_running_loop().time(), 0
    while asyncio.get_running_loop().time() < began + 2:
        leases.settle(await admit_to(leases, scopes, Need(Decimal("0.01"), 100)), Decimal("0.001"), 50)
        calls += 1
        await asyncio.sleep(0)
    assert calls > 2000
    assert len([s for s in statements if "pg_notify" not in s]) < 60  # the background's looks, and refills
    event.remove(engine.sync_engine, "before_cursor_execute", count)


async def test_a_lease_is_refilled_before_it_is_used_up(engine: AsyncEngine, leases: Leases) -> None:
    await budget(engine, "key", "k", "1000")
    leases.release(await admit(leases, "1", key="k"))
    waited = 0
    for _ in range(500):
        call = admit_to(leases, {"key": ["k"]}, Need(Decimal(1), 0))
        try:
            call.send(None)
        except StopIteration:
            call.close()
        else:
            waited += 1
            call.close()
        await asyncio.sleep(0.002)
    assert waited < 10


@pytest.mark.parametrize("heard", [True, False])
async def test_a_changed_budget_is_in_force_within_a_second(engine: AsyncEngine, heard: bool) -> None:
    """Through notices, and on a replica that hears none."""
    async with AsyncExitStack() as stack:
        if heard:
            leases = await stack.enter_async_context(a_replica(engine))
        else:
            leases = Leases(engine, "deaf.1", "USD", Notices(engine))
            task = asyncio.create_task(leases.run())
            stack.callback(task.cancel)
        await admit(leases, "100", key="k")  # there is none: that is known by now
        budget_id = await budget(engine, "key", "k", "10")
        await asyncio.sleep(0.9)
        with pytest.raises(BudgetExhausted):
            await admit(leases, "100", key="k")
        await admit(leases, "4", key="k")
        assert await budget(engine, "key", "k", "5") == budget_id
        await asyncio.sleep(0.9)
        assert (await leases.left({"key": ["k"]})).money == 1
        with pytest.raises(BudgetExhausted):
            await admit(leases, "2", key="k")
        await budget(engine, "key", "k", "20")
        await asyncio.sleep(0.9)
        hold = await admit(leases, "16", key="k")
        async with engine.begin() as conn:
            assert await remove_budget(conn, budget_id)
            assert not await remove_budget(conn, budget_id)
        await asyncio.sleep(0.9)
        leases.settle(hold, Decimal(3), 0)
        await charge(engine, row(hold, "3"))
        assert (await leases.left({"key": ["k"]})).money is None
        await admit(leases, "100", key="k")


async def test_without_the_database_the_lease_serves(engine: AsyncEngine, postgres_url: str) -> None:
    await budget(engine, "key", "k", "160")
    outside = create_async_engine(postgres_url, isolation_level="AUTOCOMMIT")
    async with a_replica(engine) as leases:
        leases.release(await admit(leases, "1", key="k"))
        await admit(leases, None, user="known to have none")
        async with engine.connect() as conn:
            name = (await conn.execute(text("SELECT current_database()"))).scalar_one()
        async with outside.connect() as conn:
            await conn.execute(text(f"ALTER DATABASE {name} ALLOW_CONNECTIONS false"))
            await conn.execute(
                text("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = :name"),
                {"name": name},
            )
            holds = [await admit(leases, "1", key="k") for _ in range(9)]
            await admit(leases, None, user="known to have none")
            for amount, scopes in (("50", {"key": "k"}), ("1", {"key": "never seen"})):
                with pytest.raises(Exception) as caught:  # the database's own, whichever it is
                    await admit(leases, amount, **scopes)
                assert not isinstance(caught.value, BudgetExhausted)
            for hold in holds:
                leases.settle(hold, Decimal(1), 0)
            await conn.execute(text(f"ALTER DATABASE {name} ALLOW_CONNECTIONS true"))
        await charge(engine, *(row(hold, "1") for hold in holds))
        await admit(leases, "151", key="k")
        assert await wrong_sums(engine) == []
    await outside.dispose()


async def test_a_later_process_frees_what_a_dead_one_had_and_nothing_else(engine: AsyncEngine) -> None:
    await budget(engine, "key", "k", "30")
    for name in ("place.1", "place.2", "place2.1"):
        leases = Leases(engine, name, "USD", Notices(engine))
        task = asyncio.create_task(leases.run())
        await admit(leases, "10", key="k")
        task.cancel()
    async with engine.begin() as conn:
        assert await settlements.free_earlier_runs(conn, "place.2") == 1
    assert (await budgets_of(engine))["k"].leased == 20
    async with engine.begin() as conn:
        assert await settlements.free_earlier_runs(conn, "place.2") == 0
        left = (await conn.execute(text("SELECT replica FROM lease ORDER BY replica"))).scalars().all()
    assert left == ["place.2", "place2.1"]


@pytest.mark.parametrize("seed", range(3))
async def test_whatever_the_order_a_hard_budget_is_never_exceeded(
    engine: AsyncEngine, tmp_path: Path, seed: int
) -> None:
    """Workers on several replicas admit, release and settle over nested scopes, ledgers charge, a watcher reads."""
    chance = random.Random(seed)
    kinds: tuple[ScopeKind, ...] = ("org", "team", "user", "key")
    for kind in kinds:
        for scope in ("a", "b"):
            await budget(engine, kind, kind + scope, str(Decimal(chance.randrange(200, 1500)) / 100))
    spools = [Spool(tmp_path / str(n)) for n in range(3)]
    spent = Decimal(0)

    async def worker(number: int, leases: Leases, spool: Spool) -> None:
        nonlocal spent
        luck = random.Random(seed * 1000 + number)
        for _ in range(25):
            amount = Decimal(luck.randrange(0, 100)) / 100
            scopes = {kind: [kind + luck.choice("ab")] for kind in luck.sample(kinds, luck.randrange(1, 5))}
            try:
                hold = await admit_to(leases, scopes, Need(amount, 0))  # type: ignore[arg-type]
            except BudgetExhausted:
                continue
            if luck.random() < 0.3:
                leases.release(hold)
            else:
                billed = amount * luck.randrange(0, 101) / 100
                spent += billed * len(scopes)
                await spool.append(row(hold, str(billed)))
                leases.settle(hold, billed, 0)

    wrong: list[Any] = []

    async def watch() -> None:
        while True:
            wrong.extend(await wrong_sums(engine))
            await asyncio.sleep(0.005)

    watcher = asyncio.create_task(watch())
    ledgers = [asyncio.create_task(Ledger(engine, spool).run()) for spool in spools]
    async with AsyncExitStack() as stack:
        replicas = [await stack.enter_async_context(a_replica(engine, spool.replica)) for spool in spools]
        await asyncio.gather(*(worker(n, replicas[n % 3], spools[n % 3]) for n in range(12)))
        for task in (watcher, *ledgers):
            task.cancel()
        await asyncio.wait([watcher, *ledgers])
        for spool in spools:
            await Ledger(engine, spool).drain()
    assert wrong == []
    async with engine.connect() as conn:
        found = await list_budgets(conn)
    assert all(budget.leased == 0 for budget in found)
    assert sum(budget.settled for budget in found) == spent > 4
    for spool in spools:
        await spool.close()


@pytest.mark.parametrize("amount", [Decimal(-1), Decimal("NaN")])
async def test_a_hold_never_gives_money(engine: AsyncEngine, leases: Leases, amount: Decimal) -> None:
    await budget(engine, "key", "k", "1")
    with pytest.raises(ValueError, match="amount is"):
        await admit(leases, str(amount), key="k")
    with pytest.raises(ValueError, match="limit is"):
        await budget(engine, "key", "k2", str(amount))


async def test_a_budget_keeps_its_currency(engine: AsyncEngine) -> None:
    old = await budget(engine, "key", "k", "1")
    with pytest.raises(ValueError, match="another currency than EUR; remove that one first"):
        await budget(engine, "key", "k", "2", currency="EUR")
    async with engine.begin() as conn:
        await remove_budget(conn, old)
    await budget(engine, "key", "k", "2", currency="EUR")
    assert (await budgets_of(engine))["k"].currency == "EUR"


async def test_bad_budgets_are_refused_with_a_sentence(engine: AsyncEngine) -> None:
    with pytest.raises(ValueError, match="not a time zone"):
        await budget(engine, "key", "k", "1", time_zone="Mars/Olympus")
    with pytest.raises(ValueError, match="'minute' is not a window; use one of hour, day, week, month, none"):
        await budget(engine, "key", "k", "1", window="minute")
    with pytest.raises(ValueError, match="'planet' is not a scope"):
        await budget(engine, "planet", "k", "1")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="'scenario' is not a tag; write it as name=value"):
        await budget(engine, "tag", "scenario", "1")
    with pytest.raises(ValueError, match="at most 1000"):
        await budget(engine, "model", "m" * 1001, "1")
