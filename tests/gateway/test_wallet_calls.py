"""Wallets through the whole gateway: one shape of a 402 on every route, and the balance pays for what was answered."""

import asyncio
from decimal import Decimal
from typing import Any
from uuid import UUID

import pytest

from billing import wallets
from billing.budgets import set_budget
from tests.gateway.running import Gateway
from tests.gateway.scripted import Scripted
from tests.gateway.test_exhausted import ROUTES, error

MILLIONTH = Decimal("0.000001")


@pytest.fixture
def settings(settings: dict[str, Any]) -> dict[str, Any]:
    free = {"input_fresh": "0", "input_cached": "0", "output_text": "0"}
    settings["models"]["free"] = {"upstreams": ["engine"], "price": free}
    return settings


async def wallet(gateway: Gateway, millionths: int, kind: Any = "team", **terms: Any) -> UUID:
    async with gateway.engine.begin() as connection:
        found = await wallets.create_wallet(connection, kind, getattr(gateway.people, kind), currency="USD", **terms)
        if millionths:
            await wallets.top_up(connection, found, millionths * MILLIONTH)
    await gateway.heard()
    return found


async def test_an_empty_wallet_is_one_402_on_every_route(gateway: Gateway, upstream: Scripted) -> None:
    await wallet(gateway, 10)
    for route in ROUTES:
        answer = await gateway.http.post(route, json={"model": "tiny", **ROUTES[route]})
        assert answer.status_code == 402, (route, answer.text)
        assert answer.headers["x-should-retry"] == "false"
        assert (
            "the team's wallet in USD has 0.00001 left. Lower max_tokens, or ask your operator to top it up"
            in error(answer)["message"]
        )
        assert error(answer)["type"] == ("billing_error" if route == "/v1/messages" else "insufficient_quota")
    assert not [request for request in upstream.requests if request.raw and request.path != "/tokenize"]


async def test_a_free_model_needs_no_money_and_an_unpriced_one_is_refused(gateway: Gateway) -> None:
    await wallet(gateway, 0)
    async with gateway.engine.begin() as connection:
        await set_budget(connection, "org", gateway.people.org, "none", Decimal(0), currency="USD")
    await gateway.heard()
    assert (await gateway.chat(model="free")).status_code == 200
    assert (await gateway.row())["billed"] == 0
    answer = await gateway.chat(model="gratis")  # has no price at all
    assert (answer.status_code, error(answer)["code"]) == (402, "unpriced_model")


async def test_the_balance_pays_for_what_was_answered(gateway: Gateway) -> None:
    purse = await wallet(gateway, 1000)
    answers = await asyncio.gather(*(gateway.chat(max_tokens=5) for _ in range(20)))
    served = sum(answer.status_code == 200 for answer in answers)
    assert {answer.status_code for answer in answers} == {200, 402} and served >= 5
    rows = await gateway.rows(20)
    billed = sum(row["billed"] for row in rows)
    async with gateway.engine.connect() as connection:
        found = await wallets.get_wallet(connection, purse)
        entries = await wallets.list_entries(connection, purse)
    assert found is not None and found.balance == 1000 * MILLIONTH - billed >= 0
    assert -sum(entry.amount for entry in entries if entry.kind == "capture") == billed


async def test_a_wallet_of_a_team_for_one_model(gateway: Gateway) -> None:
    await wallet(gateway, 0, also={"model": "tiny"})
    answer = await gateway.chat(model="tiny", max_tokens=5)
    assert answer.status_code == 402
    assert "the team's and model's wallet in USD has 0 left (model tiny)." in error(answer)["message"]
    assert (await gateway.chat(model="big", max_tokens=5)).status_code == 200


# The most output a route asks its upstream for when the caller says nothing; a message has to say it.
OPEN: dict[str, tuple[str, ...]] = {
    "/v1/chat/completions": ("max_tokens", "max_completion_tokens"),
    "/v1/completions": ("max_tokens", "max_completion_tokens"),
    "/v1/responses": ("max_tokens", "max_completion_tokens", "max_output_tokens"),
}


@pytest.mark.parametrize("route", OPEN)
@pytest.mark.parametrize("prepaid", [False, True])
async def test_an_open_answer_is_capped_by_what_is_left(
    gateway: Gateway, upstream: Scripted, route: str, prepaid: bool
) -> None:
    if prepaid:
        await wallet(gateway, 310)
    else:
        async with gateway.engine.begin() as connection:
            await set_budget(connection, "team", gateway.people.team, "none", 310 * MILLIONTH, currency="USD")
        await gateway.heard()
    body = {name: value for name, value in ROUTES[route].items() if name not in ("max_tokens", "max_output_tokens")}
    answer = await gateway.http.post(route, json={"model": "tiny", **body})
    assert answer.status_code in (200, 404), answer.text  # the scripted upstream has no /v1/completions
    (sent,) = [request.body for request in upstream.requests if request.raw and request.path != "/tokenize"]
    assert [sent[name] for name in OPEN[route] if name in sent] == [10]  # (310 - 10 * 10) // 20
