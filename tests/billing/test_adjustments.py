"""Re-rating: corrections of the book become rows beside the ledger, once, and nothing else changes."""

import csv
import io
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any
from uuid import UUID

import msgspec
import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from billing import adjustments, prices
from billing.breakdown import usage_by
from billing.charge import charge, device_cost
from billing.explanation import explain
from billing.exports.usage import export_usage
from billing.ids import new_id, smallest_id
from billing.price_changes import Entry, amended, corrected, enter
from billing.prices import Price, PriceTerms
from billing.records import UNSETTLED, OperationRecord, TokenClasses
from tests.billing.samples import KEY, ORG, an_attempt, an_operation
from tests.billing.stored import store

NOW = datetime.now(UTC)
YESTERDAY = NOW - timedelta(days=1)
LONG_AGO = NOW - timedelta(days=30)
SALE = PriceTerms(book="sale", model="m", currency="USD", input_fresh=Decimal(10), output_text=Decimal(20))
COST = PriceTerms(
    book="cost", model="m", upstream="vendor", currency="USD", input_fresh=Decimal(1), output_text=Decimal(2)
)
DEVICE = PriceTerms(book="cost", model="", upstream="gpu", currency="USD", device_hour=Decimal(36))
TOKENS = TokenClasses(input_fresh=100, output_text=50)


async def book(conn: AsyncConnection, *terms: PriceTerms) -> None:
    """Prices that a configuration entered long ago."""
    for each in terms:
        await prices.insert_version(conn, each, LONG_AGO, "configuration")
    # Their ids tell when that was.
    for row in (await conn.execute(text("SELECT id FROM price_version WHERE effective_at <= now()"))).scalars().all():
        older = UUID(int=smallest_id(LONG_AGO).int + (row.int & 0xFFFFFFFF))
        await conn.execute(text("UPDATE price_version SET id = :older WHERE id = :row"), {"older": older, "row": row})


async def call(conn: AsyncConnection, at: datetime = YESTERDAY, **changes: Any) -> OperationRecord:
    """One answered call, charged and costed by the book of now."""
    loaded = await prices.load(conn)
    sale, upstream = loaded.sale("m"), changes.pop("upstream", "vendor")
    cost = loaded.cost("m", upstream)
    seconds = changes.get("prefill_device_seconds")
    fields: dict[str, Any] = {
        "model": "m",
        "upstream": upstream,
        "tokens": TOKENS,
        "usage_source": "upstream",
        "prefill_device_seconds": None,
        "billed": charge(sale, TOKENS),
        "cost": None if cost is None else charge(cost, TOKENS) if seconds is None else device_cost(cost, 3.0),
        "price_version_id": sale.id if sale else None,
        "cost_version_id": cost.id if cost else None,
    }
    one = an_attempt(1, **fields | changes)
    record = an_operation(
        id=UUID(int=smallest_id(at).int + (new_id().int & 0xFFFFFFFF)),
        started_at=at,
        model="m",
        billed=one.billed,
        cost=one.cost,
        attempts=[one],
    )
    await store(conn, record)
    return record


async def rerate(conn: AsyncConnection, **options: Any) -> adjustments.Rerating:
    return await adjustments.rerate(
        conn, NOW - timedelta(days=7), NOW, **{"reason": "a typing error", "actor": "shell:ada"} | options
    )


async def correct(conn: AsyncConnection, wrong: Price | None, **amounts: Decimal) -> None:
    assert wrong is not None
    await enter(conn, [await amended(conn, await corrected(conn, wrong.id), amounts, None)])


async def rows(conn: AsyncConnection) -> list[dict[str, Any]]:
    found = await conn.execute(text("SELECT * FROM adjustment ORDER BY id"))
    return [dict(row) for row in found.mappings()]


