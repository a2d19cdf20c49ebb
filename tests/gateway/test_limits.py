"""Rate limits through the whole gateway: one shape of a 429, OpenAI's headers, and what was reserved is corrected."""

import asyncio
import re
from typing import Any

import httpx
import pytest

from billing.limits import set_limit
from tests.gateway.running import Gateway
from tests.gateway.scripted import Scripted

PROMPT = 10  # tokens, counted by the scripted engine


async def limit(gateway: Gateway, amount: int, kind: Any, scope: str = "key") -> None:
    scopes = {"key": gateway.people.key, "user": gateway.people.user, "org": gateway.people.org, "model": "tiny"}
    async with gateway.engine.begin() as connection:
        where: Any = scope
        await set_limit(connection, where, scopes[scope], kind, amount)
    await gateway.heard()


def rate_headers(answer: httpx.Response) -> dict[str, str]:
    """What the answer tells of limits, by the rest of the headers' names; when they reset is checked here."""
    found = {name[12:]: value for name, value in answer.headers.items() if name.startswith("x-ratelimit-")}
    for kind in {name.partition("-")[2] for name in found}:
        reset = found.pop(f"reset-{kind}")
        assert re.fullmatch(r"\d+\.\d{3}s", reset) and 0 <= float(reset[:-1]) <= 60, reset
    return found


@pytest.mark.parametrize("scope", ["key", "user", "org", "model"])
async def test_a_request_too_many_is_a_429_that_names_its_limit(
    gateway: Gateway, upstream: Scripted, scope: str
) -> None:
    await limit(gateway, 1, "requests", scope)
    first = await gateway.chat(max_tokens=5)
    assert first.status_code == 200
    assert rate_headers(first) == {"limit-requests": "1", "remaining-requests": "0"}
    second = await gateway.chat(max_tokens=5)
    assert second.status_code == 429
    assert 1 <= int(second.headers["retry-after"]) <= 60
    assert rate_headers(second) == {"limit-requests": "1", "remaining-requests": "0"}
    error = second.json()["error"]
    assert error["code"] == "rate_limit_exceeded"
    assert f"the {scope}'s limit of 1 requests a minute is reached" in error["message"]
    assert len(upstream.chats) == 1
    rows = await gateway.rows(2)
    assert sorted(row["status"] for row in rows) == ["ok", "refused"]


async def test_tokens_are_reserved_at_admission_and_corrected_at_settlement(gateway: Gateway) -> None:
    await limit(gateway, 200, "tokens")
    first = await gateway.chat(max_tokens=190)
    assert first.status_code == 200, first.text
    assert rate_headers(first) == {"limit-tokens": "200", "remaining-tokens": "0"}
    used = sum(first.json()["usage"][name] for name in ("prompt_tokens", "completion_tokens"))
    second = await gateway.chat(max_tokens=180 - used)
    assert second.status_code == 200
    assert rate_headers(second) == {"limit-tokens": "200", "remaining-tokens": "10"}
    left = 200 - 2 * used
    later = await gateway.chat(max_tokens=left - PROMPT + 1)
    assert later.status_code == 429 and 1 <= int(later.headers["retry-after"]) <= 60
    assert rate_headers(later) == {"limit-tokens": "200", "remaining-tokens": str(left)}
    too_much = await gateway.chat(max_tokens=191)
    assert too_much.status_code == 429 and too_much.headers["x-should-retry"] == "false"
    assert rate_headers(too_much) == {"limit-tokens": "200", "remaining-tokens": str(left)}


async def test_an_open_answer_is_capped_by_what_is_left_of_the_tokens(gateway: Gateway, upstream: Scripted) -> None:
    await limit(gateway, PROMPT + 7, "tokens")
    assert (await gateway.chat()).status_code == 200
    assert upstream.chats[0].body["max_tokens"] == 7


async def test_calls_at_the_same_time(gateway: Gateway, upstream: Scripted) -> None:
    upstream.pause = 0.1
    await limit(gateway, 2, "concurrent")
    answers = await asyncio.gather(*(gateway.chat(max_tokens=5) for _ in range(6)))
    assert sorted(answer.status_code for answer in answers) == [200, 200, 429, 429, 429, 429]
    assert [rate_headers(answer) for answer in answers] == [{}] * 6, "there is no minute to tell of"
    assert (await gateway.chat(max_tokens=5)).status_code == 200
