"""Hard budgets: the worst case is reserved before dispatch, the exact charge settled after, and never is more spent."""

import asyncio
from decimal import Decimal
from typing import Any

import pytest
from openai import APIStatusError
from sqlalchemy import text

from billing.budgets import set_budget
from tests.gateway.pooled import until
from tests.gateway.running import CHAT, Gateway
from tests.gateway.scripted import CONTEXT, Connection, Request, Scripted

PROMPT = 10  # tokens, counted by the scripted engine; worst case 10 each, output 20 each, in millionths


async def limit(gateway: Gateway, millionths: int, scope: str = "key", **options: Any) -> None:
    scopes = {"key": gateway.people.key, "user": gateway.people.user, "org": gateway.people.org, "model": "tiny"}
    amount = Decimal(millionths) / 1_000_000
    async with gateway.engine.begin() as connection:
        kind: Any = scope
        await set_budget(connection, kind, scopes[scope], "none", amount, **({"currency": "USD"} | options))
    await gateway.heard()


async def settled(gateway: Gateway, rows: int) -> Decimal:
    """What so many rows were charged, in millionths; the leases must add up to what the windows say."""
    await gateway.rows(rows)
    async with gateway.engine.connect() as connection:
        query = text("SELECT sum(settled), sum(leased) - (SELECT sum(granted - settled) FROM lease) FROM budget_window")
        charged, difference = (await connection.execute(query)).one()
    assert not difference
    return (charged or Decimal(0)) * 1_000_000


async def test_the_exact_charge_is_settled(gateway: Gateway) -> None:
    await limit(gateway, 1000)
    assert (await gateway.chat(max_tokens=5)).status_code == 200
    assert await settled(gateway, 1) == 124
    assert (await gateway.chat(max_tokens=38)).status_code == 200  # 10 * 10 + 38 * 20 of the 876 that are left


@pytest.mark.parametrize("scope", ["key", "user", "org", "model"])
async def test_an_exhausted_budget_is_a_402_that_names_it(gateway: Gateway, upstream: Scripted, scope: str) -> None:
    await limit(gateway, 150, scope)
    answer = await gateway.chat(max_tokens=5)  # 10 * 10 + 5 * 20 = 200
    assert answer.status_code == 402
    assert answer.headers["x-should-retry"] == "false"
    error = answer.json()["error"]
    assert (error["type"], error["code"]) == ("insufficient_quota", "insufficient_quota")
    assert scope in error["message"] and "0.00015" in error["message"]
    assert not upstream.chats
    row = await gateway.row()
    assert (row["status"], row["http_status"], row["attempts"], row["billed"]) == ("refused", 402, [], 0)
    assert await settled(gateway, 1) == 0
    assert (await gateway.chat(max_tokens=2)).status_code == 200


async def test_the_sdk_does_not_retry_it(gateway: Gateway) -> None:
    await limit(gateway, 0)
    client = gateway.sdk.with_options(max_retries=3)
    with pytest.raises(APIStatusError) as caught:
        await client.chat.completions.create(**CHAT)
    assert caught.value.status_code == 402
    await gateway.rows(1)


async def test_an_open_answer_is_capped_by_what_is_left(gateway: Gateway, upstream: Scripted) -> None:
    await limit(gateway, 310)
    assert (await gateway.chat()).status_code == 200
    assert upstream.chats[0].body["max_tokens"] == 10  # (310 - 10 * 10) // 20


async def test_an_open_answer_is_not_capped_when_the_context_is_the_tighter_bound(
    gateway: Gateway, upstream: Scripted
) -> None:
    await limit(gateway, 100 + 20 * (CONTEXT - PROMPT))
    assert (await gateway.chat()).status_code == 200
    assert "max_tokens" not in upstream.chats[0].body


async def test_a_billion_tokens_reserve_no_more_than_the_context_has_room_for(
    gateway: Gateway, upstream: Scripted
) -> None:
    await limit(gateway, 100 + 20 * (CONTEXT - PROMPT))
    assert (await gateway.chat(max_tokens=10**9)).status_code == 200
    assert upstream.chats[0].body["max_tokens"] == 10**9