async def test_a_corrected_price_is_made_up_for_once(conn: AsyncConnection) -> None:
    await book(conn, SALE, COST)
    one, other = await call(conn), await call(conn)
    before = (await conn.execute(text("SELECT billed, cost, price_version_id FROM attempt"))).all()
    loaded = await prices.load(conn)
    await correct(conn, loaded.sale("m"), input_fresh=Decimal(9))
    await correct(conn, loaded.cost("m", "vendor"), output_text=Decimal("2.5"))
    done = await rerate(conn)
    assert (done.attempts, done.adjusted, done.unpriced) == (2, 2, 0)
    assert (done.billed_delta, done.cost_delta) == ({"USD": Decimal("-0.0002")}, {"USD": Decimal("0.00005")})
    made = await rows(conn)
    assert {row["operation_id"] for row in made} == {one.id, other.id}
    sale, wrong = (await prices.load(conn)).sale("m"), loaded.sale("m")
    assert sale is not None and wrong is not None
    for row in made:
        assert (row["billed_delta"], row["cost_delta"]) == (Decimal("-0.0001"), Decimal("0.000025"))
        assert (row["price_version_from"], row["price_version_to"]) == (wrong.id, sale.id)
        assert (row["number"], row["reason"], row["actor"]) == (1, "a typing error", "shell:ada")
    assert (await rerate(conn)).adjusted == 0
    assert await rows(conn) == made
    assert (await conn.execute(text("SELECT billed, cost, price_version_id FROM attempt"))).all() == before
    # A second correction adjusts what the first made of it.
    await correct(conn, sale, input_fresh=Decimal(8))
    assert (await rerate(conn)).billed_delta == {"USD": Decimal("-0.0002")}
    total = sum(row["billed_delta"] for row in await rows(conn))
    assert total == 2 * Decimal("-0.0002")


async def test_a_dry_run_and_a_model_that_was_not_asked_for_write_nothing(conn: AsyncConnection) -> None:
    await book(conn, SALE)
    await call(conn)
    await correct(conn, (await prices.load(conn)).sale("m"), input_fresh=Decimal(9))
    assert (await rerate(conn, dry_run=True)).adjusted == 1
    assert (await rerate(conn, model="other")).adjusted == 0
    assert await rows(conn) == []
    assert (await rerate(conn, model="m")).adjusted == 1


async def test_a_price_from_now_on_changes_no_call_before_it(conn: AsyncConnection) -> None:
    await book(conn, SALE)
    await call(conn)
    await enter(conn, [Entry(terms=PriceTerms(book="sale", model="m", currency="USD", input_fresh=Decimal(99)))])
    assert (await rerate(conn)).adjusted == 0


async def test_a_version_entered_before_the_call_is_no_correction(conn: AsyncConnection) -> None:
    """A gateway that had not heard of it yet charged by the one before; that stands."""
    await book(conn, SALE)
    old = (await prices.load(conn)).sale("m")
    assert old is not None
    await prices.insert_version(conn, PriceTerms(book="sale", model="m", currency="USD"), None, "operator")
    await call(conn, datetime.now(UTC) + timedelta(seconds=1), billed=charge(old, TOKENS), price_version_id=old.id)
    end = datetime.now(UTC) + timedelta(minutes=1)
    done = await adjustments.rerate(conn, NOW - timedelta(days=1), end, reason="r", actor="a")
    assert (done.attempts, done.adjusted, done.unpriced) == (1, 0, 0)


async def test_what_an_upstream_served_at_the_standard_tier_keeps_that_cost(conn: AsyncConnection) -> None:
    """Also where the caller is billed the tier that it asked for."""
    await book(conn, SALE, COST, msgspec.structs.replace(COST, tier="priority", input_fresh=Decimal(7)))
    await call(conn, tier="priority")
    await correct(conn, (await prices.load(conn)).cost("m", "vendor"), output_text=Decimal("2.5"))
    assert (await rerate(conn)).cost_delta == {"USD": Decimal("0.000025")}


