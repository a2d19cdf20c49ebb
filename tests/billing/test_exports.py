"""Files read back: equal to the ledger to the last digit, streamed, harmless to spreadsheets, FOCUS by its rules."""

import csv
import io
import json
import random
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from random_ledger import adjust, move_in, operations, store, sum_exactly
from samples import an_operation
from sqlalchemy import insert, text
from sqlalchemy.ext.asyncio import AsyncConnection

from billing.charge import EXACT
from billing.csv_text import harmless
from billing.exports import export_focus, export_usage
from billing.exports.focus import COLUMNS, METERS
from billing.exports.sheets import PARQUET_ROWS, Column, Digits, sheet
from billing.filters import Filters
from billing.ids import smallest_id
from billing.records import TOKEN_CLASSES, OperationRecord
from billing.tables import device_hour

START, END = datetime(2026, 9, 28, tzinfo=UTC), datetime(2026, 10, 3, tzinfo=UTC)
Rows = list[dict[str, Any]]


async def filled(conn: AsyncConnection, number: int = 120) -> list[OperationRecord]:
    rng = random.Random(5)
    household = await move_in(conn, rng)
    records = list(operations(rng, household, START, END, number))
    await store(conn, records)
    return records


async def whole(pieces: AsyncIterator[bytes]) -> bytes:
    return b"".join([piece async for piece in pieces])


def read_csv(content: bytes) -> Rows:
    return [
        {name: value or None for name, value in row.items()} for row in csv.DictReader(io.StringIO(content.decode()))
    ]


def read_parquet(content: bytes) -> Rows:
    rows: Rows = pq.read_table(io.BytesIO(content)).to_pylist()
    return rows


async def test_both_formats_hold_the_ledger(conn: AsyncConnection) -> None:
    records = {str(record.id): record for record in await filled(conn)}
    adjusted = next(record for record in records.values() if None not in (record.billed, record.cost))
    await adjust(conn, adjusted, Decimal("1E-20"), Decimal(-1))
    by_csv = read_csv(await whole(export_usage(conn, START, END)))
    by_parquet = read_parquet(await whole(export_usage(conn, START, END, format="parquet")))
    assert [row["operation_id"] for row in by_csv] == [row["operation_id"] for row in by_parquet] == sorted(records)
    for from_csv, from_parquet in zip(by_csv, by_parquet, strict=True):
        record = records[from_csv["operation_id"]]
        for name, delta in (("billed", Decimal("1E-20")), ("cost", Decimal(-1))):
            amount = getattr(record, name)
            if record is adjusted:
                amount = EXACT.add(amount or Decimal(0), delta)
            assert from_parquet[name] == amount
            assert (None if from_csv[name] is None else Decimal(from_csv[name])) == amount
        tokens = [sum(getattr(attempt.tokens, name) for attempt in record.attempts) for name in TOKEN_CLASSES]
        assert [from_parquet[name] for name in TOKEN_CLASSES] == tokens
        assert [int(from_csv[name]) for name in TOKEN_CLASSES] == tokens
        assert from_parquet["started_at"] == record.started_at == datetime.fromisoformat(from_csv["started_at"])
        assert json.loads(from_csv["tags"]) == json.loads(from_parquet["tags"]) == record.tags
        assert (from_csv["stream"] == "true") is from_parquet["stream"] is record.stream
        assert from_csv["user"] in (None, "'=cmd|' /C calc'!A0"), "a spreadsheet would run it without the apostrophe"
        assert from_parquet["user"] in (None, "=cmd|' /C calc'!A0")


async def test_a_filter_and_a_period_leave_the_rest_out(conn: AsyncConnection) -> None:
    records = await filled(conn)
    middle = START + timedelta(days=2)
    rows = read_csv(await whole(export_usage(conn, START, middle, Filters(model="large", tag=("app", "editor")))))
    wanted = [r for r in records if r.started_at < middle and r.model == "large" and r.tags.get("app") == "editor"]
    assert {row["operation_id"] for row in rows} == {str(record.id) for record in wanted}


@pytest.mark.parametrize(
    ("amount", "kind"),
    [
        ("12345678901234567890.123456789012345678", "decimal128(38, 18)"),
        ("0.00000000000000000000000000000000000001", "decimal256(76, 38)"),
        ("1234567890123456789012345678901234567890.000000000000000001", "decimal256(76, 18)"),
    ],
)
async def test_parquet_loses_no_digit(conn: AsyncConnection, amount: str, kind: str) -> None:
    at = START + timedelta(hours=1)
    fields = {"id": smallest_id(at), "started_at": at, "billed": Decimal(amount), "cost": Decimal(0), "attempts": []}
    await store(conn, [an_operation(**fields)])
    content = await whole(export_usage(conn, START, END, format="parquet"))
    assert str(pq.read_schema(io.BytesIO(content)).field("billed").type) == kind
    assert read_parquet(content)[0]["billed"] == Decimal(amount)
    assert Decimal(read_csv(await whole(export_usage(conn, START, END)))[0]["billed"]) == Decimal(amount)


