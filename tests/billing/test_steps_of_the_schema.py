"""A ledger of today over the latest steps of the schema: each down and up again, with all that it came to."""

import asyncio
import random
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import NamedTuple

from random_ledger import move_in, operations, store, sum_exactly
from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncEngine

import migrations
from billing import invoices, rollups, wallets
from billing.breakdown import usage_by
from billing.charged import charged
from billing.prices import Book
from billing.tables import attempt, operation, wallet_entry
from tests.billing.test_migrations import differences

LATEST = 3
"""Steps down to a schema that knows no answers from the response cache."""
START, END = datetime(2026, 9, 1, tzinfo=UTC), datetime(2026, 10, 1, tzinfo=UTC)


class Facts(NamedTuple):
    rows: tuple[int, ...]
    """Of operations, attempts, entries of wallets, invoices."""
    billed: Decimal
    cost: Decimal
    by_user: list[tuple[str, int]]


async def facts(engine: AsyncEngine) -> Facts:
    await rollups.refresh(engine)
    async with engine.connect() as conn:
        assert await conn.run_sync(differences) == []
        counts = [
            (await conn.execute(select(func.count()).select_from(table))).scalar_one()
            for table in (operation, attempt, wallet_entry)
        ]
        counts.append(len(await invoices.list_invoices(conn)))
        books: tuple[Book, ...] = ("sale", "cost")
        billed, cost = [sum_exactly([c.amount async for c in charged(conn, book, START, END)]) for book in books]
        users = await usage_by(conn, ["user"], START, END)
    return Facts(tuple(counts), billed, cost, sorted((f"{row.billed} {row.cost}", row.operations) for row in users))


async def test_each_of_the_latest_goes_down_and_up_with_all_that_there_is(
    database_url: str, engine: AsyncEngine
) -> None:
    luck = random.Random(3)
    async with engine.begin() as conn:
        home = await move_in(conn, luck)
        records = list(operations(luck, home, START, END, 300))
        assert sum(record.cached is not None for record in records) > 20
        await store(conn, records)
        purse = await wallets.create_wallet(conn, "org", home.org_id, currency="USD")
        await wallets.top_up(conn, purse, Decimal(5), expires_at=datetime.now(UTC) + timedelta(days=1))
    await rollups.refresh(engine)
    async with engine.begin() as conn:
        await invoices.create_invoice(conn, home.org_id, "2026-09")
    before = await facts(engine)
    for steps in range(1, LATEST + 1):
        await engine.dispose()
        for _ in range(steps):
            await asyncio.to_thread(migrations.downgrade, database_url, "-1")
        await asyncio.to_thread(migrations.upgrade, database_url)
        assert await facts(engine) == before
