"""Answers from the response cache in the ledger: no tokens, their own part of the price, what they saved."""

from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from billing import adjustments, prices, rollups
from billing.breakdown import UsageRow, usage_by
from billing.charge import cached_answer_charge
from billing.charged import Charged, charged
from billing.copying import copy
from billing.explanation import explain
from billing.filters import Filters
from billing.ids import new_id, smallest_id
from billing.invoice_lines import open_charges
from billing.margins import margins
from billing.prices import Price, PriceTerms
from billing.records import CachedAnswer, OperationRecord
from tests.billing.samples import ORG, an_operation

NOW = datetime.now(UTC)
YESTERDAY = NOW - timedelta(days=1)
LONG_AGO = NOW - timedelta(days=30)
WEEK = NOW - timedelta(days=7)
RATE = Decimal("0.0000125")
SALE = PriceTerms(
    book="sale", model="m", currency="USD", input_fresh=Decimal(10), output_text=Decimal(20), per_cached_answer=RATE
)


async def entered(conn: AsyncConnection, terms: PriceTerms, at: datetime = LONG_AGO) -> None:
    await prices.insert_version(conn, terms, at, "operator")


async def sale(conn: AsyncConnection) -> Price:
    found = (await prices.load(conn)).sale("m", payer=prices.Payer(ORG, None, new_id()))
    assert found is not None
    return found


def hit(price: Price | None, at: datetime = YESTERDAY, **changes: Any) -> OperationRecord:
    answer: dict[str, Any] = {
        "cached_from": new_id(),
        "saved_prompt_tokens": 1_000,
        "saved_completion_tokens": 50,
        "saved_billed": Decimal("0.011"),
        "saved_cost": Decimal("0.003"),
        "price_version_id": price.id if price else None,
        "price_override_id": price.override_id if price else None,
    }
    return an_operation(
        id=UUID(int=smallest_id(at).int + (new_id().int & 0xFFFFFFFF)),
        started_at=at,
        model="m",
        billed=cached_answer_charge(price),
        cost=Decimal(0),
        attempts=[],
        cached=CachedAnswer(**answer | changes),
    )


async def sums(conn: AsyncConnection) -> UsageRow:
    [row] = await usage_by(conn, ["model"], WEEK, NOW)
    return row


async def parts(conn: AsyncConnection) -> list[Charged]:
    return [each async for each in charged(conn, "sale", WEEK, NOW)]


def test_the_rule_is_the_prices_own_part_and_nothing_without_it() -> None:
    price = Price(**{name: getattr(SALE, name) for name in SALE.__struct_fields__}, id=new_id(), effective_at=NOW)
    assert cached_answer_charge(price) == RATE
    assert cached_answer_charge(Price(book="sale", model="m", currency="USD", id=new_id(), effective_at=NOW)) == 0
    assert cached_answer_charge(None) is None, "an unpriced model is unpriced here too"


def test_costs_and_batches_have_no_such_part() -> None:
    with pytest.raises(ValueError, match="per_cached_answer has no batch tier"):
        PriceTerms(book="sale", model="m", tier="batch", currency="USD", per_cached_answer=RATE)
    with pytest.raises(ValueError, match="per_cached_answer is a sale price"):
        PriceTerms(book="cost", model="m", upstream="u", currency="USD", per_cached_answer=RATE)


async def test_what_was_saved_is_summed_before_and_after_the_hours_are_summed_up(engine: AsyncEngine) -> None:
    async with engine.begin() as conn:
        await entered(conn, SALE)
        price = await sale(conn)
        await copy(conn, sorted((hit(price), hit(price, saved_billed=None), hit(None)), key=lambda each: each.id))
    for _ in range(2):
        async with engine.connect() as conn:
            row = await sums(conn)
        assert (row.operations, row.cached_answers, row.billed_unknown) == (3, 3, 1)
        assert (row.tokens.prompt_tokens, row.tokens.completion_tokens) == (0, 0)
        assert (row.saved_prompt_tokens, row.saved_completion_tokens) == (3_000, 150)
        assert row.cached_answers_saved == Decimal("0.011") - RATE
        assert row.cached_answers_saved_unknown == 2, "what one was billed, or had been, is not known"
        assert row.billed == 2 * RATE and row.cost == 0
        await rollups.refresh(engine)


async def test_they_are_units_at_their_price_on_exports_and_invoices(conn: AsyncConnection) -> None:
    await entered(conn, SALE)
    whose: dict[str, Any] = {"scope_kind": "org", "scope_id": str(ORG), "tier": ""}
    await entered(conn, PriceTerms(book="sale", model="", currency="USD", factor=Decimal(2), **whose))
    price = await sale(conn)
    records = sorted((hit(price) for _ in range(3)), key=lambda each: each.id)
    await copy(conn, records)
    [part] = await parts(conn)
    assert (part.part, part.quantity, part.unit, part.per) == ("response_cache", 3, "requests", 1)
    assert (part.unit_price, part.list_price, part.amount) == (2 * RATE, RATE, 6 * RATE)
    assert part.price_version_id == price.id and part.override_id == price.override_id is not None
    filters = Filters(org_id=ORG, currency="USD")
    [(key, line)] = (await open_charges(conn, filters, "2026-11", WEEK, NOW)).items()
    assert (key.part, line.quantity, line.unit_price, line.amount) == ("response_cache", 3, 2 * RATE, 6 * RATE)
    [margin] = (await margins(conn, WEEK, NOW, "model")).lines
    assert (margin.name, margin.attempts, margin.billed, margin.cost) == ("m", 3, 6 * RATE, 0)


async def test_one_is_explained_with_what_it_saved(conn: AsyncConnection) -> None:
    await entered(conn, SALE)
    record = hit(await sale(conn))
    await copy(conn, [record])
    found = await explain(conn, record.id)
    assert found is not None and found.attempts == ()
    assert found.operation.record == record
    assert found.cached is not None and found.cached.amount == found.billed == RATE
    [part] = found.cached.parts
    assert (part.part, part.quantity, part.unit_price, part.amount) == ("response_cache", 1, RATE, RATE)
    assert found.cached.price is not None and found.cached.price.id == found.operation.prices.popitem()[0]


async def test_a_corrected_price_adjusts_them_once(conn: AsyncConnection) -> None:
    free = PriceTerms(book="sale", model="m", currency="USD", input_fresh=Decimal(10), output_text=Decimal(20))
    await entered(conn, free)
    # The price was known before the calls were made; the correction was not.
    record = hit(await sale(conn), NOW - timedelta(minutes=5))
    await copy(conn, [record])
    await entered(conn, SALE)
    options: dict[str, Any] = {"reason": "a part was forgotten", "actor": "shell:ada"}
    made = await adjustments.rerate(conn, WEEK, NOW, **options)
    assert (made.attempts, made.adjusted, made.billed_delta, made.cost_delta) == (1, 1, {"USD": RATE}, {})
    assert (await adjustments.rerate(conn, WEEK, NOW, **options)).adjusted == 0
    found = await explain(conn, record.id)
    assert found is not None and (found.operation.record.billed, found.billed) == (0, RATE)
    assert found.adjustments[0].number == 0
    assert sum(each.amount for each in await parts(conn)) == (await sums(conn)).billed == RATE
    [margin] = (await margins(conn, WEEK, NOW, "model")).lines
    assert margin.billed == RATE
