"""Streams that do not lie: what the upstream did is what the caller sees, and what the ledger says."""

import asyncio
import json
import time
from decimal import Decimal
from typing import Any

import pytest

from tests.gateway.running import CHAT, Gateway, running_gateway
from tests.gateway.scripted import Connection, Request, Script, Scripted, frame
from tests.gateway.test_budgets import limit, settled

TEXT = "你好🙂"
USAGE = {"prompt_tokens": 12, "completion_tokens": 3, "total_tokens": 15}


def delta(content: str, finish: str | None = None, **fields: Any) -> dict[str, Any]:
    choice = {"index": 0, "delta": {"content": content} if content else {}, "finish_reason": finish}
    return {
        "id": "chatcmpl-1",
        "object": "chat.completion.chunk",
        "created": 1,
        "model": "m",
        "choices": [choice],
    } | fields


def sending(*frames: dict[str, Any]) -> Script:
    async def script(_: Request, connection: Connection) -> None:
        await connection.start()
        for one in frames:
            await connection.frame(one)
        await connection.done()

    return script


async def read(gateway: Gateway, **changes: Any) -> tuple[list[dict[str, Any]], str]:
    """The stream's JSON frames, and the whole of it."""
    answer = await gateway.chat(stream=True, model="hosted", **changes)
    assert answer.status_code == 200
    assert answer.text.endswith("data: [DONE]\n\n") and answer.text.count("[DONE]") == 1
    lines = answer.text.splitlines()
    return [json.loads(line[6:]) for line in lines if line.startswith("data: {")], answer.text


def said(frames: list[dict[str, Any]]) -> str:
    return "".join(c["delta"].get("content") or "" for one in frames for c in one["choices"])


@pytest.mark.parametrize("ascii_only", [False, True])
async def test_text_is_whole_wherever_the_upstream_cuts_its_bytes(
    gateway: Gateway, upstream: Scripted, ascii_only: bool
) -> None:
    payload = json.dumps(delta(TEXT), ensure_ascii=ascii_only).encode()
    event = b"data: " + payload + b"\n\n"
    place = 0

    async def script(_: Request, connection: Connection) -> None:
        await connection.start()
        await connection.chunk(event[:place])
        await asyncio.sleep(0.001)  # a packet of its own
        await connection.chunk(event[place:])
        await connection.frame(delta("", "stop"))
        await connection.done()

    upstream.script = script
    for place in range(1, len(event)):
        answer = await gateway.chat(stream=True, model="hosted")
        first = answer.content.partition(b"\n\n")[0]
        assert first == b"data: " + payload, place


@pytest.mark.parametrize(
    ("reported", "count"),
    [
        ([delta("a", usage=USAGE), delta("b", usage=USAGE), delta("", "stop", usage=USAGE)], 3),
        ([delta("ab"), delta("", "stop", usage=USAGE)], 3),
        ([delta("ab"), delta("", "stop"), {"choices": [], "usage": USAGE}], 3),
        ([delta("ab"), delta("", "stop", usage=USAGE), {"choices": [], "usage": USAGE}], 3),
        ([delta("ab"), delta("", "stop"), {"choices": [], "usage": USAGE}, {"choices": [], "usage": USAGE}], 3),
        ([delta("ab", usage=None), delta("", "stop", usage=None)], 1),
        ([delta("ab"), delta("", "stop")], 1),
    ],
    ids=["on every chunk", "on the last choice", "alone", "both", "twice", "null", "never"],
)
@pytest.mark.parametrize("options", [None, {}, {"include_usage": False}, {"include_usage": True}])
async def test_usage_however_it_comes(
    gateway: Gateway, upstream: Scripted, reported: list[dict[str, Any]], count: int, options: dict[str, Any] | None
) -> None:
    """Exactly one usage chunk, the last, where the caller asked; none where it did not. The row has the counts."""
    upstream.script = sending(*reported)
    frames, text = await read(gateway, **({} if options is None else {"stream_options": options}))
    assert said(frames) == "ab"
    chunks = [one for one in frames if not one["choices"]]
    if options == {"include_usage": True}:
        assert chunks == [frames[-1]] and frames[-2]["choices"][0]["finish_reason"] == "stop"
        assert chunks[0]["usage"]["completion_tokens"] == count
        assert all(one.get("usage") is None for one in frames[:-1])
    else:
        assert not chunks and "usage" not in text
        assert frames[-1]["choices"][0]["finish_reason"] == "stop"
    (attempt,) = (await gateway.row())["attempts"]
    assert attempt["output_text"] == count
    assert attempt["usage_source"] == ("upstream" if count == 3 else "estimated")


