"""Prepaid wallets: hold, then capture; never below zero; what expires first is used first."""

import asyncio
import random
from contextlib import AsyncExitStack, suppress
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncEngine

from billing import lease_rounds, settlements, wallets
from billing.leases import BudgetExhausted, Hold, Leases, OtherCurrencyError, UnpricedError, WalletExhausted
from billing.wallets import Wallet
from tests.billing.replicas import a_replica, admit, budget, row, until, wrong_sums
from tests.billing.test_lease_clocks import shift_clock

SOON = timedelta(hours=1)


async def wallet(engine: AsyncEngine, kind: Any = "team", scope: str = "t", currency: str = "USD") -> UUID:
    async with engine.begin() as conn:
        return await wallets.create_wallet(conn, kind, scope, currency=currency)


async def pay(engine: AsyncEngine, wallet_id: UUID, amount: str, lasts: timedelta | None = None) -> UUID:
    async with engine.begin() as conn:
        ends = None if lasts is None else datetime.now(UTC) + lasts
        return await wallets.top_up(conn, wallet_id, Decimal(amount), expires_at=ends)


async def look(engine: AsyncEngine, wallet_id: UUID) -> Wallet:
    """The wallet, whose account must add up."""
    async with engine.execution_options(isolation_level="REPEATABLE READ").connect() as conn:
        found = await wallets.get_wallet(conn, wallet_id)
        entries = await wallets.list_entries(conn, wallet_id, limit=10_000)
        rest = await conn.execute(
            text("SELECT coalesce(sum(rest), 0) FROM wallet_credit WHERE wallet_id = :id"), {"id": wallet_id}
        )
    assert found is not None
    assert found.balance == sum(entry.amount for entry in entries) == rest.scalar_one()
    assert found.balance >= found.held >= 0 and found.available >= 0
    return found


async def lines(engine: AsyncEngine, wallet_id: UUID) -> list[tuple[str, Decimal]]:
    async with engine.connect() as conn:
        return [
            (entry.kind, entry.amount) for entry in reversed(await wallets.list_entries(conn, wallet_id, limit=10_000))
        ]


async def charge(engine: AsyncEngine, *rows: Any) -> None:
    async with engine.begin() as conn:
        await settlements.settle(conn, rows)


async def test_a_hold_then_a_capture(engine: AsyncEngine, leases: Leases) -> None:
    purse = await wallet(engine)
    with pytest.raises(WalletExhausted, match=r"could cost 1 USD and the team's wallet in USD has 0 left$"):
        await admit(leases, "1", team="t")
    await pay(engine, purse, "10")
    await asyncio.sleep(1.2)
    hold = await admit(leases, "6", team="t")
    assert (await look(engine, purse)).held >= 6
    with pytest.raises(BudgetExhausted, match="has 4 left"):
        await admit(leases, "5", team="t")
    leases.settle(hold, Decimal("2.5"), 0)
    await charge(engine, row(hold, "2.5"))
    assert (await look(engine, purse)).balance == Decimal("7.5")
    await admit(leases, "7.5", team="t")
    assert await lines(engine, purse) == [("top_up", 10), ("capture", Decimal("-2.5"))]


async def test_a_top_up_is_heard_of_within_a_moment(engine: AsyncEngine, leases: Leases) -> None:
    purse = await wallet(engine)
    for _ in range(3):
        await pay(engine, purse, "1")
        await asyncio.sleep(1.1)
        await admit(leases, "1", team="t")
        with pytest.raises(BudgetExhausted):
            await admit(leases, "0.01", team="t")


async def test_what_expires_first_is_used_first(engine: AsyncEngine, leases: Leases) -> None:
    purse = await wallet(engine)
    await pay(engine, purse, "5")
    late = await pay(engine, purse, "3", 2 * SOON)
    early = await pay(engine, purse, "2", SOON)
    found = await look(engine, purse)
    assert (found.available, found.expiring) == (10, 2)
    for amount in ("1", "3"):
        hold = await admit(leases, amount, team="t")
        leases.settle(hold, Decimal(amount), 0)
        await charge(engine, row(hold, amount))
    async with engine.connect() as conn:
        taken = [
            (e.credit_id, e.amount) for e in reversed(await wallets.list_entries(conn, purse)) if e.kind == "capture"
        ]
    assert taken == [(early, -1), (early, -1), (late, -2)]
    assert (await look(engine, purse)).expiring == 1


