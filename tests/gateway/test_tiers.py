"""Which tier a request is billed at, judged without a gateway around it."""

from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import msgspec
import pytest

from billing.ids import new_id
from billing.prices import Price, PriceBook, PriceTerms
from gateway.errors import ApiError
from gateway.operation import Attempt, Operation
from gateway.settlement import price_attempt
from gateway.tiers import choose_tier, served_tier
from gateway.upstreams.usage import Usage
from tests.gateway.samples import chat_call

NOW = datetime(2026, 12, 1, tzinfo=UTC)


def book(*tiers: Any) -> PriceBook:
    terms = [PriceTerms(book="sale", model="m", tier=tier, currency="USD", input_fresh=Decimal(1)) for tier in tiers]
    return PriceBook([Price(**msgspec.structs.asdict(each), id=new_id(), effective_at=NOW) for each in terms], NOW)


def operation(tier: Any = "standard") -> Operation:
    return Operation(model="m", tier=tier)


@pytest.mark.parametrize("asked", [{}, {"service_tier": "auto"}, {"service_tier": "flex"}, {"service_tier": None}])
def test_other_requests_stay_as_they_are(asked: dict[str, Any]) -> None:
    one, call = operation(), chat_call(**asked)
    assert choose_tier(one, call, book("standard", "priority")) is call
    assert one.tier == "standard"


def test_priority_is_sold_where_it_has_a_price_however_it_is_written() -> None:
    call = chat_call()
    call.fields["service_tier"] = msgspec.Raw(rb'"prior\u0069ty"')
    one = operation()
    chosen = choose_tier(one, call, book("standard", "priority"))
    assert one.tier == "priority" and chosen.priority is not None and chosen.priority < 0


def test_priority_is_refused_where_it_would_be_billed_too_little() -> None:
    with pytest.raises(ApiError, match="has no price for priority"):
        choose_tier(operation(), chat_call(service_tier="priority"), book("standard"))
    one = operation()
    choose_tier(one, chat_call(service_tier="priority"), book())
    assert one.tier == "priority", "unpriced anyway"


def test_a_batch_has_no_priority() -> None:
    with pytest.raises(ApiError, match="its lines cannot ask for priority"):
        choose_tier(operation("batch"), chat_call(service_tier="priority"), book("standard", "priority"))


def test_what_was_served_decides() -> None:
    assert served_tier("priority", served_standard=True) == "standard"
    assert served_tier("priority", served_standard=False) == "priority"
    assert served_tier("batch", served_standard=True) == "batch"


@pytest.mark.parametrize(("standard", "priority", "billed"), [(5, 1, 1), (1, 5, 1), (None, 5, 5), (1, None, 1)])
def test_nobody_pays_more_for_being_served_at_the_standard_tier(standard: Any, priority: Any, billed: int) -> None:
    """What was asked for is what money is held for; what was served is what it cost the operator."""
    rates = {"standard": standard, "priority": priority}
    terms = [
        PriceTerms(book="sale", model="m", tier=tier, currency="USD", input_fresh=Decimal(rate))
        for tier, rate in rates.items()
        if rate is not None
    ]
    terms.append(PriceTerms(book="cost", model="m", upstream="u", currency="USD", input_fresh=Decimal(3)))
    versions = [Price(**msgspec.structs.asdict(each), id=new_id(), effective_at=NOW) for each in terms]
    one = Operation(call=chat_call(), model="m", tier="priority", reserved_prompt=100, reserved_output=0)
    attempt = Attempt(1, "u", "m", is_engine=False, served_standard=True)
    attempt.usage = attempt.delivered = Usage.of(100, 0, cached=0, written=0, reasoning=0)
    attempt.end("ok")
    priced = price_attempt(attempt, one, PriceBook(versions, NOW), "USD")
    assert priced.billed == Decimal(billed) / 10_000
    assert priced.cost == Decimal(3) / 10_000
    assert priced.tier == ("standard" if billed == standard else "priority")
    assert {each.id: each.tier for each in versions}[priced.price_version_id] == priced.tier
