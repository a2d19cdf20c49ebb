"""The price book's migration on a database that is in use: down, where some of it has no place, and up again."""

import asyncio
from decimal import Decimal

import pytest
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncEngine

import migrations
from billing import prices
from billing.ids import new_id
from billing.price_changes import Entry, amended, corrected, enter
from billing.prices import PriceTerms
from tests.billing.samples import an_operation
from tests.billing.stored import store

SALE = PriceTerms(book="sale", model="m", currency="USD", input_fresh=Decimal("1.5"))
MORE = (
    PriceTerms(book="sale", model="m", tier="priority", currency="USD", input_fresh=Decimal(3)),
    PriceTerms(book="sale", model="", tier="", scope_kind="org", scope_id="o", currency="USD", factor=Decimal("0.9")),
)


async def test_down_and_up_keep_the_list_prices_and_every_attempt(database_url: str, engine: AsyncEngine) -> None:
    record = an_operation()
    async with engine.begin() as connection:
        await prices.seed(connection, [SALE])
        wrong = (await prices.load(connection)).sale("m")
        assert wrong is not None
        right = await amended(connection, await corrected(connection, wrong.id), {"input_fresh": Decimal(2)}, None)
        await enter(connection, [right, *(Entry(terms=terms) for terms in MORE)])
        await store(connection, record)
    await asyncio.to_thread(migrations.downgrade, database_url, "0004")
    async with engine.begin() as connection:
        rows = (await connection.execute(text("SELECT model, tier, input_fresh FROM price_version"))).all()
        assert [tuple(row) for row in rows] == [("m", "standard", 2)], "of a correction, what holds"
    await asyncio.to_thread(migrations.upgrade, database_url)
    async with engine.begin() as connection:
        found = (await prices.load(connection)).sale("m")
        assert found is not None and (found.input_fresh, found.source) == (2, "configuration")
        attempts = (await connection.execute(text("SELECT tier, images, billable FROM attempt"))).all()
        assert [tuple(row) for row in attempts] == [("standard", 0, True)] * len(record.attempts)


@pytest.mark.parametrize("change", ["UPDATE adjustment SET billed_delta = 0", "DELETE FROM adjustment"])
async def test_adjustments_are_only_added_to(engine: AsyncEngine, change: str) -> None:
    add = (
        "INSERT INTO adjustment (id, operation_id, number, started_at, currency, billed_delta, reason, actor) "
        "VALUES (:id, :id, 1, now(), 'USD', 1, 'r', 'a')"
    )
    async with engine.begin() as connection:
        await connection.execute(text(add), {"id": new_id()})
    with pytest.raises(DBAPIError, match="only added to"):
        async with engine.begin() as connection:
            await connection.execute(text(change))
