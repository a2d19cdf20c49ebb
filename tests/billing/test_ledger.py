"""From the spool to a real PostgreSQL: exact, once, and through outages."""

import asyncio
import contextlib
import os
import random
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import UUID

import msgspec
import pytest
from sqlalchemy import select, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from billing import ledger, settlements
from billing.budgets import list_budgets, set_budget
from billing.frames import encode
from billing.ids import new_id
from billing.leases import Leases
from billing.ledger import Ledger
from billing.notices import Notices
from billing.records import (
    NO_COLUMNS,
    TOKEN_CLASSES,
    AttemptRecord,
    CachedAnswer,
    Charge,
    OperationRecord,
    TokenClasses,
)
from billing.spool import UNREADABLE, Spool
from billing.tables import attempt, operation
from gateway.postgres import embedded_postgres
from migrations import upgrade
from tests.billing.replicas import a_replica, admit, row, until
from tests.billing.samples import an_attempt, an_operation

A_CACHED_ANSWER = CachedAnswer(
    cached_from=new_id(),
    saved_prompt_tokens=1_862,
    saved_completion_tokens=126,
    saved_billed=Decimal("0.00019416"),
    saved_cost=Decimal("0.000000000000000001"),
    price_version_id=new_id(),
    price_override_id=None,
)


@pytest.fixture
async def spool(tmp_path: Path) -> AsyncIterator[Spool]:
    spool = Spool(tmp_path / "spool")
    yield spool
    await spool.close()


async def rows(engine: AsyncEngine, query: Any) -> list[dict[str, Any]]:
    async with engine.connect() as conn:
        return [dict(row) for row in (await conn.execute(query)).mappings()]


async def count(engine: AsyncEngine) -> int:
    return len(await rows(engine, select(operation.c.id)))


async def spent(engine: AsyncEngine) -> tuple[Decimal, Decimal]:
    """(leased, settled) of the only budget."""
    async with engine.connect() as conn:
        (budget,) = await list_budgets(conn)
        return budget.leased, budget.settled


async def held(engine: AsyncEngine, spool: Spool, amount: str, *billed: str | None, limit: str = "100") -> list[Any]:
    """Rows of calls that were admitted in the only budget, each with a hold of `amount`."""
    async with engine.begin() as conn:
        await set_budget(conn, "key", "k", "none", Decimal(limit), currency="USD")
    leases = Leases(engine, spool.replica, "USD", Notices(engine))
    task = asyncio.create_task(leases.run())
    found = [row(await admit(leases, amount, key="k"), charge) for charge in billed]
    task.cancel()
    await asyncio.wait([task])
    return found


@pytest.mark.parametrize("cached", [None, A_CACHED_ANSWER], ids=["computed", "cached"])
async def test_every_field_arrives_to_the_last_digit(
    engine: AsyncEngine, spool: Spool, cached: CachedAnswer | None
) -> None:
    record = an_operation(cached=cached)
    await spool.append(record)
    assert await Ledger(engine, spool).drain() == 1
    (found,) = await rows(engine, select(operation))
    assert datetime.now(UTC) - found.pop("recorded_at") < timedelta(minutes=1)
    answer = dict.fromkeys(CachedAnswer.__struct_fields__) if cached is None else msgspec.structs.asdict(cached)
    assert found == {k: v for k, v in msgspec.structs.asdict(record).items() if k not in NO_COLUMNS} | answer
    attempts = []
    for found in await rows(engine, select(attempt).order_by(attempt.c.number)):
        assert found.pop("operation_id") == record.id
        attempts.append(
            AttemptRecord(tokens=TokenClasses(**{name: found.pop(name) for name in TOKEN_CLASSES}), **found)
        )
    assert attempts == record.attempts


def test_records_and_tables_have_the_same_fields() -> None:
    """Otherwise a field would be dropped in silence on its way into the database."""
    wanted = {*OperationRecord.__struct_fields__, *CachedAnswer.__struct_fields__, "recorded_at"} - NO_COLUMNS
    assert set(operation.c.keys()) == wanted
    wanted = {*AttemptRecord.__struct_fields__, *TokenClasses.__struct_fields__, "operation_id"} - {"tokens"}
    assert set(attempt.c.keys()) == wanted


async def test_a_record_sent_twice_lands_and_settles_once(engine: AsyncEngine, spool: Spool) -> None:
    (record,) = await held(engine, spool, "40", "1.5")
    record = msgspec.structs.replace(record, attempts=[an_attempt(1), an_attempt(2)])
    copier = Ledger(engine, spool)
    await spool.append(record)
    await spool.append(msgspec.structs.replace(record, billed=Decimal(9), attempts=[an_attempt(5)]))
    assert await copier.drain() == 1
    await spool.append(record)
    assert await copier.drain() == 0
    assert await spent(engine) == (Decimal("38.5"), Decimal("1.5"))
    (found,) = await rows(engine, select(operation))
    assert found["billed"] == Decimal("1.5")
    assert [found["number"] for found in await rows(engine, select(attempt))] == [1, 2]


