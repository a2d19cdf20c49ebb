"""Whose price applies: the list's, or that of an org, a team or a key; by tier; from which moment on."""

from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from billing.charge import EXACT, charge
from billing.ids import new_id
from billing.prices import Payer, Price, PriceBook, PriceTerms, effective
from billing.records import TOKEN_CLASSES, TokenClasses

NOW = datetime(2026, 12, 1, tzinfo=UTC)
PAYER = Payer(new_id(), new_id(), new_id())
SCOPES = {"org": str(PAYER.org_id), "team": str(PAYER.team_id), "key": str(PAYER.key_id)}


def price(book: str = "sale", model: str = "m", at: datetime = NOW, **parts: Any) -> Price:
    terms = msgspec.convert({"book": book, "model": model, "currency": "USD", **parts}, PriceTerms)
    return Price(**msgspec.structs.asdict(terms), id=new_id(), effective_at=at)


def override(kind: str, model: str = "m", tier: str = "", **parts: Any) -> Price:
    return price(model=model, tier=tier, scope_kind=kind, scope_id=SCOPES[kind], **parts)


def fresh(book: PriceBook, payer: Payer | None = PAYER, tier: Any = "standard") -> Decimal | None:
    found = book.sale("m", tier, payer)
    return None if found is None else found.input_fresh


LISTED = price(input_fresh=Decimal(10), output_text=Decimal(30))


def test_the_most_specific_override_applies_alone() -> None:
    org, team, key = (
        override("org", factor=Decimal("0.9")),
        override("team", factor=Decimal("0.5")),
        override("key", factor=Decimal(2)),
    )
    assert fresh(PriceBook([LISTED, org], NOW)) == 9
    assert fresh(PriceBook([LISTED, org, team], NOW)) == 5
    assert fresh(PriceBook([LISTED, org, team, key], NOW)) == 20
    assert fresh(PriceBook([LISTED, org, team, key], NOW), None) == 10
    other = Payer(new_id(), None, new_id())
    assert fresh(PriceBook([LISTED, org, team, key], NOW), other) == 10


def test_within_a_scope_the_model_s_before_all_models_the_tier_s_before_all_tiers() -> None:
    every = override("org", model="", factor=Decimal("0.9"))
    model = override("org", factor=Decimal("0.8"))
    batch = override("org", tier="batch", factor=Decimal("0.7"))
    book = PriceBook([LISTED, every, model, batch], NOW)
    assert (fresh(book), fresh(book, tier="batch")) == (8, 7)
    assert fresh(PriceBook([LISTED, every], NOW)) == 9
    for_all_of_the_team = override("team", model="", factor=Decimal(1))
    assert fresh(PriceBook([LISTED, model, for_all_of_the_team], NOW)) == 10, "the team's before the org's"


def test_a_price_of_one_s_own_takes_the_list_price_s_place() -> None:
    own = override("team", input_fresh=Decimal(4))
    found = PriceBook([LISTED, own], NOW).sale("m", payer=PAYER)
    assert found is not None and (found.input_fresh, found.output_text) == (4, None), "unknown, not the list's"
    assert (found.id, found.override_id) == (own.id, own.id)
    assert fresh(PriceBook([own], NOW)) == 4, "also of a model that others cannot pay"


def test_an_attempt_can_name_what_its_charge_was_made_of() -> None:
    factor = override("key", factor=Decimal("1.25"))
    found = PriceBook([LISTED, factor], NOW).sale("m", payer=PAYER)
    assert found is not None and (found.id, found.override_id) == (LISTED.id, factor.id)
    assert found == effective(LISTED, factor)
    assert fresh(PriceBook([factor], NOW)) is None, "a factor of nothing is nothing"


def test_an_override_that_ended_gives_way_to_the_next() -> None:
    org, key = override("org", factor=Decimal("0.9")), override("key", factor=Decimal(2))
    ended = override("key", at=NOW + timedelta(days=1))
    book = PriceBook([LISTED, org, key, ended], NOW)
    assert (fresh(book), fresh(book.at(NOW + timedelta(days=1)))) == (20, 9)