async def test_expired_credit_is_gone_and_held_credit_is_not(engine: AsyncEngine) -> None:
    """A call that began in time is paid from what has expired since; what it did not need is lost."""
    purse = await wallet(engine)
    await pay(engine, purse, "4", SOON)
    await pay(engine, purse, "1")
    async with a_replica(engine) as leases:
        hold = await admit(leases, "3", team="t")
        await shift_clock(engine, "2 hours")
        (account,) = leases._pool.accounts.values()
        assert account.pot is not None
        account.pot.ends = 0.0  # as when the time has passed on this replica's own clock
        with pytest.raises(WalletExhausted, match="has 1 left"):
            await admit(leases, "1.5", team="t")
        leases.settle(hold, Decimal(2), 0)
        await charge(engine, row(hold, "2"))
    async with engine.begin() as conn:
        await wallets._expired(conn, purse)
    found = await look(engine, purse)
    assert (found.balance, found.available, found.held) == (1, 1, 0)
    assert sorted(await lines(engine, purse)) == sorted(
        [
            ("top_up", 4),
            ("top_up", 1),
            ("capture", -2),
            *[line for line in await lines(engine, purse) if line[0] == "expiry"],
        ]
    )
    assert sum(amount for kind, amount in await lines(engine, purse) if kind == "expiry") == -2


async def test_credit_of_a_wallet_that_rests_expires_too(engine: AsyncEngine) -> None:
    purse = await wallet(engine)
    await pay(engine, purse, "4", timedelta(seconds=1))
    await pay(engine, purse, "1", SOON)
    await asyncio.sleep(1.1)
    before = await look(engine, purse)
    assert (before.balance, before.available) == (5, 1)
    for _ in range(2):
        await wallets.expire_credit(engine)
    assert (await look(engine, purse)).balance == 1
    assert await lines(engine, purse) == [("top_up", 4), ("top_up", 1), ("expiry", -4)]


async def test_a_charge_above_its_hold_takes_what_is_there(engine: AsyncEngine, leases: Leases) -> None:
    purse = await wallet(engine)
    await pay(engine, purse, "10")
    one, other = await admit(leases, "4", team="t"), await admit(leases, "5", team="t")
    leases.settle(one, Decimal(20), 0)
    await charge(engine, row(one, "20"))
    found = await look(engine, purse)
    assert found.balance == found.held >= 5, "what the other call holds is still there"
    async with engine.connect() as conn:
        owed = sum(entry.uncollected for entry in await wallets.list_entries(conn, purse))
    assert owed == 20 - (10 - found.balance)
    leases.settle(other, Decimal(5), 0)
    await charge(engine, row(other, "5"))
    assert (await look(engine, purse)).balance >= 0
    assert await wrong_sums(engine) == []


async def test_refunds_and_corrections(engine: AsyncEngine, leases: Leases) -> None:
    purse = await wallet(engine)
    await pay(engine, purse, "4", SOON)
    wrong = await admit(leases, "1", team="t")
    leases.settle(wrong, Decimal(1), 0)
    await charge(engine, row(wrong, "1"))
    hold = await admit(leases, "2", team="t")
    async with engine.begin() as conn:
        with pytest.raises(ValueError, match=r"1\.01 cannot be given back: calls were charged 1 from this wallet"):
            await wallets.refund(conn, purse, Decimal("1.01"))
        await wallets.refund(conn, purse, Decimal("0.5"), note="an answer in the wrong language")
        with pytest.raises(ValueError, match=r"0\.6 cannot be .* charged 1 from .*, and 0\.5 of that was given back"):
            await wallets.refund(conn, purse, Decimal("0.6"))
        await wallets.adjust(conn, purse, Decimal("0.25"), note="rounding")
    found = await look(engine, purse)
    assert found.available == Decimal("3.75") - found.held
    async with engine.begin() as conn:
        with pytest.raises(ValueError, match="is available, and gateways hold"):
            await wallets.adjust(conn, purse, Decimal(-3), note="too much")
        await wallets.adjust(conn, purse, -found.available, note="closed")
    assert (await look(engine, purse)).available == 0
    leases.settle(hold, Decimal(2), 0)
    await charge(engine, row(hold, "2"))
    await look(engine, purse)


