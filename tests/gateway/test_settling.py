"""What a call is charged, and that what it held ends, when something changes or breaks in the middle of it."""

import asyncio
from decimal import Decimal
from typing import Any

import pytest
from sqlalchemy import delete

from billing import spool
from billing.limits import set_limit
from billing.prices import PriceTerms, seed
from billing.records import TOKEN_CLASSES
from billing.tables import budget
from gateway import prices
from tests.gateway.pooled import hanging, pooled, until
from tests.gateway.running import Gateway, running_gateway
from tests.gateway.scripted import Connection, Request, Scripted
from tests.gateway.test_budgets import limit, settled


async def test_a_caller_who_leaves_two_hedged_requests_pays_for_one(settings: dict[str, Any]) -> None:
    async with pooled(settings, hedge_after_seconds=0.1) as (gateway, a, b):
        a.script = b.script = hanging
        messages = [{"role": "user", "content": "x" * 400}]
        asking = asyncio.create_task(gateway.chat(model="pair", messages=messages))
        await until(lambda: a.chats and b.chats)
        asking.cancel()
        row = await gateway.row()
        first, second = (attempt["billed"] for attempt in row["attempts"])
        assert first == 0 < second == row["billed"]


async def test_a_price_that_rises_meanwhile_is_for_the_next_call(
    settings: dict[str, Any], upstream: Scripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a call would be charged more than was held for it."""
    monkeypatch.setattr(prices, "RELOAD_SECONDS", 0.1)
    upstream.words, upstream.pause = ["a"] * 10, 0.1
    async with running_gateway(settings) as gateway:
        await limit(gateway, 300)
        asking = asyncio.create_task(gateway.chat(max_tokens=10))
        await until(lambda: upstream.chats)
        dear = dict.fromkeys(TOKEN_CLASSES, Decimal(10_000))
        async with gateway.engine.begin() as connection:
            await seed(connection, [PriceTerms(book="sale", model="tiny", currency="USD", **dear)])
        assert (await asking).status_code == 200
        assert await settled(gateway, 1) == 6 * 10 + 4 * 1 + 10 * 20


async def test_a_row_that_cannot_be_written_holds_nothing(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    async with gateway.engine.begin() as connection:
        await set_limit(connection, "key", gateway.people.key, "concurrent", 1)
    await gateway.heard()

    def broken(_: object) -> bytes:
        raise RuntimeError("whatever it is")

    with monkeypatch.context() as patched:
        patched.setattr(spool, "written", broken)
        assert (await gateway.chat()).status_code == 503
    assert (await gateway.chat()).status_code == 200


async def test_a_budget_that_goes_meanwhile_costs_no_row(gateway: Gateway, upstream: Scripted) -> None:
    await limit(gateway, 10_000)
    upstream.pause = 0.1
    asking = asyncio.create_task(gateway.chat(max_tokens=10))
    await until(lambda: upstream.chats)
    async with gateway.engine.begin() as connection:
        await connection.execute(delete(budget))
        assert (await asking).status_code == 200
        await asyncio.sleep(0.5)  # the ledger waits for this transaction, with the one row that it has
    assert (await gateway.row())["status"] == "ok"


@pytest.mark.parametrize(
    ("usage", "flag"),
    [
        ({"prompt_tokens": 9, "completion_tokens": 1}, None),
        (
            {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0},
            "usage has no tokens, and there is an answer",
        ),
    ],
)
async def test_usage_from_before_the_answer_is_not_believed(
    gateway: Gateway, upstream: Scripted, usage: dict[str, int], flag: str | None
) -> None:
    async def script(_: Request, connection: Connection) -> None:
        await connection.start()
        await connection.frame({"choices": [{"index": 0, "delta": {"content": ""}}], "usage": usage})
        await connection.frame({"choices": [{"index": 0, "delta": {"content": "word" * 100}}]})
        await connection.frame({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
        await connection.done()

    upstream.script = script
    assert (await gateway.chat(model="hosted", stream=True)).status_code == 200
    (attempt,) = (await gateway.row())["attempts"]
    assert (attempt["output_text"], attempt["usage_source"], attempt["usage_flag"]) == (100, "estimated", flag)


async def test_a_whole_answer_without_tokens_is_estimated(gateway: Gateway, upstream: Scripted) -> None:
    async def script(_: Request, connection: Connection) -> None:
        choice = {"index": 0, "message": {"content": "word" * 100}, "finish_reason": "stop"}
        nothing = {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}
        await connection.json({"choices": [choice], "usage": nothing})

    upstream.script = script
    assert (await gateway.chat(model="hosted")).status_code == 200
    (attempt,) = (await gateway.row())["attempts"]
    assert (attempt["output_text"], attempt["usage_source"]) == (100, "estimated")
