"""From the spool to a real PostgreSQL: exact, once, and through outages."""

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import msgspec
import pytest
from sqlalchemy import select, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from billing import holds, ledger
from billing.budgets import ScopeKind, list_budgets, set_budget
from billing.frames import encode
from billing.leases import Budgets
from billing.ledger import Ledger
from billing.records import TOKEN_CLASSES, AttemptRecord, OperationRecord, TokenClasses
from billing.spool import UNREADABLE, Spool
from billing.tables import attempt, operation
from gateway.postgres import embedded_postgres
from migrations import upgrade
from tests.billing.samples import KEY, an_attempt, an_operation


@pytest.fixture
async def engine(database_url: str) -> AsyncIterator[AsyncEngine]:
    engine = create_async_engine(database_url)
    yield engine
    await engine.dispose()


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


async def key_budget(engine: AsyncEngine, limit: str = "100") -> dict[ScopeKind, str]:
    async with engine.begin() as conn:
        await set_budget(conn, "key", KEY, "none", Decimal(limit), currency="USD")
    return {"key": str(KEY)}


async def test_every_field_arrives_to_the_last_digit(engine: AsyncEngine, spool: Spool) -> None:
    record = an_operation()
    await spool.append(record)
    assert await Ledger(engine, spool).drain() == 1
    (row,) = await rows(engine, select(operation))
    assert datetime.now(UTC) - row.pop("recorded_at") < timedelta(minutes=1)
    assert row == {k: v for k, v in msgspec.structs.asdict(record).items() if k != "attempts"}
    found = []
    for row in await rows(engine, select(attempt).order_by(attempt.c.number)):
        assert row.pop("operation_id") == record.id
        found.append(AttemptRecord(tokens=TokenClasses(**{name: row.pop(name) for name in TOKEN_CLASSES}), **row))
    assert found == record.attempts


def test_records_and_tables_have_the_same_fields() -> None:
    """Otherwise a field would be dropped in silence on its way into the database."""
    wanted = {*OperationRecord.__struct_fields__, "recorded_at"} - {"attempts"}
    assert set(operation.c.keys()) == wanted
    wanted = {*AttemptRecord.__struct_fields__, *TokenClasses.__struct_fields__, "operation_id"} - {"tokens"}
    assert set(attempt.c.keys()) == wanted


async def test_a_record_sent_twice_lands_and_settles_once(engine: AsyncEngine, spool: Spool) -> None:
    scopes = await key_budget(engine)
    record = an_operation(billed=Decimal("1.5"))
    await Budgets(engine, spool.replica, "USD").admit(record.id, scopes, Decimal(4))
    copier = Ledger(engine, spool)
    await spool.append(record)
    await spool.append(msgspec.structs.replace(record, billed=Decimal(9), attempts=[an_attempt(5)]))
    assert await copier.drain() == 1
    await spool.append(record)
    assert await copier.drain() == 0
    assert await spent(engine) == (Decimal(0), Decimal("1.5"))
    (row,) = await rows(engine, select(operation))
    assert row["billed"] == Decimal("1.5")
    assert [row["number"] for row in await rows(engine, select(attempt))] == [1, 2]


async def test_two_ledgers_with_the_same_records_settle_once(engine: AsyncEngine, tmp_path: Path) -> None:
    scopes = await key_budget(engine)
    records = [an_operation(billed=Decimal("0.01")) for _ in range(100)]
    for record in records:
        await Budgets(engine, "place.run", "USD").admit(record.id, scopes, Decimal("0.02"))
    spools = [Spool(tmp_path / str(n)) for n in range(3)]
    for n, other in enumerate(spools):
        await asyncio.gather(*(other.append(record) for record in (records, records[::-1], records[50:])[n]))
    copied = await asyncio.gather(*(Ledger(engine, other).drain() for other in spools))
    assert sum(copied) == 100
    assert await spent(engine) == (Decimal(0), Decimal(1))
    for other in spools:
        await other.close()


async def test_the_charge_is_settled_in_full_even_over_the_hold(engine: AsyncEngine, spool: Spool) -> None:
    scopes = await key_budget(engine, "1")
    over, unknown = an_operation(billed=Decimal("3.25")), an_operation(billed=None)
    budgets = Budgets(engine, spool.replica, "USD")
    for record in (over, unknown):
        await budgets.admit(record.id, scopes, Decimal("0.5"))
        await spool.append(record)
    await Ledger(engine, spool).drain()
    assert await spent(engine) == (Decimal(0), Decimal("3.25"))


