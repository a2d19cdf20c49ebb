"""What an upstream counts above what was reserved or allowed costs the operator, and not the caller."""

from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from billing.charge import charge, worst_case
from billing.ids import new_id
from billing.prices import Price
from billing.records import TOKEN_CLASSES
from gateway.operation import Attempt, Operation
from gateway.settlement import chargeable
from gateway.upstreams.usage import Usage
from tests.gateway.running import Gateway
from tests.gateway.samples import chat_call
from tests.gateway.scripted import Scripted
from tests.gateway.test_budgets import limit, settled
from tests.gateway.test_hostile_upstreams import saying


@pytest.fixture(params=[False, True], ids=["whole", "stream"])
def stream(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


async def test_what_is_reported_above_the_reservation_is_not_charged(
    gateway: Gateway, upstream: Scripted, stream: bool
) -> None:
    await limit(gateway, 10_000)
    upstream.script = saying(usage={"prompt_tokens": 12, "completion_tokens": 400, "total_tokens": 412})
    assert (await gateway.chat(model="hosted", stream=stream, max_tokens=5)).status_code == 200
    (attempt,) = (await gateway.row())["attempts"]
    assert (attempt["input_fresh"], attempt["output_text"]) == (12, 5)
    assert attempt["usage_flag"] == "of 400 output tokens 5 were allowed: the rest is not charged"
    assert attempt["cost"] * 1_000_000 == 12 * 10 + 400 * 20
    assert await settled(gateway, 1) == 12 * 10 + 5 * 20


async def test_a_caller_s_own_limit_is_what_it_pays_at_most(gateway: Gateway, upstream: Scripted, stream: bool) -> None:
    details = {"completion_tokens_details": {"reasoning_tokens": 20}}
    upstream.script = saying(usage={"prompt_tokens": 12, "completion_tokens": 400} | details)
    assert (await gateway.chat(model="hosted", stream=stream, max_tokens=15, n=2)).status_code == 200
    (attempt,) = (await gateway.row())["attempts"]
    assert (attempt["output_reasoning"], attempt["output_text"]) == (20, 10)


@settings(deadline=None)
@given(
    prompt=st.integers(0, 10**6),
    completion=st.integers(0, 10**6),
    parts=st.tuples(*[st.integers(0, 10**6)] * 3),
    delivered=st.integers(0, 10**6),
    status=st.sampled_from(["ok", "upstream_error", "client_closed"]),
    reserved=st.tuples(st.integers(0, 5000), st.integers(0, 5000)),
)
def test_never_more_is_billed_than_was_held(
    prompt: int, completion: int, parts: tuple[int, int, int], delivered: int, status: Any, reserved: tuple[int, int]
) -> None:
    rates: Any = {name: Decimal(place + 1) for place, name in enumerate(TOKEN_CLASSES)}
    sale = Price(
        book="sale",
        model="m",
        currency="USD",
        id=new_id(),
        effective_at=datetime.now(UTC),
        **rates,
    )
    operation = Operation(call=chat_call(), model="m", reserved_prompt=reserved[0], reserved_output=reserved[1])
    attempt = Attempt(1, "u", "m", is_engine=False, delivered_characters=delivered, unreported_characters=delivered)
    attempt.usage = attempt.delivered = Usage.of(
        prompt, completion, cached=parts[0], written=parts[1], reasoning=parts[2]
    )
    attempt.end(status)
    tokens, _, _ = chargeable(attempt, operation)
    charged = charge(sale, tokens)
    most = worst_case(sale, *reserved)
    assert charged is not None and most is not None and charged <= most
