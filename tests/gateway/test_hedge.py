"""Hedged requests: the first answer counts, the other request is called back, and the ledger has both."""

import asyncio
import time
from typing import Any

from billing.limits import set_limit
from tests.gateway.pooled import answering, hanging, pooled, said, until
from tests.gateway.scripted import Connection, Request, Script, Scripted


def after(other: Scripted) -> Script:
    """An answer that begins once the other upstream has been asked too."""

    async def script(_: Request, connection: Connection) -> None:
        await until(lambda: other.chats)
        await asyncio.sleep(0.2)
        await said(connection)

    return script


async def test_the_second_answers_when_the_first_is_slow(settings: dict[str, Any]) -> None:
    async with pooled(settings, hedge_after_seconds=0.2) as (gateway, a, _):
        a.script = hanging
        started = time.monotonic()
        answer = await gateway.chat(model="pair")
        assert answer.status_code == 200 and time.monotonic() - started < 10, "the first would never have answered"
        row = await gateway.row()
        assert [(x["number"], x["upstream"], x["status"]) for x in row["attempts"]] == [
            (1, "a", "client_closed"),
            (2, "b", "ok"),
        ]
        assert row["attempts"][0]["error"] == "another upstream answered first"
        assert row["attempts"][0]["billed"] == 0 and row["billed"] == row["attempts"][1]["billed"] > 0
        assert row["cost"] is None, "what the first computed is not known"


async def test_a_quick_first_answer_asks_nobody_else(settings: dict[str, Any]) -> None:
    async with pooled(settings, hedge_after_seconds=0.5) as (gateway, a, b):
        assert (await gateway.chat(model="pair")).status_code == 200
        assert (len(a.chats), len(b.chats)) == (1, 0)


async def test_the_first_may_still_win(settings: dict[str, Any]) -> None:
    async with pooled(settings, hedge_after_seconds=0.1) as (gateway, a, b):
        a.script, b.script = after(b), hanging
        assert (await gateway.chat(model="pair")).status_code == 200
        row = await gateway.row()
        assert [(x["upstream"], x["status"]) for x in row["attempts"]] == [("a", "ok"), ("b", "client_closed")]


async def test_a_second_that_fails_leaves_the_first_its_time(settings: dict[str, Any]) -> None:
    async with pooled(settings, hedge_after_seconds=0.1) as (gateway, a, b):
        a.script, b.script = after(b), answering(500)
        assert (await gateway.chat(model="pair")).status_code == 200
        row = await gateway.row()
        assert {x["upstream"]: x["status"] for x in row["attempts"]} == {"a": "ok", "b": "upstream_error"}


async def test_an_engine_is_called_back_and_says_what_it_computed(settings: dict[str, Any]) -> None:
    engine = {"kind": "engine", "device_price_per_hour": "3.60"}
    async with pooled(settings, a=engine, b=engine, hedge_after_seconds=0.2) as (gateway, a, _):
        a.words, a.pause = ["word "] * 50, 0.1
        assert (await gateway.chat(model="pair", max_tokens=50)).status_code == 200
        row = await gateway.row()
        assert len(a.aborted) == 1
        first, second = row["attempts"]
        assert (first["status"], second["status"], first["billed"]) == ("client_closed", "ok", 0)
        assert first["generated_tokens"] is None or first["generated_tokens"] < 50


async def test_a_caller_who_leaves_ends_both(settings: dict[str, Any]) -> None:
    ended: list[str] = []

    def watched(name: str) -> Script:
        async def script(_: Request, connection: Connection) -> None:
            await connection.left()
            ended.append(name)

        return script

    async with pooled(settings, hedge_after_seconds=0.1) as (gateway, a, b):
        a.script, b.script = watched("a"), watched("b")
        asking = asyncio.create_task(gateway.chat(model="pair"))
        await until(lambda: a.chats and b.chats)
        asking.cancel()
        row = await gateway.row()
        assert (row["status"], {x["status"] for x in row["attempts"]}) == ("client_closed", {"client_closed"})
        await until(lambda: set(ended) == {"a", "b"})


async def test_a_slower_one_does_not_count_in_the_limit_of_tokens(settings: dict[str, Any]) -> None:
    """The caller pays for one answer, and so only that one is what it used."""
    async with pooled(settings, hedge_after_seconds=0.1) as (gateway, a, _):
        a.script = hanging
        async with gateway.engine.begin() as connection:
            await set_limit(connection, "key", gateway.people.key, "tokens", 2_000)
        await gateway.heard()
        messages = [{"role": "user", "content": "x" * 1_000}]
        assert (await gateway.chat(model="pair", messages=messages, max_tokens=5)).status_code == 200
        row = await gateway.row()
        assert row["attempts"][0]["input_fresh"] > 200, "what the slower one read is only estimated"
        answer = await gateway.chat(model="pair", messages=messages, max_tokens=5)
        left = int(answer.headers["x-ratelimit-remaining-tokens"])
        prompt = 2_000 - left - 15 - 5  # 15: of the first answer
        assert 1_000 < prompt < 1_200, "held for the second: its bytes and a template"


async def test_a_second_takes_its_place_at_once(settings: dict[str, Any]) -> None:
    """Nobody else may take the last place between the choice of an upstream and the request to it."""
    running = most = 0

    async def counted(_: Request, connection: Connection) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.05)
        running -= 1
        await said(connection)

    limited = [{"upstream": "a", "weight": 10**9}, {"upstream": "b", "max_concurrent": 1}]
    async with pooled(settings, hedge_after_seconds=0.1, upstreams=limited) as (gateway, a, b):
        a.script, b.script = answering_after(0.4), counted
        answers = await asyncio.gather(*(gateway.chat(model="pair") for _ in range(20)))
        assert {answer.status_code for answer in answers} == {200}
        assert b.chats and most == 1


def answering_after(seconds: float) -> Script:
    async def script(_: Request, connection: Connection) -> None:
        await asyncio.sleep(seconds)
        await said(connection)

    return script