async def test_two_ledgers_with_the_same_records_settle_once(engine: AsyncEngine, tmp_path: Path) -> None:
    spools = [Spool(tmp_path / str(n)) for n in range(3)]
    records = await held(engine, spools[0], "1", *["0.01"] * 100)
    for n, other in enumerate(spools):
        await asyncio.gather(*(other.append(record) for record in (records, records[::-1], records[50:])[n]))
    copied = await asyncio.gather(*(Ledger(engine, other).drain() for other in spools))
    assert sum(copied) == 100
    assert await spent(engine) == (Decimal(99), Decimal(1))
    for other in spools:
        await other.close()


async def test_the_charge_is_settled_in_full_even_over_the_hold(engine: AsyncEngine, spool: Spool) -> None:
    for record in await held(engine, spool, "0.5", "3.25", None, limit="1"):
        await spool.append(record)
    await Ledger(engine, spool).drain()
    assert await spent(engine) == (Decimal("0.5"), Decimal("3.25"))


async def test_a_batch_that_fails_leaves_nothing_half_done(engine: AsyncEngine, spool: Spool) -> None:
    """Settlement and rows are one transaction: neither is there when the other fails."""
    (record,) = await held(engine, spool, "20", "0.054399")
    await spool.append(record)
    async with engine.begin() as conn:
        await conn.execute(text("ALTER TABLE budget_window RENAME TO elsewhere"))
    copier = Ledger(engine, spool)
    with pytest.raises(DBAPIError):
        await copier.drain()
    assert await count(engine) == 0
    assert spool.depth == 1
    async with engine.begin() as conn:
        await conn.execute(text("ALTER TABLE elsewhere RENAME TO budget_window"))
    assert await copier.drain() == 1
    assert await spent(engine) == (20 - record.billed, record.billed)


async def test_what_the_database_can_never_take_is_set_aside(engine: AsyncEngine, spool: Spool) -> None:
    good = [an_operation() for _ in range(20)]
    bad = an_operation(attempts=[an_attempt(tokens=TokenClasses(output_text=2**63))])
    for record in [*good[:7], bad, *good[7:]]:
        await spool.append(record)
    assert await Ledger(engine, spool).drain() == 20
    assert await count(engine) == 20
    assert spool.depth == 0
    (line,) = (spool.folder / UNREADABLE).read_bytes().splitlines()
    entry = msgspec.json.decode(line)
    assert "out of int64 range" in entry["reason"]
    assert entry["line"].encode() + b"\n" == encode(bad)


@pytest.mark.parametrize(
    ("billed", "leased", "settled"), [("1.5", "38.5", "1.5"), (None, "40", "0"), ("1E+131080", "0", "0")]
)
async def test_what_is_set_aside_is_charged_once(
    engine: AsyncEngine, spool: Spool, billed: str | None, leased: str, settled: str
) -> None:
    """Except a charge that no NUMERIC can hold: of that only the hold ends."""
    (record,) = await held(engine, spool, "40", billed)
    bad = msgspec.structs.replace(record, attempts=[an_attempt(tokens=TokenClasses(output_text=2**63))])
    copier = Ledger(engine, spool)
    for _ in range(2):  # as after a crash between the settlement and the discard
        await spool.append(bad)
        assert await copier.drain() == 0
    assert await spent(engine) == (Decimal(leased), Decimal(settled))
    assert spool.depth == 0


async def test_a_crash_before_the_record_frees_its_lease_and_one_after_does_not(
    engine: AsyncEngine, tmp_path: Path
) -> None:
    before = Spool(tmp_path)
    _died, spooled = await held(engine, before, "2", "1", "0.5")
    await before.append(spooled)
    await before.close()

    after = Spool(tmp_path)
    await held(engine, after, "30", "1")
    assert await Ledger(engine, after).recover() == 1
    assert await spent(engine) == (Decimal(30), Decimal("0.5"))
    assert {found["id"] for found in await rows(engine, select(operation.c.id))} == {spooled.id}
    await after.close()


