"""What an upstream may send beside an answer: HTTP that is none, impossible headers, events of several lines."""

import json

import pytest

from gateway.failures import LONGEST_WAIT_SECONDS, retry_after
from gateway.upstreams.anthropic_decoder import AnthropicDecoder
from tests.gateway.running import Gateway
from tests.gateway.scripted import Connection, Request, Scripted

ABSURD_DATE = f"Mon, 01 Jan {'9' * 20} 00:00:00 GMT"


@pytest.mark.parametrize(("status", "told"), [(429, 429), (500, 502), (503, 503)])
async def test_a_date_that_no_calendar_has(gateway: Gateway, upstream: Scripted, status: int, told: int) -> None:
    async def script(_: Request, connection: Connection) -> None:
        await connection.json({"error": {"message": "slow down"}}, status, f"retry-after: {ABSURD_DATE}\r\n")

    upstream.script = script
    assert (await gateway.chat()).status_code == told
    assert (await gateway.row())["http_status"] == told


def test_no_wait_is_longer_than_a_day() -> None:
    assert retry_after({"retry-after": ABSURD_DATE}) == 0
    assert retry_after({"retry-after": "1e300"}) == LONGEST_WAIT_SECONDS


@pytest.mark.parametrize(
    "sent",
    [b"my key is sk-1\r\n", b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\nab"],
    ids=["no HTTP", "two lengths"],
)
async def test_what_is_no_http_is_not_quoted(gateway: Gateway, upstream: Scripted, sent: bytes) -> None:
    async def script(_: Request, connection: Connection) -> None:
        await connection.send(sent)
        connection.die()

    upstream.script = script
    answer = await gateway.chat(model="hosted")
    assert answer.status_code == 502
    error = (await gateway.row())["error"]
    for words in (answer.text, error):
        assert "is not HTTP" in words
        assert "sk-1" not in words and str(upstream.port) not in words, "neither its bytes nor its address"


@pytest.mark.parametrize("apart", [b"\ndata: ", b"\r\ndata: ", b"\r"], ids=["lf", "crlf", "cr"])
async def test_an_event_of_several_lines_is_relayed_as_one(gateway: Gateway, upstream: Scripted, apart: bytes) -> None:
    end = b'{"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}'

    async def script(_: Request, connection: Connection) -> None:
        await connection.start()
        await connection.chunk(b"data: {" + apart + b'"choices":[{"index":0,"delta":{"content":"a"}}]}\n\n')
        await connection.chunk(b"data: " + end + b"\n\n")
        await connection.done()

    upstream.script = script
    answer = await gateway.chat(model="hosted", stream=True)
    lines = [line.removeprefix("data: ") for line in answer.text.replace("\r", "\n").split("\n") if line]
    assert [json.loads(line)["choices"][0]["delta"] for line in lines[:-1]] == [{"content": "a"}, {}]
    assert lines[-1] == "[DONE]"


def test_a_tool_whose_name_is_no_text() -> None:
    """An answer of an imitation of Anthropic's must not be a fault of ours."""
    call = {"type": "tool_use", "id": 1, "name": 2, "input": "x"}
    body = json.dumps({"type": "message", "content": [call], "stop_reason": "tool_use"}).encode()
    message = json.loads(AnthropicDecoder(native=False).whole(body).raw)["choices"][0]["message"]
    assert message["tool_calls"] == [{"id": "1", "type": "function", "function": {"name": "2", "arguments": '"x"'}}]
