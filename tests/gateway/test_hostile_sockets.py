"""What a hostile caller does to its connection: bytes without end, headers in the wrong place, requests in a row."""

import asyncio
import json
from typing import Any

import pytest

from billing.people import restrict_key
from billing.restrictions import Restrictions, networks
from gateway.caller_connection import MAX_QUEUED
from tests.gateway.running import CHAT, Gateway, running_gateway
from tests.gateway.scripted import Connection, Request, Scripted, frame

CHUNKED = b"POST /v1/chat/completions HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n"


async def connect(gateway: Gateway) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", int(gateway.url.rpartition(":")[2]))


@pytest.mark.parametrize(
    "start",
    [b"GET /", b"GET / HTTP/1.1\r\nx: ", b"GET / HTTP/1.1\r\n", CHUNKED + b"0\r\nx: ", CHUNKED + b"1;x="],
    ids=["url", "value", "name", "trailer", "chunk extension"],
)
async def test_what_has_no_end_is_not_kept(gateway: Gateway, start: bytes) -> None:
    _, writer = await connect(gateway)
    writer.write(start)
    sent = 0
    with pytest.raises(ConnectionError):
        while sent < 50_000_000:
            writer.write(b"a" * 65536)
            sent += 65536
            await asyncio.wait_for(writer.drain(), 5)
    writer.transport.abort()
    assert sent < 10_000_000, "the sockets' own buffers hold some"
    assert (await gateway.chat()).status_code == 200


async def test_a_trailer_is_no_header(gateway: Gateway, upstream: Scripted) -> None:
    """Who stands in front of us and removes or checks a header does not look behind the body."""
    body = json.dumps(CHAT).encode()
    reader, writer = await connect(gateway)
    writer.write(CHUNKED + b"%x\r\n%s\r\n0\r\n" % (len(body), body))
    writer.write(f"authorization: Bearer {gateway.people.secret}\r\n\r\n".encode())
    answer = await asyncio.wait_for(reader.read(1000), 5)
    writer.transport.abort()
    assert answer.startswith(b"HTTP/1.1 401 ")
    assert not upstream.chats


async def test_every_header_of_a_name_counts(settings: dict[str, Any], upstream: Scripted) -> None:
    """A proxy may add a line of its own: the last line alone would name the proxy in front of it as the caller."""
    settings["trusted_proxies"] = ["127.0.0.1", "10.0.0.0/8"]
    body = json.dumps(CHAT).encode()
    async with running_gateway(settings) as gateway:
        async with gateway.engine.begin() as connection:
            await restrict_key(connection, gateway.people.key, Restrictions(networks=networks(["10.0.0.0/8"])))
        for client, status in (("203.0.113.9", b"403"), ("10.1.1.1", b"200")):
            lines = f"x-forwarded-for: {client}\r\nx-forwarded-for: 10.0.0.2"
            head = f"POST /v1/chat/completions HTTP/1.1\r\n{lines}\r\ncontent-length: {len(body)}"
            async with gateway.socket(head, body) as (reader, _):
                assert (await asyncio.wait_for(reader.readline(), 5)).split()[1] == status
        head = f"POST /v1/chat/completions HTTP/1.1\r\nauthorization: Bearer fk-x\r\ncontent-length: {len(body)}"
        async with gateway.socket(head, body) as (reader, _):
            assert (await asyncio.wait_for(reader.readline(), 5)).split()[1] == b"401"


async def test_many_wishes_to_upgrade_in_a_row(gateway: Gateway, caplog: pytest.LogCaptureFixture) -> None:
    """Each makes the rest be parsed anew, which must not go as deep as there are requests."""
    request = b"GET /health/live HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: h2c\r\n\r\n"
    reader, writer = await connect(gateway)
    writer.write(request * 2000)
    answers = (await asyncio.wait_for(reader.read(), 5)).count(b"HTTP/1.1 200 ")
    writer.transport.abort()
    assert answers > MAX_QUEUED
    assert not [record for record in caplog.records if record.exc_info]


async def test_the_end_of_one_request_leaves_the_next_one_watched(gateway: Gateway, upstream: Scripted) -> None:
    """The first one's upstream takes its time to end the stream; the caller has gone on meanwhile, and then leaves."""
    second = asyncio.Event()

    async def script(_: Request, connection: Connection) -> None:
        if len(upstream.chats) == 1:
            await connection.start()
            await connection.frame(frame({"content": "a"}, 1))
            await connection.frame(frame({}, 1, "stop"))
            await connection.chunk(b"data: [DONE]\n\n")
        else:
            second.set()
        await connection.left()

    upstream.script = script
    body = json.dumps(CHAT | {"model": "hosted", "stream": True}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\ncontent-length: {len(body)}"
    async with gateway.socket(head, body) as (reader, writer):
        await asyncio.wait_for(reader.readuntil(b"0\r\n\r\n"), 5)
        writer.write(f"{head}\r\nauthorization: Bearer {gateway.people.secret}\r\n\r\n".encode() + body)
        await asyncio.wait_for(second.wait(), 5)
        await asyncio.sleep(0.4)  # longer than the end of the first one's stream is awaited
    assert [row["status"] for row in await gateway.rows(2)] == ["ok", "client_closed"]
