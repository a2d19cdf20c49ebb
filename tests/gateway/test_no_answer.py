"""Upstreams whose good status comes without an answer: tried elsewhere while nothing went to the caller, else a 502."""

import asyncio
import json
from decimal import Decimal
from typing import Any

import pytest

from tests.gateway.pooled import pooled
from tests.gateway.running import Gateway, running_gateway
from tests.gateway.scripted import Connection, Request, Script, Scripted, frame
from tests.gateway.test_anthropic_answers import START, block, end
from tests.gateway.vendors import with_claude

MESSAGES: Any = [{"role": "user", "content": "hi"}]


def whole(body: Any) -> Script:
    async def script(_: Request, connection: Connection) -> None:
        await connection.json(body)

    return script


def streaming(data: bytes, pause: float = 0.0) -> Script:
    """`pause` comes between the headers and the rest."""

    async def script(_: Request, connection: Connection) -> None:
        await connection.start()
        await asyncio.sleep(pause)
        if data:
            await connection.chunk(data)
        await connection.send(b"0\r\n\r\n")

    return script


def event(value: Any) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (value["type"].encode(), json.dumps(value).encode())


@pytest.fixture
def settings(settings: dict[str, Any]) -> dict[str, Any]:
    return with_claude(settings)


USED = {"prompt_tokens": 7, "completion_tokens": 3}
USED_COST = Decimal(7 * 10 + 3 * 20) / 1_000_000
"""At the hosted model's cost prices. What an attempt cost that reported nothing is not known."""


@pytest.mark.parametrize(
    ("body", "cost"),
    [({}, None), ({"choices": []}, None), ({"choices": None, "usage": USED}, USED_COST), ([], None)],
)
async def test_a_whole_answer_without_one(
    gateway: Gateway, upstream: Scripted, body: Any, cost: Decimal | None
) -> None:
    upstream.script = whole(body)
    answer = await gateway.chat(model="hosted")
    assert answer.status_code == 502
    assert answer.json()["error"]["code"] == "upstream_error"
    row = await gateway.row()
    assert (row["status"], row["http_status"], row["billed"]) == ("upstream_error", 502, 0)
    attempts = [(a["status"], a["http_status"], a["billed"], a["cost"]) for a in row["attempts"]]
    assert attempts == [("upstream_error", 200, 0, cost)] * 3


async def test_embeddings_without_one(gateway: Gateway, upstream: Scripted) -> None:
    upstream.paths["/v1/embeddings"] = whole({"object": "list", "data": [], "usage": {"prompt_tokens": 1}})
    answer = await gateway.http.post("/v1/embeddings", json={"model": "hosted", "input": "x"})
    assert answer.status_code == 502


@pytest.mark.parametrize("body", [{}, {"type": "message"}, {"type": "message", "content": [], "stop_reason": None}])
@pytest.mark.parametrize("path", ["/v1/messages", "/v1/chat/completions"])
async def test_a_message_without_one(gateway: Gateway, upstream: Scripted, body: Any, path: str) -> None:
    upstream.paths["/v1/messages"] = whole(body)
    answer = await gateway.http.post(path, json={"model": "claude", "messages": MESSAGES, "max_tokens": 5})
    assert answer.status_code == 502
    assert (await gateway.row())["status"] == "upstream_error"


async def test_an_empty_message_that_ended_is_an_answer(gateway: Gateway, upstream: Scripted) -> None:
    message = START["message"] | {"content": [], "stop_reason": "end_turn"}
    upstream.paths["/v1/messages"] = whole(message)
    answer = await gateway.http.post("/v1/messages", json={"model": "claude", "messages": MESSAGES, "max_tokens": 5})
    assert (answer.status_code, answer.json()) == (200, message)


STOP = event({"type": "message_stop"})


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/chat/completions"])
@pytest.mark.parametrize("data", [STOP, event({"type": "ping"}) + STOP, b"", b": nothing\n\n"])
async def test_anthropic_s_stream_without_one(gateway: Gateway, upstream: Scripted, path: str, data: bytes) -> None:
    upstream.paths["/v1/messages"] = streaming(data)
    body = {"model": "claude", "messages": MESSAGES, "max_tokens": 5, "stream": True}
    answer = await gateway.http.post(path, json=body)
    assert answer.status_code == 502 and "error" in answer.json()
    assert (await gateway.row())["status"] == "upstream_error"