async def test_what_is_not_hidden_passes_byte_for_byte(gateway: Gateway, upstream: Scripted) -> None:
    odd = b'data: {"x": 1.10, "choices" :[{"index":0,"delta":{"content":"\\u4f60"},"z":[1e400]}],"y":"usage" }\n\n'

    async def script(_: Request, connection: Connection) -> None:
        await connection.start()
        await connection.chunk(odd)
        await connection.frame(delta("", "stop"))
        await connection.done()

    upstream.script = script
    assert (await gateway.chat(stream=True, model="hosted")).content.startswith(odd)


@pytest.mark.parametrize("count", [0, 1, 5])
@pytest.mark.parametrize("ending", ["reset", "end", "half an event"])
async def test_an_upstream_that_dies_in_the_middle(
    gateway: Gateway, upstream: Scripted, count: int, ending: str
) -> None:
    async def script(_: Request, connection: Connection) -> None:
        await connection.start()
        await connection.frame(frame({"role": "assistant"}, 0))
        for number in range(count):
            await connection.frame(frame({"content": "word "}, number + 1))
        if ending == "half an event":
            await connection.chunk(b'data: {"choices":[{"ind')
        if ending == "reset":
            connection.die()
        else:
            await connection.send(b"0\r\n\r\n")

    upstream.script = script
    frames, _ = await read(gateway)
    assert said(frames[:-1]) == "word " * count
    assert frames[-1]["error"]["code"] == "upstream_error"
    row = await gateway.row()
    (attempt,) = row["attempts"]
    assert (row["status"], attempt["status"]) == ("upstream_error", "upstream_error")
    assert attempt["output_text"] == count


async def test_silence_in_the_middle_ends_the_stream(settings: dict[str, Any], upstream: Scripted) -> None:
    settings["upstreams"]["hosted"]["idle_seconds"] = 0.3

    async def script(_: Request, connection: Connection) -> None:
        await connection.start()
        await connection.frame(delta("a"))
        await connection.writer.wait_closed()

    upstream.script = script
    async with running_gateway(settings) as gateway:
        frames, _ = await read(gateway)
        assert said(frames[:1]) == "a" and "said nothing for too long" in frames[1]["error"]["message"]
        row = await gateway.row()
        assert row["status"] == "upstream_error" and row["total_seconds"] < 3


async def test_a_silent_upstream_s_caller_is_kept_awake(settings: dict[str, Any], upstream: Scripted) -> None:
    settings["limits"] = {"keep_alive_seconds": 0.2}
    resume = asyncio.Event()

    async def script(_: Request, connection: Connection) -> None:
        await connection.start()
        await connection.frame(delta("a"))
        await resume.wait()
        await connection.frame(delta("b", "stop"))
        await connection.done()

    upstream.script = script
    async with (
        running_gateway(settings) as gateway,
        gateway.http.stream("POST", "/v1/chat/completions", json=CHAT | {"stream": True, "model": "hosted"}) as answer,
    ):
        lines = answer.aiter_lines()
        comments = 0
        async for line in lines:
            comments += line == ": keep-alive"
            if comments == 2:
                break
        resume.set()
        rest = [line async for line in lines]
        assert not [line for line in rest if line.startswith("id:")] and rest[-2:] == ["data: [DONE]", ""]
        assert await asyncio.wait_for(gateway.row(), 5)


async def test_the_sdk_reads_over_comments(settings: dict[str, Any], upstream: Scripted) -> None:
    settings["limits"] = {"keep_alive_seconds": 0.1}

    async def script(_: Request, connection: Connection) -> None:
        await connection.start()
        for text in "ab":
            await asyncio.sleep(0.4)
            await connection.frame(delta(text))
        await connection.frame(delta("", "stop"))
        await connection.done()

    upstream.script = script
    async with running_gateway(settings) as gateway:
        stream = await gateway.sdk.chat.completions.create(  # type: ignore[call-overload]
            stream=True, **CHAT | {"model": "hosted"}
        )
        assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream]) == "ab"


