"""Hedged requests: the first answer counts, the other request is called back, and the ledger has both."""

import asyncio
import time
from typing import Any

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
        assert answer.status_code == 200 and time.monotonic() - started < 1.0
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