def test_more_digits_than_parquet_has_are_an_error() -> None:
    with pytest.raises(ValueError, match="an amount has 79 digits, and Parquet holds 76: export it as CSV"):
        Digits(40, 39).type()
    assert Digits(1, 0).type() == pa.decimal128(38, 6)


async def test_an_unknown_format_is_refused(conn: AsyncConnection) -> None:
    wrong: Any = "xml"
    with pytest.raises(ValueError, match="'xml' is no format of an export"):
        await whole(export_usage(conn, START, END, format=wrong))
    with pytest.raises(ValueError, match="'xml' is no view of costs"):
        await whole(export_focus(conn, wrong, START, END))


@pytest.mark.parametrize("format", ["csv", "parquet"])
async def test_rows_stream(format: Any) -> None:
    """What is read ahead is one batch, however many rows there are."""
    read = 0

    async def rows() -> AsyncIterator[tuple[Any, ...]]:
        nonlocal read
        for read in range(3 * PARQUET_ROWS):
            yield (read, Decimal(read) / 4)

    pieces = sheet(rows, [Column("n", "integer"), Column("amount", "decimal")], format, [Digits(), Digits(6, 2)])
    first = await anext(pieces)
    if format == "csv":
        first = await anext(pieces)
    assert first and read <= PARQUET_ROWS
    content = b"".join([first, *[piece async for piece in pieces]])
    if format == "parquet":
        assert pq.read_table(io.BytesIO(content)).num_rows == 3 * PARQUET_ROWS
        assert pq.ParquetFile(io.BytesIO(content)).num_row_groups == 3


@pytest.mark.parametrize("cell", ["=1+1", "+1", "-1", "@SUM(A1)", "\tx", "\r=1"])
def test_formulas_are_made_harmless(cell: str) -> None:
    assert harmless(cell) == f"'{cell}"
    assert harmless("a=1") == "a=1"


MANDATORY = {
    "BilledCost", "BillingAccountId", "BillingAccountName", "BillingCurrency", "BillingPeriodEnd", "BillingPeriodStart",
    "ChargeCategory", "ChargeClass", "ChargeDescription", "ChargePeriodEnd", "ChargePeriodStart", "ContractedCost",
    "EffectiveCost", "HostProviderName", "InvoiceIssuerName", "ListCost", "PricingQuantity", "PricingUnit",
    "ServiceCategory", "ServiceName", "ServiceProviderName",
}  # fmt: skip
"""Of FOCUS 1.4, Cost and Usage."""
MAY_BE_NULL = {
    "BillingAccountName", "ChargeClass", "ChargeDescription", "ConsumedQuantity", "ConsumedUnit", "ContractedUnitPrice",
    "ListUnitPrice", "PricingCategory", "PricingQuantity", "PricingUnit", "SkuId", "SkuMeter", "SkuPriceDetails",
    "SkuPriceId", "SubAccountId", "SubAccountName", "SubAccountType", "Tags",
}  # fmt: skip
ALLOWED = {
    "ChargeCategory": {"Usage", "Purchase", "Tax", "Credit", "Adjustment"},
    "ChargeClass": {None, "Correction"},
    "ChargeFrequency": {"One-Time", "Recurring", "Usage-Based"},
    "PricingCategory": {None, "Standard", "Dynamic", "Committed", "Other"},
    "ServiceCategory": {"AI and Machine Learning"},
    "ServiceSubcategory": {"Generative AI"},
}
OF_A_SKU = (
    "ConsumedQuantity", "ConsumedUnit", "ContractedUnitPrice", "ListUnitPrice", "PricingQuantity", "PricingUnit",
    "SkuId", "SkuMeter",
)  # fmt: skip


def test_columns_are_focus_ones_and_custom_ones_after_them() -> None:
    names = [column.name for column in COLUMNS]
    assert set(names) >= MANDATORY
    custom = [name for name in names if name.startswith("x_")]
    assert names == [name for name in names if not name.startswith("x_")] + custom
    assert all(name.isalnum() and name[0].isupper() and len(name) <= 50 for name in names if name not in custom)
    assert names == sorted(names)


