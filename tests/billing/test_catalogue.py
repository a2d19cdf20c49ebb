"""The public catalogue's real data, as the package has it."""

from datetime import UTC, datetime
from decimal import Decimal

from billing.catalogue import PublicPrice, differences, public_price
from billing.prices import PriceTerms

AT = datetime(2026, 11, 20, tzinfo=UTC)
PUBLIC = PublicPrice(
    provider="v",
    model="m",
    rates={"input_fresh": Decimal(10), "input_cached": Decimal(1), "output_text": Decimal(0)},
    rises=None,
)


def test_a_vendor_s_model_is_found_by_its_name_and_by_the_vendor_s_address() -> None:
    named = public_price("openai", "", "gpt-4o", AT)
    assert named is not None and named.provider == "openai"
    assert 0 < named.rates["input_cached"] < named.rates["input_fresh"] < named.rates["output_text"]
    assert set(named.rates) == {
        "input_fresh", "input_cached", "input_cache_write", "output_text", "output_reasoning",
    }  # fmt: skip
    assert public_price(None, "https://api.openai.com/v1", "gpt-4o", AT) == named


def test_what_it_does_not_know_is_none() -> None:
    assert public_price("openai", "", "no-such-model-at-all", AT) is None
    assert public_price(None, "http://10.0.0.1:8000/v1", "gpt-4o", AT) is None


def test_a_price_that_rises_with_the_prompt_is_told() -> None:
    found = public_price("openai", "", "gpt-5.4", AT)
    assert found is not None and found.rises == 272_000


def test_differences_above_a_share() -> None:
    ours = PriceTerms(book="sale", model="m", currency="USD", input_fresh=Decimal("10.5"), output_text=Decimal(3))
    found = {each.token_class: (each.ours, each.percent) for each in differences(ours, PUBLIC, Decimal(5))}
    assert found == {"input_cached": (None, None), "output_text": (Decimal(3), None)}
    found = {each.token_class: (each.ours, each.percent) for each in differences(ours, PUBLIC, Decimal(4))}
    assert found["input_fresh"] == (Decimal("10.5"), 5)