DONE = b"data: [DONE]\n\n"
USAGE_ALONE = b'data: {"choices":[],"usage":{"prompt_tokens":1,"completion_tokens":1}}\n\n'


@pytest.mark.parametrize("data", [DONE, b"", b'data: {"error":{"message":"no room"}}\n\n' + DONE, b"data: {junk\n\n"])
async def test_a_stream_without_one_is_no_stream(gateway: Gateway, upstream: Scripted, data: bytes) -> None:
    upstream.script = streaming(data)
    answer = await gateway.chat(model="hosted", stream=True)
    assert answer.status_code == 502 and answer.json()["error"]["code"] == "upstream_error"
    row = await gateway.row()
    assert (row["status"], row["http_status"], len(row["attempts"])) == ("upstream_error", 502, 3)
    assert "no room" not in (row["error"] or ""), "an upstream's words may quote the prompt"


async def test_a_stream_of_usage_alone(gateway: Gateway, upstream: Scripted) -> None:
    upstream.script = streaming(USAGE_ALONE + DONE)
    answer = await gateway.chat(model="hosted", stream=True)
    assert '"upstream_error"' in answer.text and answer.text.endswith("data: [DONE]\n\n")
    assert (await gateway.row())["status"] == "upstream_error"


@pytest.mark.parametrize("stream", [False, True])
async def test_another_upstream_answers_in_its_place(settings: dict[str, Any], stream: bool) -> None:
    async with pooled(settings) as (gateway, a, _):
        a.script = streaming(DONE) if stream else whole({})
        answer = await gateway.chat(model="pair", stream=stream)
        assert answer.status_code == 200 and "error" not in answer.text
        row = await gateway.row()
        assert [(x["upstream"], x["status"]) for x in row["attempts"]] == [("a", "upstream_error"), ("b", "ok")]
        assert row["attempts"][0]["billed"] == 0 < row["billed"]


async def test_half_a_whole_answer_is_tried_elsewhere(settings: dict[str, Any]) -> None:
    async def half(_: Request, connection: Connection) -> None:
        await connection.send(b"HTTP/1.1 200 OK\r\ncontent-length: 1000\r\n\r\n{")
        connection.die()

    async with pooled(settings) as (gateway, a, _):
        a.script = half
        assert (await gateway.chat(model="pair")).status_code == 200
        assert [x["status"] for x in (await gateway.row())["attempts"]] == ["upstream_error", "ok"]


async def test_a_stream_that_takes_its_time_begins_without_its_first_frame(
    settings: dict[str, Any], upstream: Scripted
) -> None:
    """Then a failure comes in the stream, and comments keep it alive until then."""
    settings["limits"] = {"keep_alive_seconds": 0.3}
    upstream.script = streaming(DONE, pause=1.0)
    async with running_gateway(settings) as gateway:
        answer = await gateway.chat(model="hosted", stream=True)
        assert answer.status_code == 200
        assert answer.text.startswith(": keep-alive\n\n") and '"upstream_error"' in answer.text
        (attempt,) = (await gateway.row())["attempts"]
        assert attempt["status"] == "upstream_error"


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses"])
async def test_a_last_frame_that_cannot_be_translated(gateway: Gateway, upstream: Scripted, path: str) -> None:
    """The gateway itself reads less of a frame than these surfaces do."""
    last = frame({"reasoning_details": "none"}, 2, "stop")

    async def script(_: Request, connection: Connection) -> None:
        await connection.start()
        await connection.frame(frame({"content": "Hello"}, 1))
        await connection.frame(last)
        await connection.done()

    upstream.script = script
    question = {"input": "hi"} if path == "/v1/responses" else {"messages": MESSAGES, "max_tokens": 5}
    answer = await gateway.http.post(path, json={"model": "hosted", "stream": True, **question})
    assert "Hello" in answer.text and "event: error" in answer.text
    assert "message_stop" not in answer.text and "response.completed" not in answer.text
    row = await gateway.row()
    (attempt,) = row["attempts"]
    assert (row["status"], attempt["status"]) == ("upstream_error", "upstream_error")
    assert attempt["output_text"] == 1, "what was delivered"