@pytest.mark.parametrize("view", ["billed", "cost"])
async def test_focus_keeps_its_rules_and_is_the_ledger(conn: AsyncConnection, view: Any) -> None:
    records = await filled(conn)
    await adjust(conn, next(record for record in records if record.attempts), Decimal("0.5"), Decimal("0.25"))
    await conn.execute(
        insert(device_hour).values(
            upstream="engine", starts_at=START, currency="USD", wall_seconds=10, busy_seconds=4, idle_seconds=6,
            busy_cost=Decimal("0.4"), idle_cost=Decimal("0.6"),
        )
    )  # fmt: skip
    rows = read_csv(await whole(export_focus(conn, view, START, END, provider="Ops Ltd")))
    for row in rows:
        check_focus(row)
    total = sum_exactly([Decimal(row["BilledCost"]) for row in rows])
    if view == "billed":
        assert total == sum_exactly([Decimal("0.5"), *(record.billed for record in records)])
        assert {row["BillingAccountName"] for row in rows} == {"Wren & Sons"}
        assert {row["ServiceProviderName"] for row in rows} == {"Ops Ltd"}
    else:
        costs = [attempt.cost for record in records for attempt in record.attempts]
        assert total == sum_exactly([Decimal("0.25"), Decimal("0.6"), *costs])
        assert {row["SubAccountName"] for row in rows if row["x_Part"] != "idle"} == {"Wren & Sons"}
        assert {row["ServiceProviderName"] for row in rows} == {"engine", "hosted", "reported"}
    parquet = read_parquet(await whole(export_focus(conn, view, START, END, format="parquet")))
    assert sum_exactly([row["BilledCost"] for row in parquet]) == total


def check_focus(row: dict[str, Any]) -> None:
    for name, value in row.items():
        assert value is not None or name in MAY_BE_NULL or name.startswith("x_"), name
    for name, allowed in ALLOWED.items():
        assert row[name] in allowed, name
    start, end = (datetime.strptime(row[f"ChargePeriod{edge}"], "%Y-%m-%dT%H:%M:%SZ") for edge in ("Start", "End"))
    first, last = (datetime.strptime(row[f"BillingPeriod{edge}"], "%Y-%m-%dT%H:%M:%SZ") for edge in ("Start", "End"))
    assert first <= start < end <= last and end - start == timedelta(days=1)
    assert row["BillingCurrency"] == "USD"
    costs = {name: Decimal(row[name]) for name in ("BilledCost", "EffectiveCost", "ListCost", "ContractedCost")}
    assert costs["BilledCost"] == costs["EffectiveCost"] == costs["ContractedCost"]
    if row["SkuPriceId"] is None:
        assert row["ChargeCategory"] == "Adjustment" and row["SkuPriceDetails"] is None
        assert all(row[name] is None for name in OF_A_SKU)
    else:
        assert all(row[name] is not None for name in OF_A_SKU)
        assert row["SkuMeter"] in METERS.values()
        quantity = Decimal(row["PricingQuantity"])
        assert EXACT.multiply(quantity, Decimal(row["ListUnitPrice"])) == costs["ListCost"]
        assert EXACT.multiply(quantity, Decimal(row["ContractedUnitPrice"])) == costs["ContractedCost"]
        assert all(name.startswith("x_") for name in json.loads(row["SkuPriceDetails"]))
    assert row["Tags"] is None or all(isinstance(value, str) for value in json.loads(row["Tags"]).values())


async def test_an_exact_charge_that_no_price_explains_is_a_row_of_its_own(conn: AsyncConnection) -> None:
    await filled(conn, 5)
    await conn.execute(text("UPDATE attempt SET billed = 7 WHERE billable AND billed IS NOT NULL"))
    await conn.execute(text("UPDATE operation SET billed = 7 WHERE billed IS NOT NULL"))
    rows = read_csv(await whole(export_focus(conn, "billed", START, END)))
    assert rows and {row["x_Part"] for row in rows} == {"other", "response_cache"}
    assert all(Decimal(row["BilledCost"]) % 7 == 0 and row["PricingUnit"] == "USD" for row in rows)


async def test_what_an_answer_without_an_attempt_was_billed_is_of_the_cache(conn: AsyncConnection) -> None:
    records = await filled(conn, 30)
    await conn.execute(text("DELETE FROM attempt"))
    rows = read_csv(await whole(export_focus(conn, "billed", START, END)))
    assert {row["x_Part"] for row in rows} == {"response_cache"}
    total = sum_exactly([Decimal(row["BilledCost"]) for row in rows])
    assert total == sum_exactly([record.billed for record in records])
