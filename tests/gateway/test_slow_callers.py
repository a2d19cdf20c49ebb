"""Callers that send a byte now and then: they run into a deadline and hold up nobody."""

import asyncio
import time
from typing import Any

import pytest

from tests.gateway.running import CHAT, Gateway
from tests.gateway.scripted import Scripted


@pytest.fixture
def settings(settings: dict[str, Any]) -> dict[str, Any]:
    return settings | {"limits": {"body_seconds": 0.6, "header_seconds": 0.6}}


async def drip(writer: asyncio.StreamWriter, data: bytes) -> None:
    try:
        for byte in data:
            writer.write(bytes([byte]))
            await writer.drain()
            await asyncio.sleep(0.1)
    except ConnectionError:
        pass


async def test_a_slow_body_is_a_408_and_blocks_nobody(gateway: Gateway) -> None:
    assert (await gateway.chat()).status_code == 200  # what the first call takes is no sign of being held up
    head = "POST /v1/chat/completions HTTP/1.1\r\ncontent-length: 1000"
    async with gateway.socket(head) as (reader, writer):
        dripping = asyncio.create_task(drip(writer, b'{"model": "tiny"' + b" " * 100))
        began = time.monotonic()
        assert (await gateway.chat()).status_code == 200
        assert time.monotonic() - began < 0.5
        answer = await asyncio.wait_for(reader.read(), 5)
        dripping.cancel()
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b"did not arrive within 0.6 seconds" in answer
    rows = await gateway.rows(3)
    assert {(row["status"], row["http_status"]) for row in rows} == {("ok", 200), ("invalid", 408)}


@pytest.mark.parametrize("start", [b"", b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nx-slow: ", b"\r\n"])
async def test_slow_headers_end_the_connection(gateway: Gateway, start: bytes) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", int(gateway.url.rpartition(":")[2]))
    writer.write(start)
    dripping = asyncio.create_task(drip(writer, b"\r\n" * 50 if start == b"\r\n" else b"a" * 100))
    try:
        began = time.monotonic()
        answer = await asyncio.wait_for(reader.read(), 5)
        assert time.monotonic() - began < 2
        assert answer.startswith((b"HTTP/1.1 408 ", b"HTTP/1.1 400 "))
    finally:
        dripping.cancel()
        writer.close()
    assert (await gateway.chat()).status_code == 200


async def test_slow_headers_of_a_second_request(gateway: Gateway) -> None:
    async with gateway.socket("GET /health/live HTTP/1.1") as (reader, writer):
        assert b"200 OK" in await asyncio.wait_for(reader.readuntil(b"}"), 5)
        dripping = asyncio.create_task(drip(writer, b"GET /health/live HTTP/1.1\r\nx: " + b"a" * 100))
        began = time.monotonic()
        await asyncio.wait_for(reader.read(), 5)
        assert time.monotonic() - began < 2
        dripping.cancel()


async def test_headers_without_end_are_cut(gateway: Gateway) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", int(gateway.url.rpartition(":")[2]))
    writer.write(b"GET / HTTP/1.1\r\n" + b"".join(b"x-%d: %s\r\n" % (n, b"a" * 1000) for n in range(100)))
    answer = await asyncio.wait_for(reader.read(), 5)
    writer.close()
    assert answer.startswith(b"HTTP/1.1 431 ")


async def test_a_quick_caller_keeps_its_connection(gateway: Gateway) -> None:
    """The headers' deadline is for headers: neither a long answer nor a pause between requests runs into it."""
    assert (await gateway.chat()).status_code == 200
    await asyncio.sleep(0.8)
    assert (await gateway.chat()).status_code == 200


@pytest.mark.parametrize("model", ["tiny", "hosted"])
async def test_who_stops_reading_is_gone(
    gateway: Gateway, upstream: Scripted, monkeypatch: pytest.MonkeyPatch, model: str
) -> None:
    monkeypatch.setattr("gateway.caller_connection.STALLED_SECONDS", 0.5)
    upstream.words = ["x" * 100_000] * 1000
    async with gateway.raw_chat(model=model, stream=True) as (reader, writer):
        assert await reader.readline() == b"HTTP/1.1 200 OK\r\n"
        writer.transport.pause_reading()
        row = await gateway.row()
    assert row["status"] == "client_closed" and row["attempts"][0]["output_text"] > 0
    assert "farthing_requests_in_flight 0.0" in (await gateway.http.get("/metrics")).text


async def test_who_reads_slowly_is_not(gateway: Gateway, upstream: Scripted, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.caller_connection.STALLED_SECONDS", 1.2)  # 2 s are read in all
    upstream.words = ["x" * 100_000] * 100
    received = 0
    async with gateway.http.stream("POST", "/v1/chat/completions", json=CHAT | {"stream": True}) as answer:
        async for piece in answer.aiter_bytes(1_000_000):
            received += piece.count(b"x")
            await asyncio.sleep(0.2)
    assert received >= 10_000_000
    assert (await gateway.row())["status"] == "ok"
