"""What a call can be charged at most is held before it is sent, whatever words its limit and its prompt come in."""

from typing import Any

import pytest

from tests.gateway.running import Gateway, running_gateway
from tests.gateway.scripted import Request, Scripted
from tests.gateway.test_budgets import limit

MESSAGES = [{"role": "user", "content": "hi"}]
HUGE = 10**6


def posts(upstream: Scripted) -> list[Request]:
    return [request for request in upstream.requests if request.method == "POST"]


async def refused(gateway: Gateway, path: str, **fields: Any) -> None:
    """Asked for with a budget that pays for little."""
    body = {"model": "hosted"} | fields
    answer = await gateway.http.post(path, json=body)
    assert (answer.status_code, answer.json()["error"].get("code", "")) == (402, "insufficient_quota"), answer.text


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/chat/completions", {"messages": MESSAGES, "max_completion_tokens": 1, "max_tokens": HUGE}),
        ("/v1/chat/completions", {"messages": MESSAGES, "max_completion_tokens": HUGE, "max_tokens": 1}),
        ("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 1, "n_predict": HUGE}),
        ("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 100, "best_of": 1000}),
        ("/v1/responses", {"input": "hi", "max_output_tokens": 1, "max_completion_tokens": HUGE}),
        ("/v1/responses", {"input": "hi", "max_output_tokens": 100, "n": 1000}),
    ],
)
async def test_of_two_limits_the_larger_is_held(
    gateway: Gateway, upstream: Scripted, path: str, fields: dict[str, Any]
) -> None:
    await limit(gateway, 10_000)
    await refused(gateway, path, **fields)
    assert not posts(upstream)


@pytest.mark.parametrize("fields", [{"max_completion_tokens": HUGE}, {"n": 1000}])
async def test_anthropics_body_has_no_second_limit(
    gateway: Gateway, upstream: Scripted, fields: dict[str, Any]
) -> None:
    await limit(gateway, 10_000)
    body = {"model": "hosted", "messages": MESSAGES, "max_tokens": 100} | fields
    answer = await gateway.http.post("/v1/messages", json=body)
    assert answer.status_code == 402, answer.text
    assert not posts(upstream)


@pytest.mark.parametrize("fields", [{"max_tokens": -1}, {"max_tokens": 5, "n_predict": -2}])
async def test_a_limit_below_0_is_none_for_some_upstreams(
    gateway: Gateway, upstream: Scripted, fields: dict[str, Any]
) -> None:
    await limit(gateway, 10_000)
    answer = await gateway.chat(model="hosted", **fields)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "max_tokens"), answer.text
    assert not posts(upstream)


async def test_for_ollama_0_is_no_limit(settings: dict[str, Any], upstream: Scripted) -> None:
    settings["upstreams"]["hosted"]["kind"] = "ollama"
    async with running_gateway(settings) as gateway:
        answer = await gateway.chat(model="hosted", max_completion_tokens=0)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "max_tokens"), answer.text
        assert not posts(upstream)


@pytest.mark.parametrize(
    "fields",
    [
        {"functions": [{"name": "f", "description": "x" * 2000}]},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": {"title": "x" * 2000}}}},
        {"documents": [{"title": "t", "text": "x" * 2000}]},
    ],
)
async def test_whatever_may_be_part_of_the_prompt_is_held(
    gateway: Gateway, upstream: Scripted, fields: dict[str, Any]
) -> None:
    await limit(gateway, 10_000)
    await refused(gateway, "/v1/chat/completions", messages=MESSAGES, max_tokens=1, **fields)
    assert not posts(upstream)


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/embeddings", {"input": ["x" * 100] * 20}),
        ("/v1/completions", {"prompt": ["x" * 100] * 20, "max_tokens": 1}),
    ],
)
async def test_each_text_of_a_list_may_fill_the_context(
    settings: dict[str, Any], upstream: Scripted, path: str, fields: dict[str, Any]
) -> None:
    settings["models"]["hosted"]["context"] = 50
    async with running_gateway(settings) as gateway:
        await limit(gateway, 9_999)  # 20 * 50 tokens at 10
        await refused(gateway, path, **fields)
        assert not posts(upstream)