async def test_a_batch_that_fails_leaves_nothing_half_done(engine: AsyncEngine, spool: Spool) -> None:
    """Settlement and rows are one transaction: neither is there when the other fails."""
    scopes = await key_budget(engine)
    record = an_operation()
    await Budgets(engine, spool.replica, "USD").admit(record.id, scopes, Decimal(2))
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
    assert await spent(engine) == (Decimal(0), record.billed)


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
    assert "out of range" in entry["reason"]
    assert entry["line"].encode() + b"\n" == encode(bad)


@pytest.mark.parametrize(("billed", "settled"), [("1.5", "1.5"), (None, "0"), ("1E+131080", "0")])
async def test_what_is_set_aside_holds_nothing(
    engine: AsyncEngine, spool: Spool, billed: str | None, settled: str
) -> None:
    """Its charge counts, except one that no NUMERIC can hold."""
    scopes = await key_budget(engine)
    bad = an_operation(
        billed=None if billed is None else Decimal(billed),
        attempts=[an_attempt(tokens=TokenClasses(output_text=2**63))],
    )
    await Budgets(engine, spool.replica, "USD").admit(bad.id, scopes, Decimal(4))
    copier = Ledger(engine, spool)
    for _ in range(2):  # as after a crash between the settlement and the discard
        await spool.append(bad)
        assert await copier.drain() == 0
    assert await spent(engine) == (Decimal(0), Decimal(settled))
    assert await rows(engine, text("SELECT * FROM hold")) == []
    assert spool.depth == 0


async def test_a_crash_before_the_record_frees_its_hold_and_one_after_does_not(
    engine: AsyncEngine, tmp_path: Path
) -> None:
    scopes = await key_budget(engine)
    before = Spool(tmp_path)
    died, spooled = an_operation(), an_operation(billed=Decimal("0.5"))
    for record in (died, spooled):
        await Budgets(engine, before.replica, "USD").admit(record.id, scopes, Decimal(2))
    await before.append(spooled)
    await before.close()

    after = Spool(tmp_path)
    running = an_operation(billed=Decimal(1))
    await Budgets(engine, after.replica, "USD").admit(running.id, scopes, Decimal(3))
    assert await Ledger(engine, after).recover() == 1
    assert await spent(engine) == (Decimal(3), Decimal("0.5"))
    assert {row["id"] for row in await rows(engine, select(operation.c.id))} == {spooled.id}
    assert died.id not in {row["operation_id"] for row in await rows(engine, text("SELECT operation_id FROM hold"))}
    await after.close()


async def test_settlement_and_admission_at_once_neither_deadlock_nor_lose_a_cent(
    engine: AsyncEngine, tmp_path: Path
) -> None:
    kinds: tuple[ScopeKind, ...] = ("key", "user", "team", "org")
    async with engine.begin() as conn:
        for kind in kinds:
            for scope in "abc":
                await set_budget(conn, kind, scope, "day", Decimal(10**6), currency="USD")
    spools = [Spool(tmp_path / str(n)) for n in range(4)]

    async def serve(number: int) -> None:
        other = spools[number % 4]
        budgets = Budgets(engine, other.replica, "USD")
        for turn in range(15):
            record = an_operation(billed=Decimal("0.01"))
            scopes = {kind: "abc"[(turn * (n + 1) + number) % 3] for n, kind in enumerate(kinds)}
            await budgets.admit(record.id, scopes, Decimal("0.03"))
            await other.append(record)

    loops = [asyncio.create_task(Ledger(engine, other).run()) for other in spools]
    await asyncio.gather(*(serve(number) for number in range(12)))
    await until(lambda: not any(other.depth for other in spools))
    for loop in loops:
        loop.cancel()
    await asyncio.gather(*loops, return_exceptions=True)
    async with engine.connect() as conn:
        found = await list_budgets(conn)
    assert sum(budget.settled for budget in found) == Decimal("0.01") * 12 * 15 * 4
    assert all(budget.leased == 0 for budget in found)
    for other in spools:
        await other.close()


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


async def until(true: Any) -> None:
    async with asyncio.timeout(30):
        while not true():  # noqa: ASYNC110 - what is waited for happens in another process
            await asyncio.sleep(0.02)


async def test_the_loop_makes_partitions_ahead(engine: AsyncEngine, spool: Spool) -> None:
    copier = Ledger(engine, spool)
    loop = asyncio.create_task(copier.run())
    await until(lambda: copier.health().copied_at is not None)
    loop.cancel()
    await asyncio.gather(loop, return_exceptions=True)
    query = text("SELECT count(*) AS n FROM pg_inherits WHERE inhparent = 'operation'::regclass")
    assert (await rows(engine, query))[0]["n"] == 1 + 1 + ledger.PARTITION_DAYS_AHEAD


async def test_settling_nothing_is_nothing(engine: AsyncEngine) -> None:
    async with engine.begin() as conn:
        await holds.settle(conn, {})
        await holds.release(conn, [])