async def test_many_at_once_never_overspend(gateway: Gateway, upstream: Scripted) -> None:
    upstream.pause = 0.02
    await limit(gateway, 1000)
    answers = await asyncio.gather(*(gateway.chat(max_tokens=5) for _ in range(20)))
    served = sum(answer.status_code == 200 for answer in answers)
    assert {answer.status_code for answer in answers} == {200, 402}
    assert 5 <= served <= 8
    assert await settled(gateway, 20) == 124 * served


async def test_an_unpriced_model_is_refused(gateway: Gateway, upstream: Scripted) -> None:
    await limit(gateway, 10**9)
    answer = await gateway.chat(model="gratis")
    assert answer.status_code == 402
    assert answer.json()["error"]["code"] == "unpriced_model"
    assert not upstream.chats
    assert (await gateway.row())["status"] == "refused"


@pytest.mark.parametrize("model", ["tiny", "gratis"])
async def test_a_budget_in_another_currency_refuses_and_says_so(
    gateway: Gateway, upstream: Scripted, model: str
) -> None:
    await limit(gateway, 10**9, currency="EUR")
    answer = await gateway.chat(model=model)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (402, "budget_currency")
    assert "the key's budget of 1000 EUR cannot pay for calls that are charged in USD" in error["message"]
    assert not upstream.chats
    assert (await gateway.row())["status"] == "refused"


async def test_a_soft_budget_refuses_nothing(gateway: Gateway, upstream: Scripted) -> None:
    await limit(gateway, 0, hard=False)
    assert (await gateway.chat()).status_code == 200
    assert not [request for request in upstream.requests if request.path == "/tokenize"]


async def test_what_the_tokenizer_refuses_passes_through(gateway: Gateway, upstream: Scripted) -> None:
    await limit(gateway, 10**6)

    async def refuse(request: Request, connection: Connection) -> None:
        status = 400 if request.path == "/tokenize" else 404
        await connection.json({"error": {"message": "unknown role"}}, status)

    upstream._answer = refuse  # type: ignore[method-assign]
    answer = await gateway.chat()
    assert (answer.status_code, answer.json()["error"]["message"]) == (400, "unknown role")
    assert await settled(gateway, 1) == 0


async def test_a_hosted_upstream_is_bounded_by_bytes(gateway: Gateway, upstream: Scripted) -> None:
    """No byte-level tokenizer makes more tokens than bytes: 36 bytes of messages and 64 for the template."""
    messages = b'[{"role":"user","content":"hi"}]'
    bound = (len(messages) + 64) * 10 + 20
    body = b'{"model":"hosted","max_tokens":1,"messages":' + messages + b"}"
    await limit(gateway, bound - 1)
    assert (await gateway.send(body)).status_code == 402
    await limit(gateway, bound)
    assert (await gateway.send(body)).status_code == 200
    picture = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "https://x/y.png"}}]}]
    answer = await gateway.chat(model="hosted", messages=picture)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "unbounded_prompt")


async def test_several_choices_are_reserved_together(gateway: Gateway) -> None:
    await limit(gateway, 100 + 20 * 5 * 3 - 1)
    assert (await gateway.chat(max_tokens=5, n=3)).status_code == 402
    assert (await gateway.chat(max_tokens=5, n=2)).status_code == 200


async def test_a_caller_that_leaves_settles_what_it_was_sent(gateway: Gateway, upstream: Scripted) -> None:
    upstream.words, upstream.pause = ["a"] * 100, 0.05
    await limit(gateway, 10_000)
    async with gateway.raw_chat(stream=True, max_tokens=100):
        await until(lambda: upstream.chats)
        await asyncio.sleep(0.2)
    row = await gateway.row()
    assert row["status"] == "client_closed"
    assert await settled(gateway, 1) == row["billed"] * 1_000_000


@pytest.mark.parametrize("model", ["tiny", "hosted"])
async def test_a_limit_of_any_size_is_judged(gateway: Gateway, model: str) -> None:
    await limit(gateway, 10_000)
    answer = await gateway.chat(model=model, max_tokens=int("7" * 1000))
    assert answer.status_code == 402
    assert await settled(gateway, 1) == 0