def halves(text: bytes) -> bytes:
    """A chat frame that says this, in JSON."""
    return b'data: {"id":"x","choices":[{"index":0,"delta":{"content":"%s"},"finish_reason":null}]}\n\n' % text


@pytest.mark.parametrize("half", [rb"a\ud83d", rb"\ude42b", rb"\\\ud83d \ude42"])
async def test_half_of_a_surrogate_pair(gateway: Gateway, upstream: Scripted, half: bytes) -> None:
    """Relayed as it came; U+FFFD where it must be read."""
    finish = b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"stop"}],"usage":null}\n\n'
    upstream.script = streaming(halves(half) + finish + DONE)
    answer = await gateway.chat(model="hosted", stream=True)
    assert answer.content.startswith(halves(half)) and b'"error"' not in answer.content
    said = await gateway.http.post(
        "/v1/messages", json={"model": "hosted", "messages": MESSAGES, "max_tokens": 5, "stream": True}
    )
    assert "\ufffd" in said.text and "message_stop" in said.text
    upstream.script = whole_raw(b'{"choices":[{"index":0,"message":{"content":"%s"},"finish_reason":"stop"}]}' % half)
    assert half in (await gateway.chat(model="hosted")).content
    said = await gateway.http.post("/v1/responses", json={"model": "hosted", "input": "hi"})
    assert "\ufffd" in said.text
    assert {row["status"] for row in await gateway.rows(4)} == {"ok"}


def whole_raw(body: bytes) -> Script:
    async def script(_: Request, connection: Connection) -> None:
        await connection.send(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(body) + body)

    return script


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/chat/completions"])
async def test_half_of_a_surrogate_pair_of_anthropic_s(gateway: Gateway, upstream: Scripted, path: str) -> None:
    said = {"type": "text_delta", "text": "HALF"}
    events = [START, *block(0, {"type": "text", "text": ""}, said), *end("end_turn")]
    upstream.paths["/v1/messages"] = streaming(b"".join(map(event, events)).replace(b"HALF", rb"a\ud83d"))
    body = {"model": "claude", "messages": MESSAGES, "max_tokens": 5, "stream": True}
    answer = await gateway.http.post(path, json=body)
    assert (rb"a\ud83d" if path == "/v1/messages" else "a\ufffd".encode()) in answer.content
    assert (await gateway.row())["status"] == "ok"


async def test_a_byte_order_mark(gateway: Gateway, upstream: Scripted) -> None:
    first = halves(b"Hello")

    async def script(_: Request, connection: Connection) -> None:
        await connection.start()
        await connection.chunk(b"\xef\xbb")
        await connection.chunk(b"\xbf" + first)
        await connection.chunk(b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\n' + DONE)
        await connection.send(b"0\r\n\r\n")

    upstream.script = script
    assert (await gateway.chat(model="hosted", stream=True)).content.startswith(first)
    choice = b'{"choices":[{"index":0,"message":{"content":"Hello"},"finish_reason":"stop"}]}'
    upstream.script = whole_raw(b"\xef\xbb\xbf" + choice)
    assert (await gateway.chat(model="hosted")).content == choice
    assert {row["status"] for row in await gateway.rows(2)} == {"ok"}


async def test_errors_name_the_trace(gateway: Gateway, upstream: Scripted) -> None:
    body = {"model": "claude", "messages": MESSAGES, "max_tokens": 5}
    upstream.paths["/v1/messages"] = whole({})
    answer = await gateway.http.post("/v1/messages", json=body)
    trace = answer.headers["x-farthing-trace-id"]
    assert answer.json()["request_id"] == trace == answer.headers["request-id"] == answer.headers["x-request-id"]
    upstream.paths["/v1/messages"] = streaming(event(START) + event({"type": "error", "error": {"message": "x"}}))
    answer = await gateway.http.post("/v1/messages", json=body | {"stream": True})
    assert json.loads(answer.text.rpartition("data: ")[2])["request_id"] == answer.headers["x-farthing-trace-id"]