async def test_a_closed_wallet_pays_for_no_call_and_keeps_its_account(engine: AsyncEngine, leases: Leases) -> None:
    purse = await wallet(engine)
    await pay(engine, purse, "10", SOON)
    await pay(engine, purse, "1")
    hold = await admit(leases, "4", team="t")
    leases.release(await admit(leases, "1", team="t"))

    async def close() -> Decimal:
        async with engine.begin() as conn:
            return await wallets.close(conn, purse, note="the contract ended")

    async with asyncio.timeout(10):
        while await close() != 4:  # noqa: ASYNC110 - what the gateway has and no call uses comes back by itself
            await asyncio.sleep(0.05)
    with pytest.raises(WalletExhausted):
        await admit(leases, "0.01", team="t")
    assert (await look(engine, purse)).closed_at is None
    leases.settle(hold, Decimal(3), 0)
    await charge(engine, row(hold, "3"))
    async with asyncio.timeout(10):
        while await close():  # noqa: ASYNC110 - the gateway gives back the rest of what the call held
            await asyncio.sleep(0.05)
    found = await look(engine, purse)
    assert (found.balance, found.held) == (0, 0) and found.closed_at is not None
    entries = await lines(engine, purse)
    assert sum(amount for kind, amount in entries if kind == "adjustment") == -8
    assert ("capture", -3) in entries or sum(amount for kind, amount in entries if kind == "capture") == -3
    await until(lambda: not leases._pool.accounts)
    await admit(leases, "100", team="t")  # nobody asks the wallet any more
    assert await close() == 0 and (await look(engine, purse)).closed_at == found.closed_at
    async with engine.begin() as conn:
        for work in (wallets.top_up(conn, purse, Decimal(1)), wallets.refund(conn, purse, Decimal(1))):
            with pytest.raises(ValueError, match=r"was closed at .*opens it again"):
                await work
        with pytest.raises(ValueError, match="had a wallet in USD"):
            await wallets.create_wallet(conn, "team", "t", currency="EUR")
        with pytest.raises(ValueError, match="say in a note"):
            await wallets.close(conn, purse, note=" ")
    assert await wallet(engine) == purse
    await pay(engine, purse, "2")
    await until(lambda: bool(leases._pool.accounts))
    with pytest.raises(WalletExhausted):
        await admit(leases, "100", team="t")
    await admit(leases, "2", team="t")
    assert [kind for kind, _ in await lines(engine, purse)][: len(entries)] == [kind for kind, _ in entries]


async def test_bad_amounts_and_ids_are_refused_with_a_sentence(engine: AsyncEngine) -> None:
    purse = await wallet(engine)
    other = await budget(engine, "team", "t", "1")
    for amount, changes, sentence in [
        ("0", {}, "the amount is 0"),
        ("-1", {}, "must be a finite number, 0 or more"),
        ("NaN", {}, "must be a finite number"),
        ("1", {"expires_at": datetime(2020, 1, 1, tzinfo=UTC)}, "has passed"),
        ("1", {"expires_at": datetime(2120, 1, 1)}, "has no time zone"),
    ]:
        async with engine.begin() as conn:
            with pytest.raises(ValueError, match=sentence):
                await wallets.top_up(conn, purse, Decimal(amount), **changes)  # type: ignore[arg-type]
    async with engine.begin() as conn:
        with pytest.raises(ValueError, match="there is no wallet"):
            await wallets.top_up(conn, other, Decimal(1))
        with pytest.raises(ValueError, match="this team has a wallet"):
            await wallets.create_wallet(conn, "team", "t", currency="USD")


async def test_entries_are_only_ever_added_to(engine: AsyncEngine) -> None:
    purse = await wallet(engine)
    await pay(engine, purse, "1")
    for statement in ("UPDATE wallet_entry SET amount = 2", "DELETE FROM wallet_entry"):
        with pytest.raises(DBAPIError, match="only ever added to"):
            async with engine.begin() as conn:
                await conn.execute(text(statement))


async def test_free_unpriced_and_foreign_calls(engine: AsyncEngine) -> None:
    await wallet(engine)
    async with a_replica(engine) as leases:
        await admit(leases, "0", team="t")
        with pytest.raises(UnpricedError, match="the team's wallet in USD cannot go below zero"):
            await admit(leases, None, team="t")
    async with a_replica(engine, currency="EUR") as leases:
        with pytest.raises(OtherCurrencyError, match=r"the team's wallet in USD cannot pay for calls .* in EUR"):
            await admit(leases, "1", team="t")


async def test_with_a_budget_all_or_nothing(engine: AsyncEngine, leases: Leases) -> None:
    purse = await wallet(engine)
    await pay(engine, purse, "10")
    await budget(engine, "org", "o", "1")
    with pytest.raises(BudgetExhausted, match="the org's budget"):
        await admit(leases, "2", team="t", org="o")
    await admit(leases, "10", team="t")


