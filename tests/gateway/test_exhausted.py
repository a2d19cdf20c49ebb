"""Whatever the wire format and whoever pays: refused once exhausted, in one shape, and asked for once."""

import asyncio
import time
from collections.abc import AsyncIterator
from decimal import Decimal
from typing import Any

import httpx
import pytest
from anthropic import AsyncAnthropic
from openai import APIStatusError, AsyncOpenAI, RateLimitError

from billing.budgets import set_budget
from billing.limits import set_limit
from billing.people import restrict_key
from billing.restrictions import Restrictions
from tests.gateway.pooled import until
from tests.gateway.running import CHAT, Gateway
from tests.gateway.scripted import Scripted

SCOPES = ("org", "team", "user", "key", "model", "tag of the key", "tag in a header", "user in the body")
TAGS = {"tag of the key": "scenario=chat", "tag in a header": "feature=search", "user in the body": "user=eve"}

_TURN = [{"role": "user", "content": "hi"}]
ROUTES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": _TURN, "max_tokens": 5, "user": "eve"},
    "/v1/completions": {"prompt": "hi", "max_tokens": 5, "user": "eve"},
    "/v1/embeddings": {"input": "hi", "user": "eve"},
    "/v1/responses": {"input": "hi", "max_output_tokens": 16, "user": "eve"},
    "/v1/messages": {"messages": _TURN, "max_tokens": 5, "metadata": {"user_id": "eve"}},
}


@pytest.fixture
async def tagged(gateway: Gateway) -> AsyncIterator[Gateway]:
    """A gateway whose key has a tag and lets its callers choose more."""
    async with gateway.engine.begin() as connection:
        allowed = Restrictions(tags={"scenario": "chat"}, may_attribute=True)
        await restrict_key(connection, gateway.people.key, allowed)
    await gateway.heard()
    yield gateway


def scope(gateway: Gateway, name: str) -> tuple[Any, str]:
    """(kind, id)"""
    if name in TAGS:
        return "tag", TAGS[name]
    return name, "tiny" if name == "model" else str(getattr(gateway.people, name))


async def ask(gateway: Gateway, route: str, **changes: Any) -> httpx.Response:
    body = {"model": "tiny", **ROUTES[route], **changes}
    return await gateway.http.post(route, json=body, headers={"x-farthing-tags": "feature=search"})


def error(answer: httpx.Response) -> dict[str, Any]:
    found: dict[str, Any] = answer.json()["error"]
    return found


@pytest.mark.parametrize("name", SCOPES)
async def test_every_route_by_every_way_of_attribution(tagged: Gateway, upstream: Scripted, name: str) -> None:
    for route in ROUTES:
        assert (await ask(tagged, route)).status_code not in (402, 429), "so it is the budget that refuses below"
    kind, identifier = scope(tagged, name)
    async with tagged.engine.begin() as connection:
        await set_budget(connection, kind, identifier, "none", Decimal("0.00001"), currency="USD")
    await tagged.heard()
    asked = len(upstream.requests)
    for route in ROUTES:
        for stream in (False, True) if route != "/v1/embeddings" else (False,):
            answer = await ask(tagged, route, **({"stream": True} if stream else {}))
            assert answer.status_code == 402, (route, stream, answer.text)
            assert answer.headers["x-should-retry"] == "false" and "retry-after" not in answer.headers
            assert f"the {kind}'s budget of 0.00001 USD" in error(answer)["message"]
            assert (kind not in ("tag", "model")) or f"({kind} {identifier})" in error(answer)["message"]
            expected = "billing_error" if route == "/v1/messages" else "insufficient_quota"
            assert error(answer)["type"] == expected
    assert not [request for request in upstream.requests[asked:] if request.path != "/tokenize"]
    rows = await tagged.rows(len(ROUTES) + 2 * len(ROUTES) - 1)
    refused = [row for row in rows if row["status"] == "refused"]
    assert len(refused) == 2 * len(ROUTES) - 1
    assert {(row["http_status"], row["billed"], len(row["attempts"])) for row in refused} == {(402, 0, 0)}
    assert {row["api"] for row in refused} == {
        "chat.completions",
        "completions",
        "embeddings",
        "responses",
        "messages",
    }


