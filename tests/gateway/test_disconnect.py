"""A caller that goes away, at each stage: exactly one row, with the tokens it was sent and the cost they really had."""

import asyncio
import json
from decimal import Decimal
from typing import Any

import pytest

from gateway.upstreams.characters import characters
from tests.gateway.batching import eventually
from tests.gateway.pooled import until
from tests.gateway.running import CHAT, Gateway, running_gateway
from tests.gateway.scripted import Connection, Request, Scripted, frame


async def read_frames(reader: asyncio.StreamReader, count: int) -> None:
    """Read until so many content frames have come."""
    seen = 0
    while seen < count:
        line = await asyncio.wait_for(reader.readline(), 5)
        assert line, "the stream ended too early"
        if line.startswith(b"data: {") and json.loads(line[6:])["choices"][0]["delta"].get("content"):
            seen += 1


async def test_while_the_body_is_read(gateway: Gateway, upstream: Scripted) -> None:
    async def in_flight() -> bool:
        return "farthing_requests_in_flight 1.0" in (await gateway.http.get("/metrics")).text

    async with gateway.socket("POST /v1/chat/completions HTTP/1.1\r\ncontent-length: 1000", b'{"model":'):
        await eventually(in_flight)
    row = await gateway.row()
    assert (row["status"], row["http_status"], row["attempts"]) == ("client_closed", 499, [])
    assert row["billed"] == 0
    assert not upstream.chats


async def test_in_the_middle_of_a_stream(gateway: Gateway, upstream: Scripted) -> None:
    upstream.words = [f"w{n} " for n in range(100)]
    upstream.pause = 0.05
    async with gateway.raw_chat(stream=True) as (reader, _):
        await read_frames(reader, 3)
    row = await gateway.row()
    assert len(upstream.aborted) == 1
    (attempt,) = row["attempts"]
    assert (row["status"], attempt["status"], row["finish_reason"]) == ("client_closed", "client_closed", "abort")
    sent = attempt["output_text"]
    assert 3 <= sent < 20
    assert (attempt["input_fresh"], attempt["input_cached"], attempt["usage_source"]) == (6, 4, "engine")
    assert sent <= attempt["generated_tokens"] < 30
    assert row["billed"] == (Decimal(64) + 20 * sent) / 1_000_000
    assert row["cost"] == (2 + Decimal(attempt["decode_device_seconds"])) / 1000  # 3.60 an hour


async def test_in_the_middle_of_a_stream_whose_engine_forgot_it(gateway: Gateway, upstream: Scripted) -> None:
    """No abort, no account: the last usage on the stream counts, and the cost is unknown."""
    upstream.words = [f"w{n} " for n in range(1000)]
    upstream.pause = 0.05
    upstream.abortable = False
    async with gateway.raw_chat(stream=True) as (reader, _):
        await read_frames(reader, 3)
    (attempt,) = (await gateway.row())["attempts"]
    assert (attempt["status"], attempt["usage_source"], attempt["cost"]) == ("client_closed", "engine", None)
    assert 3 <= attempt["output_text"] < 20


async def test_while_a_whole_answer_is_computed(gateway: Gateway, upstream: Scripted) -> None:
    upstream.words = ["a"] * 1000
    upstream.pause = 0.05
    async with gateway.raw_chat():
        await until(lambda: upstream.chats)
        await asyncio.sleep(0.2)
    row = await gateway.row()
    (attempt,) = row["attempts"]
    assert (row["status"], attempt["output_text"], attempt["input_fresh"]) == ("client_closed", 0, 6)
    assert attempt["generated_tokens"] >= 1
    assert row["billed"] == Decimal(64) / 1_000_000


async def test_while_the_upstream_is_silent(gateway: Gateway, upstream: Scripted) -> None:
    """Not even headers: the watch on the caller's socket alone can notice."""

    asked = asyncio.Event()

    async def hang(_: Request, connection: Connection) -> None:
        asked.set()
        await connection.writer.wait_closed()

    upstream.script = hang
    async with gateway.raw_chat(model="hosted", stream=True):
        await asyncio.wait_for(asked.wait(), 20)
    row = await gateway.row()
    assert (row["status"], row["attempts"][0]["status"]) == ("client_closed", "client_closed")
    assert row["total_seconds"] < 3


async def test_while_the_upstream_is_awaited(settings: dict[str, Any], upstream: Scripted) -> None:
    """Nothing was dispatched, so there is no attempt."""
    settings["upstreams"]["engine"]["connect_window_seconds"] = 30.0
    async with running_gateway(settings) as gateway:
        await upstream.stop()
        async with gateway.raw_chat(stream=True):
            await asyncio.sleep(0.2)
        row = await gateway.row()
        assert (row["status"], row["attempts"], row["billed"]) == ("client_closed", [], 0)


@pytest.mark.parametrize("text", ["four", "a", "你好啊"])
async def test_a_hosted_stream_is_cut_and_what_was_sent_is_estimated(
    gateway: Gateway, upstream: Scripted, text: str
) -> None:
    """Never less than a token for each piece, whatever it is written in."""
    cut = asyncio.Event()

    async def script(_: Request, connection: Connection) -> None:
        await connection.start()
        try:
            while True:
                choice = {"index": 0, "delta": {"content": text}, "finish_reason": None}
                await connection.frame({"choices": [choice]})
                await asyncio.sleep(0.02)
        except ConnectionError:
            cut.set()
            raise

    upstream.script = script
    async with gateway.raw_chat(model="hosted", stream=True) as (reader, _):
        await read_frames(reader, 5)
    row = await gateway.row()
    (attempt,) = row["attempts"]
    assert (row["status"], attempt["usage_source"]) == ("client_closed", "estimated")
    assert 5 * max(1, characters(text) // 4) <= attempt["output_text"] < 100
    await asyncio.wait_for(cut.wait(), 5)


async def test_the_next_request_is_served(gateway: Gateway, upstream: Scripted) -> None:
    upstream.pause = 0.05
    for _ in range(5):
        async with gateway.raw_chat(stream=True) as (reader, _):
            await read_frames(reader, 1)
    assert (await gateway.chat()).json()["choices"][0]["message"]["content"] == "Hello world"
    rows = await gateway.rows(6)
    assert [row["status"] for row in rows] == ["client_closed"] * 5 + ["ok"]
    assert "farthing_requests_in_flight 0.0" in (await gateway.http.get("/metrics")).text


async def test_a_slow_reader_loses_nothing(gateway: Gateway, upstream: Scripted) -> None:
    """The answer is larger than all socket buffers: the gateway waits for the reader instead of piling it up."""

    async def script(_: Request, connection: Connection) -> None:
        await connection.start()
        for number in range(200):
            await connection.frame(frame({"content": "x" * 100_000}, number + 1))
        await connection.frame(frame({}, 200, "stop"))
        await connection.done()

    upstream.script = script
    received = 0
    async with gateway.http.stream("POST", "/v1/chat/completions", json=CHAT | {"stream": True}) as answer:
        await asyncio.sleep(1)
        assert not await gateway._rows(), "a reader that has not read cannot have been answered"
        async for chunk in answer.aiter_bytes():
            received += chunk.count(b"x")
    assert received >= 20_000_000
    assert (await gateway.row())["status"] == "ok"
