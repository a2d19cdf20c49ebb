"""Requests that two servers could read as different ones are refused, and so are headers that would make new ones."""

import asyncio

import pytest

from tests.gateway.running import Gateway
from tests.gateway.scripted import Connection, Request, Scripted

BODY = b'{"model":"tiny","messages":[{"role":"user","content":"hi"}]}'
SMUGGLED = b"GET /health/live HTTP/1.1\r\nhost: x\r\n\r\n"


@pytest.mark.parametrize(
    "headers",
    [
        f"content-length: {len(BODY)}\r\ntransfer-encoding: chunked",
        f"transfer-encoding: chunked\r\ncontent-length: {len(BODY)}",
        f"content-length: {len(BODY)}\r\ncontent-length: {len(BODY) + 5}",
        f"content-length: {len(BODY)}\r\ncontent-length: {len(BODY)}",
        f"content-length: +{len(BODY)}",
        f"content-length: {len(BODY)}, {len(BODY)}",
        "content-length: 0x3d",
        f"content-length : {len(BODY)}",
        "transfer-encoding : chunked",
        "transfer-encoding: xchunked",
        "transfer-encoding: chunked, identity",
        f"x: y\r\n content-length: 5\r\ncontent-length: {len(BODY)}\nx-bare: newline",
        f"content-length: {len(BODY)}\r\nx: a\x00b",
        f"content-length: {len(BODY)}\r\nx: a\rb",
    ],
)
async def test_a_request_with_two_meanings_is_refused(gateway: Gateway, upstream: Scripted, headers: str) -> None:
    async with gateway.socket(f"POST /v1/chat/completions HTTP/1.1\r\n{headers}", BODY + SMUGGLED) as (reader, _):
        answer = await asyncio.wait_for(reader.read(), 5)
    assert answer.startswith(b"HTTP/1.1 400 "), answer[:200]
    assert answer.count(b"HTTP/1.1") == 1, "nothing behind it was taken for a request"
    assert not upstream.chats


async def test_chunks_that_lie_about_their_size(gateway: Gateway, upstream: Scripted) -> None:
    head = "POST /v1/chat/completions HTTP/1.1\r\ntransfer-encoding: chunked"
    for body in (b"zz\r\n{}\r\n0\r\n\r\n", b"2\r\n{}x\r\n0\r\n\r\n", b"-1\r\n{}\r\n0\r\n\r\n"):
        async with gateway.socket(head, body + SMUGGLED) as (reader, _):
            answer = await asyncio.wait_for(reader.read(), 5)
        assert answer.startswith(b"HTTP/1.1 400 ") and b'"status":"ok"' not in answer
    assert not upstream.chats


async def test_an_upstream_s_header_makes_no_new_one(gateway: Gateway, upstream: Scripted) -> None:
    async def script(_: Request, connection: Connection) -> None:
        await connection.json({"error": {"message": "slow"}}, 429, "retry-after: 1\x7f\x01; x-admin: yes\r\n")

    upstream.script = script
    answer = await gateway.chat()
    assert answer.status_code in (429, 502)
    assert "x-admin" not in answer.headers and "retry-after" not in answer.headers
