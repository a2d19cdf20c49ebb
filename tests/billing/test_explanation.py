"""Why an operation cost what it did: parts that add up to the last digit, or a sentence that says why they do not."""

import random
from datetime import UTC, datetime
from decimal import Decimal
from uuid import UUID

from random_ledger import adjust, move_in, operations, store, sum_exactly
from sqlalchemy.ext.asyncio import AsyncConnection

from billing import prices
from billing.charge import EXACT
from billing.explanation import Amount, explain
from billing.prices import PriceTerms
from billing.records import TokenClasses
from billing.reports import Within
from gateway.explained import as_lines, as_object
from tests.billing import stored
from tests.billing.samples import an_attempt, an_operation

START, END = datetime(2026, 9, 1, tzinfo=UTC), datetime(2026, 10, 1, tzinfo=UTC)


async def test_every_amount_is_explained_or_says_why_not(conn: AsyncConnection) -> None:
    rng = random.Random(21)
    household = await move_in(conn, rng)
    records = list(operations(rng, household, START, END, 80))
    await store(conn, records)
    notes: set[str | None] = set()
    for record in records:
        found = await explain(conn, record.id)
        assert found is not None
        assert (found.billed, found.cost) == (record.billed, record.cost)
        for attempt in found.attempts:
            for side in (attempt.billed, attempt.cost):
                check(side)
                notes.add(side.note and side.note.partition(":")[0])
            assert attempt.record.billable or attempt.billed.note is not None
        text = "\n".join(as_lines(found))
        assert str(record.id) in text and "E-" not in text
        assert as_object(found)["operation"]["record"]["id"] == str(record.id)
    assert {"unknown", "the caller does not pay for it", "as reported reported it", None} <= notes


def check(side: Amount) -> None:
    if side.note is not None:
        assert side.parts == ()
        return
    assert side.amount == sum_exactly([part.amount for part in side.parts])
    for part in side.parts:
        if part.part != "device":
            assert EXACT.multiply(part.quantity, part.unit_price) == EXACT.multiply(part.amount, Decimal(part.per))


async def test_adjustments_are_told_and_counted_in(conn: AsyncConnection) -> None:
    rng = random.Random(22)
    household = await move_in(conn, rng)
    records = list(operations(rng, household, START, END, 40))
    await store(conn, records)
    unknown = next(record for record in records if record.attempts and record.billed is None)
    await adjust(conn, unknown, Decimal("1E-7"), None)
    found = await explain(conn, unknown.id)
    assert found is not None and found.billed == Decimal("0.0000001")
    assert "adjusted    attempt 1: billed 0.0000001 (wrong price, by test)" in list(as_lines(found))


async def test_what_is_not_there_or_not_ones_own_is_none(conn: AsyncConnection) -> None:
    rng = random.Random(23)
    household = await move_in(conn, rng)
    [record] = operations(rng, household, START, END, 1)
    await store(conn, [record])
    assert await explain(conn, UUID(int=9)) is None
    assert await explain(conn, record.id, within=Within(org_id=UUID(int=9))) is None
    assert await explain(conn, record.id, within=Within(org_id=household.org_id)) is not None


async def test_a_class_without_a_price_is_named(conn: AsyncConnection) -> None:
    await prices.seed(conn, [PriceTerms(book="sale", model="m", currency="USD", input_fresh=Decimal(1))])
    sale = (await prices.load(conn)).sale("m")
    assert sale is not None
    tokens = TokenClasses(input_fresh=1, output_text=2, output_reasoning=5)
    attempt = an_attempt(model="m", price_version_id=sale.id, tokens=tokens, billed=None, cost=None)
    record = an_operation(attempts=[attempt], billed=None, cost=None)
    await stored.store(conn, record)
    found = await explain(conn, record.id)
    assert found is not None and found.billed is None
    assert found.attempts[0].billed.note == "unknown: its price has none for output text and output reasoning"
    assert found.attempts[0].cost.note == "unknown: nobody said what m costs on engine"
