"""Charges are exact: equal to fractions, additive, monotone; worst cases are upper bounds."""

from datetime import UTC, datetime
from decimal import Decimal
from fractions import Fraction
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from billing.charge import (
    DEVICE_COST_QUANTUM,
    UNLIMITED_OUTPUT,
    affordable_output,
    amortised_hour,
    charge,
    device_cost,
    total,
    worst_case,
)
from billing.ids import new_id
from billing.prices import Price, PriceTerms
from billing.records import TOKEN_CLASSES, TokenClasses


def price_of(**parts: Decimal | None) -> Price:
    """A price with only these parts."""
    made = datetime(2026, 1, 1, tzinfo=UTC)
    which: dict[str, Any] = {"book": "cost", "upstream": "u"} if "device_hour" in parts else {"book": "sale"}
    terms = PriceTerms(model="m", currency="USD", **which, **parts)
    return Price(id=new_id(), effective_at=made, **msgspec.structs.asdict(terms))


rates = st.decimals(min_value=0, max_value=10**6, places=9, allow_nan=False, allow_infinity=False)
prices = st.builds(price_of, **dict.fromkeys(TOKEN_CLASSES, rates))
whole_prices = st.builds(price_of, **dict.fromkeys((*TOKEN_CLASSES, "per_request", "per_image"), rates))
counts = st.integers(min_value=0, max_value=10**12)
usages = st.builds(TokenClasses, **dict.fromkeys(TOKEN_CLASSES, counts))


def must(amount: Decimal | None) -> Decimal:
    assert amount is not None
    return amount


def test_a_known_charge_to_the_last_digit() -> None:
    price = price_of(input_fresh=Decimal(3), input_cache_write=Decimal("3.75"), output_text=Decimal(15))
    usage = TokenClasses(input_fresh=3, input_cache_write=12_304, output_text=550)
    assert charge(price, usage) == Decimal("0.054399")


def test_each_class_is_priced_once() -> None:
    price = price_of(input_fresh=Decimal(10), input_cache_write=Decimal("12.5"), input_cached=Decimal(1))
    usage = TokenClasses(input_fresh=100, input_cache_write=700, input_cached=200)
    assert charge(price, usage) == Decimal("0.00995")


def test_parts_for_the_request_and_its_images_count_once_where_something_was_answered() -> None:
    parts = {"per_request": Decimal("0.01"), "per_image": Decimal("0.002")}
    price = price_of(input_fresh=Decimal(1), output_text=Decimal(1), **parts)
    assert charge(price, TokenClasses(input_fresh=5, output_text=5), images=3) == Decimal("0.01601")
    assert charge(price, TokenClasses(input_fresh=5)) == Decimal("0.010005")
    assert charge(price, TokenClasses(), images=3) == 0
    assert charge(price, TokenClasses(input_cached=1), images=3) is None, "a class without a price stays unknown"


def test_an_hour_of_one_s_own_device() -> None:
    hour = amortised_hour(Decimal(17_532), Decimal(2), Decimal(500), Decimal("0.30"))
    assert hour == Decimal("1.15"), "17,532 over 2 years of 8,766 hours, and half a kilowatt"
    assert amortised_hour(Decimal(1), Decimal(3), Decimal(0), Decimal(0)) == Decimal("0.000038025705376835")
    for years in (Decimal(0), Decimal("NaN")):
        with pytest.raises(ValueError, match="more than 0 years"):
            amortised_hour(Decimal(1), years, Decimal(0), Decimal(0))


def test_a_class_with_tokens_but_no_price_is_unknown_not_free() -> None:
    price = price_of(input_fresh=Decimal(1), output_text=Decimal(1))
    assert charge(price, TokenClasses(input_fresh=1, input_cached=1)) is None
    assert charge(price, TokenClasses(input_fresh=1)) == Decimal("0.000001")
    assert charge(None, TokenClasses(input_fresh=1)) is None


def test_a_free_model_charges_nothing() -> None:
    free = price_of(**dict.fromkeys(TOKEN_CLASSES, Decimal(0)))
    assert charge(free, TokenClasses(input_fresh=10**9, output_text=10**9)) == 0
    assert worst_case(free, 10**9, 10**9) == 0
    assert affordable_output(free, 10**9, Decimal(0)) == UNLIMITED_OUTPUT


@given(prices, usages)
def test_a_charge_equals_the_fraction(price: Price, usage: TokenClasses) -> None:
    exact = sum(Fraction(getattr(price, name)) * getattr(usage, name) for name in TOKEN_CLASSES) / 1_000_000
    assert Fraction(must(charge(price, usage))) == exact


