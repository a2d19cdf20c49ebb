"""Charges from many ledgers at once: the exact sum, each once, and nobody waits for nobody."""

import asyncio
import random
from decimal import Decimal
from uuid import UUID

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from billing import settlements
from billing.records import Charge, OperationRecord
from billing.wallets import create_wallet, top_up
from billing.windows import BEGINNING
from tests.billing.replicas import budget
from tests.billing.samples import an_operation

WRITERS, SETTLEMENTS, BATCH = 8, 10_000, 25


async def test_eight_writers_settle_ten_thousand_in_shuffled_order(database_url: str) -> None:
    """Each charges three of ten budgets and one of two wallets, in whatever order, out of leases of eight replicas."""
    engine = create_async_engine(database_url, pool_size=WRITERS)
    luck = random.Random(7)
    budgets = [await budget(engine, "key", f"k{n}", "1000000") for n in range(10)]
    wallets = []
    async with engine.begin() as conn:
        for name in ("a", "b"):
            wallets.append(await create_wallet(conn, "team", name, currency="USD"))
            for _ in range(3):
                await top_up(conn, wallets[-1], Decimal(300_000))
    await _lease(engine, [*budgets, *wallets])
    rows: list[OperationRecord] = []
    sums: dict[UUID, Decimal] = dict.fromkeys([*budgets, *wallets], Decimal(0))
    for number in range(SETTLEMENTS):
        billed = Decimal(luck.randrange(1, 10**7)) / 10**6
        places = [*luck.sample(budgets, 3), luck.choice(wallets)]
        luck.shuffle(places)
        for place in places:
            sums[place] += billed
        charges = [Charge(budget_id=place, starts_at=BEGINNING, held=Decimal(10)) for place in places]
        rows.append(an_operation(billed=billed, attempts=[], replica=f"r{number % WRITERS}.1", charges=charges))
    luck.shuffle(rows)

    async def writer(mine: list[OperationRecord]) -> None:
        for start in range(0, len(mine), BATCH):
            async with engine.begin() as conn:
                await settlements.settle(conn, mine[start : start + BATCH])

    await asyncio.gather(*(writer(rows[number::WRITERS]) for number in range(WRITERS)))
    async with engine.connect() as conn:
        query = text("SELECT budget_id, settled, leased FROM budget_window")
        found = {row.budget_id: (row.settled, row.leased) for row in await conn.execute(query)}
        taken = text("SELECT wallet_id, -sum(amount) FROM wallet_entry WHERE kind = 'capture' GROUP BY wallet_id")
        captured = {row[0]: row[1] for row in await conn.execute(taken)}
        left = text("SELECT sum(granted - settled) FROM lease GROUP BY budget_id ORDER BY budget_id")
        leased = list((await conn.execute(left)).scalars())
    assert {place: settled for place, (settled, _) in found.items()} == sums
    assert captured == {wallet: sums[wallet] for wallet in wallets}
    assert leased == [found[place][1] for place in sorted(found)] == [WRITERS * 10_000 - sums[p] for p in sorted(found)]
    await engine.dispose()


async def _lease(engine: AsyncEngine, places: list[UUID]) -> None:
    """Ten thousand of each for each of the replicas."""
    parameters = {"places": places, "replicas": [f"r{n}.1" for n in range(WRITERS)], "beginning": BEGINNING}
    async with engine.begin() as conn:
        await conn.execute(
            text("""
                INSERT INTO budget_window AS w (budget_id, starts_at, leased)
                SELECT unnest(CAST(:places AS uuid[])), :beginning, 10000 * cardinality(CAST(:replicas AS text[]))
                ON CONFLICT (budget_id, starts_at) DO UPDATE SET leased = excluded.leased
            """),
            parameters,
        )
        await conn.execute(
            text("""
                INSERT INTO lease (budget_id, starts_at, replica, granted)
                SELECT b, :beginning, r, 10000
                FROM unnest(CAST(:places AS uuid[])) AS p (b), unnest(CAST(:replicas AS text[])) AS q (r)
            """),
            parameters,
        )
