"""Invoices against ledgers: complete to the last digit, rounded once a line, numbered, never changed."""

import asyncio
import random
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from io import BytesIO
from typing import Any
from uuid import UUID

import msgspec
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from pypdf import PdfReader
from random_ledger import Household, adjust, move_in, operations, store, sum_exactly
from sqlalchemy import delete, text, update
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncConnection, create_async_engine

from billing.charge import EXACT
from billing.currencies import decimals, rounded
from billing.invoice_csv import invoice_csv
from billing.invoice_lines import InvoiceLine
from billing.invoice_pdf import invoice_pdf
from billing.invoices import (
    Invoice,
    create_invoice,
    find_invoice,
    list_invoices,
    set_billing_time_zone,
    void_invoice,
)
from billing.records import OperationRecord
from billing.tables import invoice, invoice_line, operation, usage_hour

AUGUST, SEPTEMBER, OCTOBER, NOVEMBER = (datetime(2026, month, 1, tzinfo=UTC) for month in (8, 9, 10, 11))


def billed(records: list[OperationRecord]) -> Decimal:
    return sum_exactly([record.billed for record in records])


async def filled(
    conn: AsyncConnection, seed: int, start: datetime = SEPTEMBER, end: datetime = OCTOBER, number: int = 40
) -> tuple[Household, list[OperationRecord]]:
    rng = random.Random(seed)
    household = await move_in(conn, rng)
    records = list(operations(rng, household, start, end, number))
    await store(conn, records)
    return household, records