@given(prices, usages, usages)
def test_a_charge_is_additive_over_a_split(price: Price, one: TokenClasses, two: TokenClasses) -> None:
    both = TokenClasses(**{name: getattr(one, name) + getattr(two, name) for name in TOKEN_CLASSES})
    assert total([charge(price, one), charge(price, two)]) == charge(price, both)


@given(prices, usages, st.sampled_from(TOKEN_CLASSES), counts)
def test_more_tokens_never_cost_less(price: Price, usage: TokenClasses, name: str, more: int) -> None:
    larger = TokenClasses(**{n: getattr(usage, n) + (more if n == name else 0) for n in TOKEN_CLASSES})
    assert must(charge(price, larger)) >= must(charge(price, usage)) >= 0


@given(whole_prices, usages, st.integers(0, 100))
def test_no_charge_exceeds_the_worst_case(price: Price, usage: TokenClasses, images: int) -> None:
    most = must(worst_case(price, usage.prompt_tokens, usage.completion_tokens, images))
    assert must(charge(price, usage, images)) <= most


@given(whole_prices, st.integers(0, 10**7), st.decimals(0, 10**9, places=12), st.integers(0, 100))
def test_the_affordable_output_fits_and_one_more_does_not(
    price: Price, prompt: int, remaining: Decimal, images: int
) -> None:
    output = affordable_output(price, prompt, remaining, images)
    if must(worst_case(price, prompt, 0, images)) > remaining:
        assert output == 0
    elif max(price.output_text or 0, price.output_reasoning or 0) == 0:
        assert output == UNLIMITED_OUTPUT
    else:
        assert must(worst_case(price, prompt, output, images)) <= remaining
        # A price of nearly nothing affords more than any answer can have: then the cap is the answer.
        assert output == UNLIMITED_OUTPUT or remaining < must(worst_case(price, prompt, output + 1, images))


@pytest.mark.parametrize("limit", [Decimal("1e400"), Decimal("9" * 500), Decimal("3." + "1" * 500)])
def test_limits_of_any_size_can_be_compared(limit: Decimal) -> None:
    price = price_of(**dict.fromkeys(TOKEN_CLASSES, Decimal(1)))
    assert affordable_output(price, 1, limit) == (UNLIMITED_OUTPUT if limit > 10 else 3_111_110)


def test_a_worst_case_of_any_size_is_an_upper_bound() -> None:
    price = price_of(**dict.fromkeys(TOKEN_CLASSES, Decimal("3.3")))
    count = int("7" * 1000)
    assert Fraction(must(worst_case(price, 0, count))) >= Fraction(Decimal("3.3")) * count / 1_000_000


def test_a_call_without_an_upper_bound_has_no_worst_case() -> None:
    price = price_of(input_fresh=Decimal(1), input_cache_write=Decimal(1), output_text=Decimal(1))
    assert worst_case(price, 1, 0) is None  # a cached token would have no price
    assert worst_case(price, 0, 1) is None  # nor a reasoning token
    assert worst_case(price, 0, 0) == 0
    assert worst_case(None, 1, 1) is None
    assert affordable_output(price, 1, Decimal(100)) == 0
    with pytest.raises(ValueError, match="0 or more"):
        worst_case(price, -1, 0)


@given(rates, st.floats(min_value=0, max_value=10**9))
def test_device_cost_is_within_one_quantum_of_the_fraction(hourly: Decimal, seconds: float) -> None:
    exact = Fraction(hourly) * Fraction(Decimal(repr(seconds))) / 3600
    got = must(device_cost(price_of(device_hour=hourly), seconds))
    assert abs(Fraction(got) - exact) <= Fraction(DEVICE_COST_QUANTUM) / 2


def test_device_cost_of_the_obvious_cases() -> None:
    price = price_of(device_hour=Decimal("0.20"))
    assert device_cost(price, 3600.0) == Decimal("0.20")
    assert device_cost(price, 0.1) == Decimal("0.000005555555555556")
    assert device_cost(price, 0.0) == 0
    assert device_cost(price_of(input_fresh=Decimal(1)), 1.0) is None
    for bad in (-0.1, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="device time"):
            device_cost(price, bad)


def test_a_total_with_an_unknown_part_is_unknown() -> None:
    assert total([Decimal("0.1"), Decimal("0.2")]) == Decimal("0.3")
    assert total([Decimal(1), None]) is None
    assert total([]) == 0
    assert total([Decimal("1e20"), Decimal("1e-20")]) == Decimal("100000000000000000000.00000000000000000001")


@pytest.mark.parametrize("bad", [Decimal(-1), Decimal("NaN"), Decimal("Infinity")])
def test_a_price_is_a_finite_number_from_0_up(bad: Decimal) -> None:
    with pytest.raises(ValueError, match="output_text is"):
        price_of(output_text=bad)