@pytest.mark.parametrize("name", ["key", "tag in a header", "model"])
async def test_a_limit_refuses_on_every_route(tagged: Gateway, upstream: Scripted, name: str) -> None:
    kind, identifier = scope(tagged, name)
    async with tagged.engine.begin() as connection:
        await set_limit(connection, kind, identifier, "requests", 1)
    await tagged.heard()
    assert (await ask(tagged, "/v1/chat/completions")).status_code == 200
    asked = len(upstream.chats)
    for route in ROUTES:
        answer = await ask(tagged, route)
        assert answer.status_code == 429, (route, answer.text)
        assert 1 <= int(answer.headers["retry-after"]) <= 60 and "x-should-retry" not in answer.headers
        message = error(answer)["message"]
        assert f"the {kind}'s limit of 1 requests a minute" in message and "Try again in" in message
        assert error(answer)["type"] == ("rate_limit_error" if route == "/v1/messages" else "requests")
    assert len(upstream.chats) == asked


async def test_counting_tokens_costs_nothing_and_counts_in_limits(tagged: Gateway, upstream: Scripted) -> None:
    """It is passed on to upstreams too: without limits it would be a way round them."""
    counting = {"model": "tiny", "messages": _TURN}
    async with tagged.engine.begin() as connection:
        await set_budget(connection, "key", tagged.people.key, "none", Decimal(0), currency="USD")
        await set_limit(connection, "org", tagged.people.org, "requests", 2)
    await tagged.heard()
    for status in (200, 200, 429):
        answer = await tagged.http.post("/v1/messages/count_tokens", json=counting)
        assert answer.status_code == status, answer.text
    assert "the org's limit of 2 requests a minute" in error(answer)["message"]
    assert sum(request.path == "/tokenize" for request in upstream.requests) == 2
    rows = await tagged.rows(3)
    assert [(row["status"], row["billed"]) for row in rows] == [("ok", 0), ("ok", 0), ("refused", 0)]


async def test_a_call_that_can_never_fit_is_not_told_to_wait(tagged: Gateway) -> None:
    async with tagged.engine.begin() as connection:
        await set_limit(connection, "key", tagged.people.key, "tokens", 12)
    await tagged.heard()
    answer = await ask(tagged, "/v1/chat/completions")  # 10 of the prompt and 5 to come
    assert (answer.status_code, error(answer)["type"]) == (429, "tokens")
    assert error(answer)["code"] == "rate_limit_exceeded" and "Waiting does not help" in error(answer)["message"]
    assert answer.headers["x-should-retry"] == "false" and "retry-after" not in answer.headers


async def test_the_sdk_asks_once_where_money_has_run_out(tagged: Gateway) -> None:
    async with tagged.engine.begin() as connection:
        await set_budget(connection, "key", tagged.people.key, "none", Decimal("0.00001"), currency="USD")
    await tagged.heard()
    client = AsyncOpenAI(base_url=f"{tagged.url}/v1", api_key=tagged.people.secret)
    with pytest.raises(APIStatusError) as refused:
        await client.chat.completions.create(**CHAT)
    assert (refused.value.status_code, refused.value.code) == (402, "insufficient_quota")
    await tagged.row()


async def test_the_sdk_asks_once_where_waiting_does_not_help(tagged: Gateway) -> None:
    async with tagged.engine.begin() as connection:
        await set_limit(connection, "key", tagged.people.key, "requests", 0)
    await tagged.heard()
    client = AsyncOpenAI(base_url=f"{tagged.url}/v1", api_key=tagged.people.secret)
    with pytest.raises(RateLimitError) as limited:
        await client.chat.completions.create(**CHAT)
    assert limited.value.code == "rate_limit_exceeded"
    await tagged.row()


@pytest.mark.parametrize("vendor", ["openai", "anthropic"])
async def test_the_sdks_come_back_when_a_limit_says_so(tagged: Gateway, upstream: Scripted, vendor: str) -> None:
    """After as many seconds as Retry-After tells, and then they are served."""
    async with tagged.engine.begin() as connection:
        await set_limit(connection, "key", tagged.people.key, "concurrent", 1)
    await tagged.heard()
    upstream.words, upstream.pause = ["a"] * 4, 0.15
    first = asyncio.create_task(ask(tagged, "/v1/chat/completions"))
    await until(lambda: upstream.chats)
    began = time.monotonic()
    if vendor == "openai":
        client = AsyncOpenAI(base_url=f"{tagged.url}/v1", api_key=tagged.people.secret)
        await client.chat.completions.create(**CHAT)
    else:
        async with AsyncAnthropic(base_url=tagged.url, api_key=tagged.people.secret) as anthropic:
            await anthropic.messages.create(model="tiny", max_tokens=5, messages=[{"role": "user", "content": "hi"}])
    assert time.monotonic() - began >= 1.0, "it waited"
    assert (await first).status_code == 200
    rows = await tagged.rows(3)
    assert sorted((row["status"], row["http_status"]) for row in rows) == [("ok", 200), ("ok", 200), ("refused", 429)]