async def test_fifty_calls_and_credit_for_one(engine: AsyncEngine) -> None:
    purse = await wallet(engine)
    await pay(engine, purse, "0.01")
    async with AsyncExitStack() as stack:
        replicas = [await stack.enter_async_context(a_replica(engine, f"place{n}.run")) for n in range(4)]
        wanted = (admit(replicas[n % 4], "0.01", team="t") for n in range(50))
        results = await asyncio.gather(*wanted, return_exceptions=True)
        assert sum(isinstance(result, Hold) for result in results) == 1
        assert sum(isinstance(result, WalletExhausted) for result in results) == 49


@pytest.mark.parametrize("open_ended", [False, True])
async def test_a_wallet_and_a_budget_each_for_one_of_fifty_calls(engine: AsyncEngine, open_ended: bool) -> None:
    """No replica keeps one half while it waits for the other: the call that can be paid is."""
    await budget(engine, "team", "t", "0.01")
    purse = await wallet(engine, "org", "o")
    await pay(engine, purse, "0.01")
    async with AsyncExitStack() as stack:
        replicas = [await stack.enter_async_context(a_replica(engine, f"place{n}.run")) for n in range(8)]

        async def call(leases: Leases) -> Hold:
            if open_ended:  # the gateway looks at what is left, which leases a slice of each
                await leases.left({"team": ["t"], "org": ["o"]})
            return await admit(leases, "0.01", team="t", org="o")

        results = await asyncio.gather(*(call(replicas[n % 8]) for n in range(50)), return_exceptions=True)
        assert sum(isinstance(result, Hold) for result in results) == 1
        assert sum(isinstance(result, BudgetExhausted) for result in results) == 49
        assert await wrong_sums(engine) == []


@pytest.mark.parametrize("seed", range(2))
async def test_whatever_the_order_a_balance_is_never_below_zero(
    engine: AsyncEngine, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Calls on three replicas, a ledger in any order, top-ups that expire at once or later, corrections, refunds."""
    monkeypatch.setattr(lease_rounds, "TICK_SECONDS", 0.05)
    luck = random.Random(seed)
    purse = await wallet(engine)
    await pay(engine, purse, "5")
    rows: list[Any] = []
    billed_in_all = Decimal(0)

    async def calls(leases: Leases) -> None:
        nonlocal billed_in_all
        for _ in range(30):
            amount = Decimal(luck.randrange(0, 100)) / 100
            try:
                hold = await admit(leases, str(amount), team="t")
            except BudgetExhausted:
                continue
            await asyncio.sleep(luck.random() / 100)
            if luck.random() < 0.2:
                leases.release(hold)
            else:
                billed = amount * luck.randrange(0, 101) / 100
                billed_in_all += billed
                rows.append(row(hold, str(billed)))
                leases.settle(hold, billed, 0)

    over = asyncio.Event()

    async def ledger() -> None:
        while not over.is_set() or rows:
            batch = [rows.pop(luck.randrange(len(rows))) for _ in range(min(len(rows), 5))]
            await charge(engine, *batch)
            await asyncio.sleep(0.005)

    async def operator() -> None:
        while not over.is_set():
            with suppress(ValueError):  # credit that ended while it waited for its turn
                await pay(engine, purse, "0.7", luck.choice([None, timedelta(seconds=0.5), timedelta(seconds=2)]))
            async with engine.begin() as conn:
                try:
                    await wallets.adjust(conn, purse, Decimal("-0.1"), note="x")
                except ValueError:
                    with suppress(ValueError):  # nothing was charged yet
                        await wallets.refund(conn, purse, Decimal("0.2"))
            await wallets.expire_credit(engine)
            await look(engine, purse)
            assert await wrong_sums(engine) == []
            await asyncio.sleep(0.05)

    others = asyncio.gather(ledger(), operator())
    async with AsyncExitStack() as stack:
        replicas = [await stack.enter_async_context(a_replica(engine, f"p{n}.run")) for n in range(3)]
        await asyncio.gather(*(calls(replicas[n % 3]) for n in range(9)))
        over.set()
        await others
    lasts = 0.5
    while True:  # credit that expires for certain: no call is there to use it, no lease to hold it
        with suppress(ValueError):  # it ended while the machine was busy
            await pay(engine, purse, "0.7", timedelta(seconds=lasts))
            break
        lasts *= 2
    await asyncio.sleep(lasts)
    await wallets.expire_credit(engine)
    found = await look(engine, purse)
    assert found.held == 0
    entries = await lines(engine, purse)
    assert -sum(amount for kind, amount in entries if kind == "capture") == billed_in_all
    assert {kind for kind, _ in entries} >= {"top_up", "capture", "expiry"}