async def test_what_was_unknown_becomes_known(conn: AsyncConnection) -> None:
    record = await call(conn)
    assert record.billed is None and record.cost is None
    entries = [Entry(terms=terms, effective_at=LONG_AGO) for terms in (SALE, COST)]
    await enter(conn, entries)
    done = await rerate(conn)
    assert (done.billed_delta, done.cost_delta) == ({"USD": Decimal("0.002")}, {"USD": Decimal("0.0002")})
    assert (await rerate(conn)).adjusted == 0


@pytest.mark.parametrize("first", [None, Decimal("0.25")], ids=["unknown", "known"])
async def test_an_operation_costs_what_is_known_once_all_of_its_attempts_are(
    conn: AsyncConnection, first: Decimal | None
) -> None:
    """Of a failed attempt often nobody knows what it cost: then a correction of the other one's makes nothing known."""
    await book(conn, SALE, COST)
    loaded = await prices.load(conn)
    failed = an_attempt(1, model="m", upstream="vendor", status="upstream_error", billable=False, billed=Decimal(0))
    failed = msgspec.structs.replace(failed, cost=first, prefill_device_seconds=None)
    lacking = first is None
    sale, cost = loaded.sale("m"), loaded.cost("m", "vendor")
    assert sale is not None and cost is not None
    answered = msgspec.structs.replace(
        failed,
        number=2,
        status="ok",
        billable=True,
        tokens=TOKENS,
        billed=charge(sale, TOKENS),
        cost=charge(cost, TOKENS) if lacking else None,
        price_version_id=sale.id,
        cost_version_id=cost.id if lacking else None,
    )
    one = an_operation(
        id=UUID(int=smallest_id(YESTERDAY).int + (new_id().int & 0xFFFFFFFF)),
        started_at=YESTERDAY,
        model="m",
        billed=answered.billed,
        cost=None,
        attempts=[failed, answered],
    )
    await store(conn, one)
    await correct(conn, cost, output_text=Decimal("2.5"))
    assert (await rerate(conn)).adjusted == 1
    wanted = None if first is None else first + Decimal("0.000225")
    (row,) = await usage_by(conn, ["model"], NOW - timedelta(days=7), NOW)
    assert (row.cost, row.cost_unknown) == (wanted, int(lacking))
    assert answered.billed is not None and row.margin == (None if wanted is None else answered.billed - wanted)
    explained = await explain(conn, one.id)
    assert explained is not None and explained.cost == wanted
    exported = b"".join([piece async for piece in export_usage(conn, NOW - timedelta(days=7), NOW)])
    (line,) = csv.DictReader(io.StringIO(exported.decode("utf-8-sig")))
    assert (Decimal(line["cost"]) if line["cost"] else None) == wanted
    assert Decimal(line["cost_adjustment"]) == row.cost_adjustment


async def test_a_model_that_turns_out_to_be_free_is_known_to_be(conn: AsyncConnection) -> None:
    await call(conn)
    free = dict.fromkeys(("input_fresh", "output_text"), Decimal(0))
    await enter(conn, [Entry(terms=PriceTerms(book="sale", model="m", currency="USD", **free), effective_at=LONG_AGO)])
    assert (await rerate(conn)).adjusted == 1
    assert [row["billed_delta"] for row in await rows(conn)] == [0]
    assert (await rerate(conn)).adjusted == 0


async def test_what_could_not_be_settled_stays_unknown(conn: AsyncConnection) -> None:
    """Nobody knows its tokens: that its row has none does not make it free."""
    await book(conn, SALE, COST)
    await call(conn, usage_flag=UNSETTLED, tokens=TokenClasses(), billed=None, cost=None)
    loaded = await prices.load(conn)
    await correct(conn, loaded.sale("m"), input_fresh=Decimal(9))
    await correct(conn, loaded.cost("m", "vendor"), input_fresh=Decimal(9))
    assert (await rerate(conn)).adjusted == 0


async def test_what_lost_its_price_keeps_its_amount(conn: AsyncConnection) -> None:
    await book(conn, SALE)
    await call(conn)
    await correct(conn, (await prices.load(conn)).sale("m"))
    done = await rerate(conn)
    assert (done.adjusted, done.unpriced) == (0, 1)