# A smaller seed is no simpler ledger, so nothing is shrunk.
@settings(
    max_examples=8,
    deadline=None,
    phases=[Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(seed=st.integers(0, 2**32))
def test_lines_before_rounding_are_the_ledger(database_url: str, seed: int) -> None:
    """In whatever order things come: teams first, rows that are late, corrected prices, a void and a reissue."""

    async def check(conn: AsyncConnection) -> None:
        rng = random.Random(seed + 1)
        household, records = await filled(conn, seed)
        org_id = household.org_id
        if rng.random() < 0.5 and any(record.team_id and record.billed is not None for record in records):
            of_team = await create_invoice(conn, org_id, "2026-09", team_id=household.team_id)
            assert of_team.exact_total == billed([record for record in records if record.team_id])
        whole = await create_invoice(conn, org_id, "2026-09")
        checked(whole)
        late = list(operations(rng, household, SEPTEMBER, OCTOBER, 10))
        october = list(operations(rng, household, OCTOBER, NOVEMBER, 10))
        await store(conn, late + october)
        deltas = [Decimal("-0.000000000001"), Decimal(3)]
        await adjust(conn, next(record for record in records if record.attempts), deltas[0], None)
        await adjust(conn, next(record for record in october if record.attempts), deltas[1], Decimal(1))
        second = await create_invoice(conn, org_id, "2026-10")
        checked(second)
        everything = sum_exactly([billed(records + late + october), *deltas])
        assert await invoiced(conn) == everything
        if rng.random() < 0.5:
            await void_invoice(conn, whole.id, "wrong address")
            again = await create_invoice(conn, org_id, "2026-09")
            assert again.number == second.number + 1
            assert await invoiced(conn) == everything

    async def invoiced(conn: AsyncConnection) -> Decimal:
        found = [each for each in await list_invoices(conn) if each.voided_at is None]
        return sum_exactly([each.exact_total for each in found])

    asyncio.run(rolled_back(database_url, check))


def checked(found: Invoice) -> None:
    assert found.exact_total == sum_exactly([line.exact_amount for line in found.lines])
    assert found.total == sum(line.amount for line in found.lines)
    for line in found.lines:
        assert line.amount == rounded(line.exact_amount, "USD")
        if line.unit_price is not None:
            assert EXACT.multiply(line.quantity, line.unit_price) == EXACT.multiply(
                line.exact_amount, Decimal(line.per)
            )
    assert len({(line.month, line.model, line.tier, line.part, line.price_version_id, line.override_id)
                for line in found.lines}) == len(found.lines)  # fmt: skip


async def rolled_back(url: str, work: Any) -> None:
    engine = create_async_engine(url)
    async with engine.connect() as conn:
        await work(conn)
        await conn.rollback()
    await engine.dispose()


async def test_what_is_read_back_is_what_was_issued(conn: AsyncConnection) -> None:
    household, _ = await filled(conn, 1)
    issued = await create_invoice(conn, household.org_id, "2026-09", issuer="Farthing GmbH\nBerlin", bill_to="1 Road")
    assert (issued.number, issued.label) == (1, f"{household.org_id.hex[-8:].upper()}-0001")
    assert await find_invoice(conn, issued.id) == issued
    assert await find_invoice(conn, issued.label.lower()) == issued
    assert await find_invoice(conn, "nothing") is None
    assert [each.id for each in await list_invoices(conn, household.org_id)] == [issued.id]
    assert await list_invoices(conn, UUID(int=1)) == []
    assert issued.unknown == await unknown_operations(conn) > 0


async def unknown_operations(conn: AsyncConnection) -> int:
    query = text("SELECT count(*) FROM operation WHERE billed IS NULL AND status NOT IN ('refused', 'invalid')")
    return int((await conn.execute(query)).scalar_one())


async def test_an_issued_invoice_cannot_be_changed(conn: AsyncConnection) -> None:
    household, _ = await filled(conn, 2)
    issued = await create_invoice(conn, household.org_id, "2026-09")
    changes: list[Any] = [
        update(invoice).where(invoice.c.id == issued.id).values(total=Decimal(0)),
        delete(invoice).where(invoice.c.id == issued.id),
        update(invoice_line).where(invoice_line.c.invoice_id == issued.id).values(amount=Decimal(0)),
        delete(invoice_line).where(invoice_line.c.invoice_id == issued.id),
        update(invoice).where(invoice.c.id == issued.id).values(voided_at=NOVEMBER, void_reason="x", total=Decimal(0)),
    ]
    for change in changes:
        with pytest.raises(DBAPIError, match="an issued invoice is never changed"):
            async with conn.begin_nested():
                await conn.execute(change)
    void = await void_invoice(conn, issued.id, " wrong address ")
    assert (void.void_reason, void.total, void.voided_at is not None) == ("wrong address", issued.total, True)
    with pytest.raises(DBAPIError, match="never changed"):
        async with conn.begin_nested():
            await conn.execute(update(invoice).values(voided_at=None, void_reason=None))
    with pytest.raises(ValueError, match="is void already: wrong address"):
        await void_invoice(conn, issued.id, "again")
    with pytest.raises(ValueError, match="say why"):
        await void_invoice(conn, issued.id, "  ")
    with pytest.raises(ValueError, match="there is no invoice"):
        await void_invoice(conn, UUID(int=5), "x")


async def test_a_month_is_invoiced_once_and_numbers_have_no_gaps(conn: AsyncConnection) -> None:
    household, _ = await filled(conn, 3)
    first = await create_invoice(conn, household.org_id, "2026-09")
    with pytest.raises(ValueError, match=f"2026-09 is on invoice {first.label} already"):
        await create_invoice(conn, household.org_id, "2026-09")
    with pytest.raises(ValueError, match=f"on invoice {first.label} already"):
        await create_invoice(conn, household.org_id, "2026-09", team_id=household.team_id)
    await void_invoice(conn, first.id, "wrong")
    second = await create_invoice(conn, household.org_id, "2026-09")
    assert second.number == 2
    assert [comparable(line) for line in second.lines] == [comparable(line) for line in first.lines]


def comparable(line: InvoiceLine) -> InvoiceLine:
    return msgspec.structs.replace(line, exact_amount=line.exact_amount.normalize())


async def test_two_at_once_take_turns(database_url: str) -> None:
    engine = create_async_engine(database_url)
    async with engine.begin() as conn:
        household, _ = await filled(conn, 4)

    async def issue() -> Invoice:
        async with engine.begin() as conn:
            return await create_invoice(conn, household.org_id, "2026-09")

    answers = await asyncio.gather(*(issue() for _ in range(4)), return_exceptions=True)
    await engine.dispose()
    assert sorted(type(answer).__name__ for answer in answers) == ["Invoice"] + ["ValueError"] * 3


async def test_months_begin_on_the_orgs_clock(conn: AsyncConnection) -> None:
    household, records = await filled(conn, 5, SEPTEMBER - timedelta(hours=9), SEPTEMBER + timedelta(hours=9), 60)
    await set_billing_time_zone(conn, household.org_id, "Asia/Tokyo")
    border = SEPTEMBER - timedelta(hours=9)
    issued = await create_invoice(conn, household.org_id, "2026-09")
    assert (issued.starts_at, issued.time_zone) == (border, "Asia/Tokyo")
    assert issued.exact_total == billed(records)
    with pytest.raises(ValueError, match=f"invoice {issued.label} has its month on another clock"):
        await set_billing_time_zone(conn, household.org_id, "UTC")
    with pytest.raises(ValueError, match="is not a time zone"):
        await set_billing_time_zone(conn, household.org_id, "Mars/Base")


async def test_what_cannot_be_invoiced_says_why(conn: AsyncConnection) -> None:
    household, _ = await filled(conn, 6)
    for month, problem in (
        ("2026-13", "is not a month"),
        ("september", "is not a month"),
        ("2999-01", "2999-01 is not over in UTC"),
        ("2026-08", "there is nothing to invoice for 2026-08"),
    ):
        with pytest.raises(ValueError, match=problem):
            await create_invoice(conn, household.org_id, month)


async def test_what_comes_late_is_asked_of_a_team_or_of_its_org_never_of_both(conn: AsyncConnection) -> None:
    rng = random.Random(12)
    household, august = await filled(conn, 13, AUGUST, SEPTEMBER)
    org_id, team_id = household.org_id, household.team_id
    await create_invoice(conn, org_id, "2026-08", team_id=team_id)
    late_for_the_team = list(operations(rng, household, AUGUST, SEPTEMBER, 20))
    september = list(operations(rng, household, SEPTEMBER, OCTOBER, 20))
    await store(conn, late_for_the_team + september)
    second = await create_invoice(conn, org_id, "2026-09", team_id=team_id)
    of_team = [record for record in late_for_the_team + september if record.team_id == team_id]
    assert second.exact_total == billed(of_team)
    assert {line.month for line in second.lines} == {"2026-08", "2026-09"}
    rest = await create_invoice(conn, org_id, "2026-08")
    assert rest.exact_total == billed([r for r in august + late_for_the_team if r.team_id is None])
    later = list(operations(rng, household, AUGUST, SEPTEMBER, 20))
    october = list(operations(rng, household, OCTOBER, NOVEMBER, 20))
    await store(conn, later + october)
    third = await create_invoice(conn, org_id, "2026-10", team_id=team_id)
    assert third.exact_total == billed([record for record in october if record.team_id == team_id])
    last = await create_invoice(conn, org_id, "2026-09")
    without_a_team = [record for record in september if record.team_id is None]
    assert last.exact_total == billed(later + without_a_team)


async def test_what_comes_late_is_asked_of_a_team_also_when_its_org_had_a_later_month(conn: AsyncConnection) -> None:
    """Nobody else would be asked for it: the org's invoices look for what is late in months that the org was asked."""
    rng = random.Random(14)
    household, _ = await filled(conn, 15, AUGUST, SEPTEMBER)
    org_id, team_id = household.org_id, household.team_id
    await create_invoice(conn, org_id, "2026-08", team_id=team_id)
    await store(conn, list(operations(rng, household, SEPTEMBER, OCTOBER, 20)))
    await create_invoice(conn, org_id, "2026-09")
    late = list(operations(rng, household, AUGUST, SEPTEMBER, 20))
    october = list(operations(rng, household, OCTOBER, NOVEMBER, 20))
    await store(conn, late + october)
    of_team = await create_invoice(conn, org_id, "2026-10", team_id=team_id)
    assert of_team.exact_total == billed([record for record in late + october if record.team_id == team_id])


async def test_each_currency_has_an_invoice_of_its_own(conn: AsyncConnection) -> None:
    household, records = await filled(conn, 7)
    moved = next(record for record in records if record.billed)
    await conn.execute(update(operation).where(operation.c.id == moved.id).values(currency="KWD"))
    with pytest.raises(ValueError, match="2026-09 was charged in KWD, USD: name one"):
        await create_invoice(conn, household.org_id, "2026-09")
    dinars = await create_invoice(conn, household.org_id, "2026-09", currency="KWD")
    assert dinars.exact_total == moved.billed
    assert all(line.amount.as_tuple().exponent == -3 for line in dinars.lines)
    assert (await create_invoice(conn, household.org_id, "2026-09", currency="USD")).number == 2


async def test_a_month_that_retention_has_cut_is_refused_and_not_credited(conn: AsyncConnection) -> None:
    household, records = await filled(conn, 8)
    await create_invoice(conn, household.org_id, "2026-09")
    october = list(operations(random.Random(8), household, OCTOBER, NOVEMBER, 20))
    await store(conn, october)
    await conn.execute(delete(operation).where(operation.c.id.in_([record.id for record in records])))
    values = {column.name: 0 for column in usage_hour.columns if column.name not in ("team_id", "user_id", "billed")}
    values |= {
        "bucket": SEPTEMBER + timedelta(days=29, hours=23),
        "dropped": SEPTEMBER.date(),
        "org_id": household.org_id,
        "model": "",
        "currency": "USD",
    }
    await conn.execute(usage_hour.insert().values(values | {"key_id": household.keys[0], "billed": None}))
    assert (await create_invoice(conn, household.org_id, "2026-10")).exact_total == billed(october)
    await void_invoice(conn, (await list_invoices(conn))[-1].id, "x")
    with pytest.raises(ValueError, match="no longer has all of 2026-09"):
        await create_invoice(conn, household.org_id, "2026-09")


@pytest.mark.parametrize(("currency", "places"), [("USD", 2), ("JPY", 0), ("KWD", 3), ("CLF", 4)])
def test_coins_are_those_of_iso_4217(currency: str, places: int) -> None:
    assert decimals(currency) == places


@pytest.mark.parametrize("currency", ["XAU", "usd?", "BTC", ""])
def test_what_has_no_coin_is_refused(currency: str) -> None:
    with pytest.raises(ValueError, match="ISO 4217"):
        decimals(currency)


@pytest.mark.parametrize(
    ("amount", "currency", "expected"),
    [
        ("0.005", "USD", "0.00"),
        ("0.015", "USD", "0.02"),
        ("-0.025", "USD", "-0.02"),
        ("0.5", "JPY", "0"),
        ("1.5", "JPY", "2"),
        ("0.0005", "KWD", "0.000"),
    ],
)
def test_rounding_is_half_even(amount: str, currency: str, expected: str) -> None:
    assert str(rounded(Decimal(amount), currency)) == expected


async def test_the_files_hold_every_line(conn: AsyncConnection) -> None:
    rng = random.Random(9)
    household = await move_in(conn, rng, "=鹪鹩与儿子有限公司 & <Söhne>")
    await store(conn, list(operations(rng, household, SEPTEMBER, OCTOBER, 40)))
    issued = await create_invoice(conn, household.org_id, "2026-09")
    lines = invoice_csv(issued).decode().split("\r\n")
    assert len(lines) == len(issued.lines) + 2 and lines[1].split(",")[2].startswith("'=")
    many = msgspec.structs.replace(issued, lines=issued.lines * 8, voided_at=NOVEMBER, void_reason="an example")
    pages = PdfReader(BytesIO(invoice_pdf(many))).pages
    assert len(pages) >= 3
    read = ["".join(page.extract_text().split()) for page in pages]
    together = "".join(read)
    for number, page in enumerate(read, 1):
        assert issued.label in page and "VOID" in page and f"page{number}of{len(pages)}" in page
    for line in issued.lines:
        assert together.count("".join(line.description.split())) >= 8, line
        assert together.count(f"{line.amount:,f}") >= 8, line
    assert f"Total{issued.total:,f}USD" in together and "anexample" in together
    for letters in ("鹪鹩与儿子有限公司", "<Söhne>"):
        assert letters in together
