"""The relay's HTTP client against a server that misbehaves: which failures are safe to repeat, and which are not."""

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from gateway.upstreams.client import HttpClient
from gateway.upstreams.transport import BrokenError, Reply, SilentError, UnreachableError

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nhi"


@contextlib.asynccontextmanager
async def server(serve: Serve) -> AsyncIterator[str]:
    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            await serve(reader, writer)
        writer.close()

    running = await asyncio.start_server(connected, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{running.sockets[0].getsockname()[1]}"
    finally:
        running.close()


@pytest.fixture
async def transport() -> AsyncIterator[HttpClient]:
    made = HttpClient(connect=1.0, first_byte=0.5, idle=0.5)
    yield made
    await made.close()


async def post(transport: HttpClient, url: str, content: bytes = b"{}") -> Reply:
    return await transport.send("POST", url, {"content-type": "application/json"}, content)


async def head(reader: asyncio.StreamReader) -> bytes:
    found = await reader.readuntil(b"\r\n\r\n")
    length = int(found.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0] or 0)
    return found + await reader.readexactly(length)


async def test_a_refused_connection_is_unreachable(transport: HttpClient) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.raises(UnreachableError):
        await post(transport, f"http://127.0.0.1:{port}/")
    with pytest.raises(UnreachableError):
        await post(transport, "http://no-such-host.invalid/")


async def test_a_connection_closed_without_an_answer_is_broken(transport: HttpClient) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await head(reader)

    async with server(serve) as url:
        with pytest.raises(BrokenError):
            await post(transport, url)


async def test_a_kept_connection_that_was_closed_meanwhile_is_broken_and_not_asked_twice(
    transport: HttpClient,
) -> None:
    """The server may have begun: only the dispatcher knows whether to repeat."""
    asked = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal asked
        await head(reader)
        asked += 1
        writer.write(OK)
        await head(reader)
        asked += 1

    async with server(serve) as url:
        reply = await post(transport, url)
        assert await reply.read() == b"hi"
        await reply.close()
        with pytest.raises(BrokenError):
            await post(transport, url)
        assert asked == 2


async def test_connections_are_used_again(transport: HttpClient) -> None:
    connections = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        while True:
            await head(reader)
            writer.write(OK)

    async with server(serve) as url:
        for _ in range(5):
            reply = await post(transport, url)
            assert await reply.read() == b"hi"
            await reply.close()
    assert connections == 1


async def test_an_answer_that_is_left_is_closed(transport: HttpClient) -> None:
    closed = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await head(reader)
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 1000\r\n\r\nx")
        await reader.read()
        closed.set()

    async with server(serve) as url:
        reply = await post(transport, url)
        assert await reply.chunk() == b"x"
        await reply.close()
        await asyncio.wait_for(closed.wait(), 10)


async def test_silence_before_the_answer(transport: HttpClient) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()

    async with server(serve) as url:
        began = time.monotonic()
        with pytest.raises(SilentError, match="did not answer in time"):
            await post(transport, url)
        assert time.monotonic() - began < 10


async def test_headers_may_take_longer_than_the_silence_within_a_body() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await head(reader)
        await asyncio.sleep(0.5)
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n")
        await reader.read()

    transport = HttpClient(connect=5.0, first_byte=10.0, idle=0.2)
    async with server(serve) as url:
        reply = await post(transport, url)
        began = time.monotonic()
        with pytest.raises(SilentError, match="said nothing for too long"):
            await reply.chunk()
        assert time.monotonic() - began < 5
        await reply.close()
    await transport.close()


async def test_who_is_cancelled_before_the_headers_was_not_kept_waiting(transport: HttpClient) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()

    async with server(serve) as url:
        asking = asyncio.create_task(post(transport, url))
        await asyncio.sleep(0.1)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking


async def test_silence_within_a_body_and_none_while_it_drips(transport: HttpClient) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await head(reader)
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 1000\r\n\r\n")
        for _ in range(4):
            writer.write(b"x")
            await asyncio.sleep(0.3)  # 1.2 s in all: longer than the silence that is allowed
        await reader.read()

    async with server(serve) as url:
        reply = await post(transport, url)
        for _ in range(4):
            assert await reply.chunk() == b"x"
        with pytest.raises(SilentError, match="said nothing for too long"):
            await reply.chunk()
        await reply.close()


async def test_a_caller_that_takes_its_time_is_no_silence(transport: HttpClient) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await head(reader)
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nx")
        await asyncio.sleep(1.2)
        writer.write(b"y")
        await writer.drain()

    async with server(serve) as url:
        reply = await post(transport, url)
        assert await reply.chunk() == b"x"
        await asyncio.sleep(1.0)
        assert await reply.chunk() == b"y"
        assert await reply.chunk() == b""
        await reply.close()


async def test_the_whole_answer_has_its_time() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await head(reader)
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 1000\r\n\r\n")
        for _ in range(100):
            writer.write(b"x")
            await asyncio.sleep(0.05)

    transport = HttpClient(connect=5.0, first_byte=10.0, idle=10.0, total=0.4)
    async with server(serve) as url:
        reply = await post(transport, url)
        began = time.monotonic()
        with pytest.raises(SilentError, match="too long to complete"):
            await reply.read()
        assert time.monotonic() - began < 4, "all of it takes five seconds"
        await reply.close()
    await transport.close()


async def test_what_came_before_the_connection_broke_is_read_first(transport: HttpClient) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await head(reader)
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nhello\r\n")
        await writer.drain()

    async with server(serve) as url:
        reply = await post(transport, url)
        await asyncio.sleep(0.2)
        assert await reply.chunk() == b"hello"
        with pytest.raises(BrokenError):
            await reply.chunk()
        await reply.close()


async def test_an_upstream_is_not_read_faster_than_the_caller_takes_it(transport: HttpClient) -> None:
    sent = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        await head(reader)
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
        piece = b"%x\r\n%s\r\n" % (100_000, b"x" * 100_000)
        for _ in range(1000):
            writer.write(piece)
            await writer.drain()
            sent += 100_000

    async with server(serve) as url:
        reply = await post(transport, url)
        await reply.chunk()
        await asyncio.sleep(0.3)
        assert sent < 20_000_000, "what the sockets' buffers hold, not all of it"
        await reply.close()


async def test_nothing_is_followed_kept_unpacked_or_taken_from_the_environment(
    transport: HttpClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    heads: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            heads.append((await head(reader)).lower())
            more = b"location: /elsewhere\r\nset-cookie: a=b\r\ncontent-encoding: gzip\r\n"
            writer.write(b"HTTP/1.1 302 Found\r\n" + more + b"content-length: 3\r\n\r\nraw")

    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    async with server(serve) as url:
        for _ in range(2):
            reply = await post(transport, url)
            assert (reply.status, await reply.read()) == (302, b"raw")
            await reply.close()
    assert len(heads) == 2
    assert b"cookie:" not in heads[1] and b"accept-encoding: identity" in heads[0]