async def test_settlement_and_admission_at_once_neither_deadlock_nor_lose_a_cent(
    engine: AsyncEngine, tmp_path: Path
) -> None:
    kinds = ("key", "user", "team", "org")
    async with engine.begin() as conn:
        for kind in kinds:
            for scope in "abc":
                await set_budget(conn, kind, scope, "day", Decimal(10**6), currency="USD")
    spools = [Spool(tmp_path / str(n)) for n in range(4)]

    async def serve(number: int, leases: Leases, other: Spool) -> None:
        for turn in range(15):
            scopes = {kind: "abc"[(turn * (n + 1) + number) % 3] for n, kind in enumerate(kinds)}
            hold = await admit(leases, "0.03", **scopes)
            await other.append(row(hold, "0.01"))
            leases.settle(hold, Decimal("0.01"), 0)

    loops = [asyncio.create_task(Ledger(engine, other).run()) for other in spools]
    async with contextlib.AsyncExitStack() as stack:
        replicas = [await stack.enter_async_context(a_replica(engine, other.replica)) for other in spools]
        await asyncio.gather(*(serve(number, replicas[number % 4], spools[number % 4]) for number in range(12)))
        await until(lambda: not any(other.depth for other in spools))
        for loop in loops:
            loop.cancel()
        await asyncio.wait(loops)
    async with engine.connect() as conn:
        found = await list_budgets(conn)
    assert sum(budget.settled for budget in found) == Decimal("0.01") * 12 * 15 * 4
    assert all(budget.leased == 0 for budget in found)
    for other in spools:
        await other.close()


async def test_eight_writers_settle_ten_thousand_in_any_order(engine: AsyncEngine, tmp_path: Path) -> None:
    """Each operation in three of twelve budgets, in an order of its own: the sums are exact and nobody deadlocks."""
    async with engine.begin() as conn:
        budgets = [
            await set_budget(conn, "key", f"{n}", "none", Decimal(10**6), currency="USD", hard=False) for n in range(12)
        ]
    luck = random.Random(7)
    start = datetime(2026, 11, 29, tzinfo=UTC)
    expected: dict[UUID, Decimal] = dict.fromkeys(budgets, Decimal(0))
    failed: list[object] = []

    async def write(number: int) -> None:
        spool = Spool(tmp_path / str(number))
        records = []
        for _ in range(1250):
            billed = Decimal(luck.randrange(10**9)) / 10**12
            charges = [Charge(budget_id=b, starts_at=start, held=Decimal(0)) for b in luck.sample(budgets, 3)]
            for charge in charges:
                expected[charge.budget_id] += billed
            records.append(an_operation(billed=billed, charges=charges, attempts=[], tags={}))
        await asyncio.gather(*(spool.append(record) for record in records))
        try:
            assert await Ledger(engine, spool).drain() == 1250
        except DBAPIError as error:  # a deadlock, for one: it would be tried again, and must not come to that
            failed.append(error)
        await spool.close()

    await asyncio.gather(*(write(number) for number in range(8)))
    assert failed == []
    found = await rows(engine, text("SELECT budget_id, settled FROM budget_window"))
    assert {row["budget_id"]: row["settled"] for row in found} == expected


async def test_the_loop_outlives_an_outage_of_postgresql(
    postgres_folder: Path, spool: Spool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger, "LONGEST_BACK_OFF_SECONDS", 0.3)
    servers = contextlib.ExitStack()
    url = await asyncio.to_thread(servers.enter_context, embedded_postgres(postgres_folder / "outage"))
    await asyncio.to_thread(upgrade, url)
    engine = create_async_engine(url, pool_pre_ping=True)
    copier = Ledger(engine, spool)
    loop = asyncio.create_task(copier.run())
    await spool.append(an_operation())
    await until(lambda: spool.depth == 0)

    await asyncio.to_thread(servers.close)
    for _ in range(3):
        await spool.append(an_operation())
    await until(lambda: copier.health().last_error is not None)
    assert copier.health().spooled == 3
    await asyncio.sleep(0.5)

    # The next server has another socket folder; what stays the same to the client is that connecting works again.
    again = await asyncio.to_thread(servers.enter_context, embedded_postgres(postgres_folder / "outage"))
    await asyncio.to_thread(os.symlink, again.partition("host=")[2], url.partition("host=")[2])
    await until(lambda: copier.health().spooled == 0 and copier.health().last_error is None)
    assert await count(engine) == 4
    loop.cancel()
    await asyncio.gather(loop, return_exceptions=True)
    await engine.dispose()
    await asyncio.to_thread(os.unlink, url.partition("host=")[2])
    await asyncio.to_thread(servers.close)


async def test_settling_nothing_is_nothing(engine: AsyncEngine) -> None:
    async with engine.begin() as conn:
        await settlements.settle(conn, [])
        gone = Charge(budget_id=new_id(), starts_at=datetime.now(UTC), held=Decimal(1))
        await settlements.settle(conn, [an_operation(), an_operation(charges=[gone])])
    assert await rows(engine, text("SELECT * FROM budget_window")) == []