rates = st.decimals(min_value=0, max_value=10**6, places=9)
counts = st.integers(0, 10**9)


@given(st.builds(dict, **dict.fromkeys(TOKEN_CLASSES, rates)), rates, counts, counts)
def test_a_factor_multiplies_the_charge_exactly(parts: dict[str, Decimal], factor: Decimal, a: int, b: int) -> None:
    listed = price(**parts, per_request=Decimal("0.5"), per_image=Decimal("0.001"))
    tokens = TokenClasses(input_fresh=a, output_reasoning=b, input_cached=1)
    whole = charge(listed, tokens, images=3)
    assert whole is not None
    assert charge(effective(listed, override("org", factor=factor)), tokens, images=3) == EXACT.multiply(whole, factor)


def test_a_price_to_come_and_the_moment_it_takes_effect() -> None:
    later = price(at=NOW + timedelta(hours=1), input_fresh=Decimal(11))
    last = price(at=NOW + timedelta(hours=2))
    book = PriceBook([last, later, LISTED], NOW)
    assert (fresh(book), book.next_change) == (10, later.effective_at)
    book = book.at(later.effective_at)
    assert (fresh(book), book.next_change) == (11, last.effective_at)
    book = book.at(last.effective_at)
    assert (fresh(book), book.next_change) == (None, None), "it ended"


def test_of_two_versions_of_one_moment_the_later_entered_holds() -> None:
    assert fresh(PriceBook([price(input_fresh=Decimal(12)), LISTED], NOW)) == 12
    assert fresh(PriceBook([LISTED], NOW)) == 10


def test_prices_in_another_currency_are_no_prices() -> None:
    book = PriceBook([LISTED, price(model="n", input_fresh=Decimal(1)), price(model="n", currency="EUR")], NOW, "EUR")
    assert book.sale("m") is None and book.sale("n") is None
    half, euros = override("org", factor=Decimal("0.5")), price(currency="EUR", input_fresh=Decimal(8))
    assert fresh(PriceBook([half, euros], NOW, "EUR")) == 4, "a factor is one in every currency"


def test_tiers_of_sale_and_cost() -> None:
    urgent = price(tier="priority", input_fresh=Decimal(20))
    book = PriceBook([LISTED, urgent], NOW)
    assert (fresh(book, tier="batch"), fresh(book, tier="priority")) == (10, 20)
    assert fresh(PriceBook([LISTED], NOW), tier="priority") is None
    cost = price("cost", upstream="u", input_fresh=Decimal(1))
    assert PriceBook([cost], NOW).cost("m", "u", "batch") == cost
    assert PriceBook([cost], NOW).cost("m", "u", "priority") is None, "unknown, not the standard one"
    device = price("cost", "", upstream="u", device_hour=Decimal(2))
    assert PriceBook([device], NOW).cost("m", "u", "priority") == device, "a device costs the same whoever is first"


@pytest.mark.parametrize(
    ("parts", "sentence"),
    [
        ({"factor": Decimal(1)}, "a factor is for an override"),
        ({"tier": ""}, "a list price has a tier"),
        ({"model": ""}, "a list price names its model"),
        ({"device_hour": Decimal(1)}, "device_hour is a cost"),
        ({"scope_kind": "org"}, "names a scope and its id"),
        ({"scope_kind": "org", "scope_id": "x", "factor": Decimal(1), "input_fresh": Decimal(1)}, "not both"),
        ({"scope_kind": "org", "scope_id": "x", "model": "", "input_fresh": Decimal(1)}, "name the model"),
        ({"book": "cost", "upstream": "u", "scope_kind": "org", "scope_id": "x"}, "an override is of a sale price"),
        ({"book": "cost", "upstream": "u", "tier": "batch"}, "only a sale price has a batch tier"),
        ({"per_image": Decimal(-1)}, "per_image is -1"),
    ],
)
def test_what_does_not_go_together_is_refused(parts: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        PriceTerms(**{"book": "sale", "model": "m", "currency": "USD"} | parts)
