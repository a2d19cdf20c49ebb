import re
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dashboards.web.numbers import aligned, duration, exact, percent, places, precise, short

amounts = st.decimals(allow_nan=False, allow_infinity=False, min_value=Decimal("-1e12"), max_value=Decimal("1e12"))


@given(amounts)
def test_exact_money_reads_back_as_the_same_amount(amount: Decimal) -> None:
    text = exact(amount)
    assert re.fullmatch(r"-?[\d,]+\.\d{2,}", text)
    assert Decimal(text.replace(",", "")) == amount


@given(amounts)
def test_shown_money_is_never_scientific_and_is_zero_only_for_zero(amount: Decimal) -> None:
    for text in (aligned(amount), short(amount)):
        assert re.fullmatch(r"-?[\d,]+\.\d{2,}", text)
        assert (Decimal(text.replace(",", "")) == 0) == (amount == 0)


@pytest.mark.parametrize(
    ("amount", "in_a_column", "alone"),
    [
        ("0", "0.000000", "0.00"),
        ("0.000123", "0.000123", "0.000123"),
        ("1234567.5", "1,234,567.500000", "1,234,567.50"),
        ("0.0000431388888", "0.000043", "0.00004314"),
        ("1E-9", "0.000000001", "0.000000001"),
        ("-0.25", "-0.250000", "-0.25"),
        ("12345678901234567890123456789.123456789", "12,345,678,901,234,567,890,123,456,789.123457", None),
    ],
)
def test_money_in_a_column_and_alone(amount: str, in_a_column: str, alone: str | None) -> None:
    assert aligned(Decimal(amount)) == in_a_column
    if alone is not None:
        assert short(Decimal(amount)) == alone


@pytest.mark.parametrize(
    ("amount", "shown"),
    [
        ("0.000107244017388894", "0.000107244017389"),
        ("0.00001", "0.00001"),
        ("1.000000000000000001", "1.00"),
        ("1234567890123.456", "1,234,567,890,123.46"),
        ("-0.1234567890125", "-0.123456789012"),
        ("0E-18", "0.00"),
    ],
)
def test_precise_money_has_twelve_significant_digits(amount: str, shown: str) -> None:
    assert precise(Decimal(amount)) == shown


def test_a_column_gets_the_decimals_of_its_longest_amount() -> None:
    amounts = [Decimal("0.0000113"), None, Decimal("0.00000336"), Decimal("12")]
    assert [exact(amount, places(amounts)) for amount in amounts if amount is not None] == [
        "0.00001130",
        "0.00000336",
        "12.00000000",
    ]
    assert places([None]) == 2


@pytest.mark.parametrize(
    ("part", "whole", "shown"),
    [
        (0, 0, None),
        (0, 10, "0.0%"),
        (1, 3, "33.3%"),
        (1, 10_000, "<0.1%"),
        (9_999, 10_000, ">99.9%"),
        (10, 10, "100.0%"),
        (Decimal("-1"), Decimal("4"), "-25.0%"),
    ],
)
def test_percent_does_not_round_to_nothing_or_everything(part: int, whole: int, shown: str | None) -> None:
    assert percent(part, whole) == shown


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (0, "0 µs"),
        (0.00034, "340 µs"),
        (0.0013, "1.3 ms"),
        (0.0865, "86 ms"),
        (0.9996, "1.00 s"),
        (59.994, "59.99 s"),
        (59.999, "1 min 0 s"),
        (125, "2 min 5 s"),
    ],
)
def test_durations_take_the_unit_that_fits(seconds: float, shown: str) -> None:
    assert duration(seconds) == shown