@pytest.mark.parametrize("reports", [True, False], ids=["usage on every chunk", "no usage"])
async def test_a_stream_is_cut_when_its_reservation_is_used_up(
    gateway: Gateway, upstream: Scripted, reports: bool
) -> None:
    """The upstream ignores max_tokens. The caller gets what is paid for, `length`, and a comment; nobody overspends."""
    gone = asyncio.Event()

    async def script(_: Request, connection: Connection) -> None:
        await connection.start()
        try:
            for number in range(1, 100_000):
                counted = {"usage": {"prompt_tokens": 5, "completion_tokens": number}} if reports else {}
                await connection.frame(delta("four", **counted))
                await asyncio.sleep(0)
        except ConnectionError:
            gone.set()
            raise

    upstream.script = script
    await limit(gateway, 1_000_000)
    frames, text = await read(gateway, max_tokens=20, stream_options={"include_usage": True})
    assert ": farthing: the stream was cut" in text
    assert frames[-2]["choices"][0]["finish_reason"] == "length"
    assert frames[-1]["usage"]["completion_tokens"] == 20
    assert len(said(frames)) // 4 == (20 if reports else 40)
    await asyncio.wait_for(gone.wait(), 5)
    row = await gateway.row()
    (attempt,) = row["attempts"]
    assert (row["status"], row["finish_reason"], attempt["output_text"]) == ("ok", "length", 20)
    assert "cut" in row["error"]
    spent = await settled(gateway, 1)
    assert spent == row["billed"] * 1_000_000
    assert row["billed"] <= Decimal(20 * 20 + 10 * 100) / 1_000_000


async def test_an_honest_upstream_with_long_tokens_is_not_cut(gateway: Gateway, upstream: Scripted) -> None:
    """20 tokens of 7 characters are 35 by our estimate."""
    upstream.script = sending(
        *[delta("extreme") for _ in range(20)], delta("", "stop"), {"choices": [], "usage": USAGE}
    )
    await limit(gateway, 1_000_000)
    frames, text = await read(gateway, max_tokens=20)
    assert said(frames) == "extreme" * 20 and "cut" not in text


async def test_without_a_hard_budget_nothing_is_cut(gateway: Gateway, upstream: Scripted) -> None:
    upstream.script = sending(*[delta("word " * 100) for _ in range(20)], delta("", "stop"))
    frames, _ = await read(gateway, max_tokens=5)
    assert len(said(frames)) == 20 * 500


async def test_events_that_come_together_go_out_together(gateway: Gateway, upstream: Scripted) -> None:
    events = b"".join(b"data: " + json.dumps(delta(str(number))).encode() + b"\n\n" for number in range(10))

    async def script(_: Request, connection: Connection) -> None:
        await connection.start()
        await connection.chunk(events)
        await asyncio.sleep(0.2)
        await connection.frame(delta("", "stop"))
        await connection.done()

    upstream.script = script
    async with gateway.raw_chat(stream=True, model="hosted") as (reader, _):
        await reader.readuntil(b"\r\n\r\n")
        size = int(await reader.readline(), 16)
        assert await reader.readexactly(size) == events


async def test_a_whole_answer_of_an_engine_that_takes_too_long_is_called_back(
    settings: dict[str, Any], upstream: Scripted
) -> None:
    """The caller gets a 504 and pays nothing; the operator knows what it cost."""
    settings["upstreams"]["engine"]["first_byte_seconds"] = 0.5
    upstream.words, upstream.pause = ["a"] * 1000, 0.05
    async with running_gateway(settings) as gateway:
        answer = await gateway.chat()
        assert answer.status_code == 504
        row = await gateway.row()
        (attempt,) = row["attempts"]
        assert (row["status"], row["billed"], attempt["status"]) == ("upstream_error", 0, "upstream_error")
        assert len(upstream.aborted) == 1 and attempt["generated_tokens"] >= 5
        assert row["cost"] == (2 + Decimal(attempt["decode_device_seconds"])) / 1000
        assert row["total_seconds"] < 3


@pytest.mark.parametrize("stream", [False, True])
async def test_an_upstream_that_takes_a_minute_is_given_two_seconds(
    settings: dict[str, Any], upstream: Scripted, stream: bool
) -> None:
    settings["upstreams"]["hosted"]["first_byte_seconds"] = 2.0

    async def script(_: Request, connection: Connection) -> None:
        await asyncio.wait_for(connection.writer.wait_closed(), 60)

    upstream.script = script
    async with running_gateway(settings) as gateway:
        began = time.monotonic()
        answer = await gateway.chat(model="hosted", stream=stream)
        assert answer.status_code == 504 and 1.9 < time.monotonic() - began < 30
        row = await gateway.row()
        assert (row["status"], row["billed"], len(row["attempts"])) == ("upstream_error", 0, 1)
        assert "farthing_requests_in_flight 0.0" in (await gateway.http.get("/metrics")).text


async def test_an_error_in_a_200_is_no_answer(gateway: Gateway, upstream: Scripted) -> None:
    async def script(_: Request, connection: Connection) -> None:
        await connection.json({"error": {"message": "the provider is overloaded", "code": 502}})

    upstream.script = script
    answer = await gateway.chat(model="hosted")
    assert answer.status_code == 502 and "overloaded" in answer.json()["error"]["message"]
    assert (await gateway.row())["status"] == "upstream_error"