async def test_a_price_in_another_currency_says_nothing_about_a_call(conn: AsyncConnection) -> None:
    await book(conn, SALE)
    await call(conn)
    euros = msgspec.structs.replace(SALE, currency="EUR", input_fresh=Decimal(1))
    await prices.insert_version(conn, euros, LONG_AGO, "configuration")
    done = await rerate(conn)
    assert (done.adjusted, done.unpriced) == (0, 0)


async def test_an_override_in_another_currency_is_left_out_as_gateways_leave_it_out(conn: AsyncConnection) -> None:
    """Of the time before the currency changed, and never ended."""
    own = PriceTerms(book="sale", model="m", tier="", scope_kind="org", scope_id=str(ORG), currency="EUR")
    await book(conn, SALE, msgspec.structs.replace(own, input_fresh=Decimal(1), output_text=Decimal(1)))
    await call(conn)
    listed = (await prices.load(conn, "USD")).sale("m")
    assert listed is not None
    await prices.insert_version(
        conn, msgspec.structs.replace(SALE, input_fresh=Decimal(9)), listed.effective_at, "operator"
    )
    assert (await rerate(conn)).billed_delta == {"USD": Decimal("-0.0001")}


async def test_what_the_caller_does_not_pay_for_stays_free(conn: AsyncConnection) -> None:
    await book(conn, SALE)
    await call(conn, billed=Decimal(0), billable=False)
    await correct(conn, (await prices.load(conn)).sale("m"), input_fresh=Decimal(9))
    assert (await rerate(conn)).adjusted == 0


async def test_device_time_is_rated_again_and_an_upstream_s_own_word_is_not(conn: AsyncConnection) -> None:
    await book(conn, SALE, COST, DEVICE)
    await call(conn, upstream="gpu", prefill_device_seconds=1.0, decode_device_seconds=2.0, usage_source="engine")
    await call(conn, cost=Decimal("0.77"))  # reported by the vendor
    loaded = await prices.load(conn)
    await correct(conn, loaded.device("gpu"), device_hour=Decimal(72))
    await correct(conn, loaded.cost("m", "vendor"), input_fresh=Decimal(5))
    done = await rerate(conn)
    assert (done.adjusted, done.cost_delta) == (1, {"USD": Decimal("0.03")})


@pytest.mark.parametrize("scope", ["org", "key"])
async def test_an_override_in_hindsight(conn: AsyncConnection, scope: Any) -> None:
    await book(conn, SALE)
    await call(conn)
    identifier = str(ORG if scope == "org" else KEY)
    terms = PriceTerms(
        book="sale", model="", tier="", currency="USD", scope_kind=scope, scope_id=identifier, factor=Decimal("0.5")
    )
    await enter(conn, [Entry(terms=terms, effective_at=LONG_AGO)])
    assert (await rerate(conn)).billed_delta == {"USD": Decimal("-0.001")}
    (row,) = await rows(conn)
    assert row["override_from"] is None and row["override_to"] is not None
    assert row["price_version_from"] == row["price_version_to"]


async def test_more_calls_than_a_page(conn: AsyncConnection, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adjustments, "PAGE", 2)
    await book(conn, SALE)
    for _ in range(5):
        await call(conn)
    await correct(conn, (await prices.load(conn)).sale("m"), input_fresh=Decimal(9))
    assert (await rerate(conn)).adjusted == 5
    assert (await rerate(conn)).adjusted == 0


async def test_a_period_or_reason_that_makes_no_sense(conn: AsyncConnection) -> None:
    with pytest.raises(ValueError, match="is not after its start"):
        await adjustments.rerate(conn, NOW, NOW, reason="r", actor="a")
    with pytest.raises(ValueError, match="time zone"):
        await adjustments.rerate(conn, datetime(2026, 1, 1), NOW, reason="r", actor="a")
    with pytest.raises(ValueError, match="say why"):
        await adjustments.rerate(conn, YESTERDAY, NOW, reason=" ", actor="a")
