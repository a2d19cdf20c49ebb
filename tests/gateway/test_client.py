"""The relay's HTTP client against what HTTP allows an upstream, and what not: on asyncio's loop and uvloop's."""

import asyncio
import contextlib
import gc
import socket

import pytest

from gateway.upstreams import connection
from gateway.upstreams.connection import Connection, HttpReply
from gateway.upstreams.transport import BrokenError
from tests.gateway.loops import on_both_loops
from tests.gateway.pooled import until
from tests.gateway.speaking import BODIES, HEAD, OK, Saying, http, post, request, server, whole


@on_both_loops
async def test_what_is_sent() -> None:
    saying = Saying(OK)
    async with server(saying) as url, http() as asking:
        assert await whole(asking, url) == b"hi"
    head, _, body = saying.requests[0].partition(b"\r\n\r\n")
    first, *lines = head.decode().split("\r\n")
    assert (first, body) == ("POST /v1/x?a=b HTTP/1.1", b"{}")
    assert sorted(lines) == [
        "accept-encoding: identity",
        "accept: */*",
        "content-length: 2",
        "content-type: application/json",
        f"host: {url.removeprefix('http://')}",
        "user-agent: farthing",
    ]


@pytest.mark.parametrize("value", ["a\r\nx: y", "a\nb", "a\rb", "a\0b"])
async def test_a_header_never_becomes_two(value: str) -> None:
    async with http() as asking:
        with pytest.raises(ValueError, match="line break"):
            await asking.send("GET", "http://127.0.0.1:9", {"traceparent": value}, None)


@pytest.mark.parametrize("kind", BODIES)
@on_both_loops
async def test_an_answer_byte_by_byte(kind: str) -> None:
    answer = HEAD + b"x-one: 1\r\n" + BODIES[kind]
    pieces = [answer[place : place + 1] for place in range(len(answer))]
    saying = Saying(*pieces, then_close=kind == "until it closes")
    async with server(saying) as url, http() as asking:
        for _ in range(2):
            reply = await post(asking, url)
            assert (reply.status, await reply.read()) == (200, b"hello world")
            assert reply.headers["x-one"] == "1" and "trailer" not in reply.headers
            await reply.close()
    assert saying.connections == (2 if kind == "until it closes" else 1)


@on_both_loops
async def test_headers_that_come_twice_are_one_list() -> None:
    async with (
        server(Saying(HEAD + b"X-A:  1 \r\nx-a: 2\r\nX-b: \xe9\r\ncontent-length: 0\r\n\r\n")) as url,
        http() as asking,
    ):
        reply = await post(asking, url)
        assert (reply.headers["x-a"], reply.headers["x-b"]) == ("1, 2", "é")
        await reply.close()


@on_both_loops
async def test_preliminary_answers_are_passed_over() -> None:
    early = b"HTTP/1.1 100 Continue\r\nx-early: 1\r\n\r\nHTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n"
    saying = Saying(early, OK)
    async with server(saying) as url, http() as asking:
        for _ in range(2):
            reply = await post(asking, url)
            assert (reply.status, dict(reply.headers), await reply.read()) == (200, {"content-length": "2"}, b"hi")
            await reply.close()
    assert saying.connections == 1


@pytest.mark.parametrize("more", [b"HTTP/1.1 200 OK\r\ncontent-length: 6\r\n\r\nsecret", b"garbage", b"H"])
@on_both_loops
async def test_an_answer_nobody_asked_for_is_nobodys(more: bytes) -> None:
    """Bytes behind an answer must not become the next request's answer."""
    saying = Saying(OK + more)
    async with server(saying) as url, http() as asking:
        for _ in range(3):
            assert await whole(asking, url) == b"hi"
        assert saying.connections == 3


@on_both_loops
async def test_a_free_connection_that_speaks_is_closed() -> None:
    saying = Saying(OK, b"", b"HTTP/1.1 408 Request Timeout\r\ncontent-length: 0\r\n\r\n")
    async with server(saying) as url, http() as asking:
        assert await whole(asking, url) == b"hi"
        await asyncio.sleep(0.2)
        assert await whole(asking, url) == b"hi"
        assert saying.connections == 2


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.0 200 OK\r\ncontent-length: 2\r\n\r\nhi",
        HEAD + b"connection: close\r\ncontent-length: 2\r\n\r\nhi",
        b"HTTP/1.1 204 No Content\r\nconnection: close\r\n\r\n",
    ],
)
@on_both_loops
async def test_a_connection_that_will_be_closed_is_not_used_again(answer: bytes) -> None:
    saying = Saying(answer)
    async with server(saying) as url, http() as asking:
        for _ in range(2):
            await whole(asking, url)
    assert saying.connections == 2


@on_both_loops
async def test_a_body_that_ends_with_a_reset_is_not_whole() -> None:
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await request(reader)
        writer.write(HEAD + b"\r\nhello")
        await writer.drain()
        await asyncio.sleep(0.1)
        hard = writer.get_extra_info("socket")
        hard.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        writer.transport.abort()

    async with server(handle) as url, http() as asking:
        reply = await post(asking, url)
        assert await reply.chunk() == b"hello"
        with pytest.raises(BrokenError):
            await reply.chunk()
        await reply.close()


@pytest.mark.parametrize(
    "answer",
    [
        HEAD + b"x: " + b"a" * 200_000,
        HEAD + b"".join(b"x-%d: a\r\n" % number for number in range(20_000)),
        b"HTTP/1.1 100 Continue\r\n\r\n" * 10_000,
    ],
    ids=["one header", "many headers", "preliminary answers"],
)
@on_both_loops
async def test_headers_without_end(answer: bytes) -> None:
    pieces = [answer[place : place + 10_000] for place in range(0, len(answer), 10_000)]
    async with server(Saying(*pieces)) as url, http() as asking:
        with pytest.raises(BrokenError, match="headers are too large"):
            await post(asking, url)


@on_both_loops
async def test_a_trailer_without_end() -> None:
    pieces = [HEAD + b"transfer-encoding: chunked\r\n\r\n1\r\na\r\n0\r\nx: ", *[b"a" * 10_000] * 20]
    async with server(Saying(*pieces)) as url, http() as asking:
        reply = await post(asking, url)
        with pytest.raises(BrokenError, match="headers are too large"):
            await reply.read()
        await reply.close()


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 101 Switching Protocols\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\ncontent-length: 2\r\n\r\n",
        b"SSH-2.0-x\r\n",
    ],
)
@on_both_loops
async def test_what_is_no_answer(answer: bytes) -> None:
    async with server(Saying(answer)) as url, http() as asking:
        with pytest.raises(BrokenError, match="is not HTTP"):
            await post(asking, url)


@on_both_loops
async def test_a_chunk_that_has_no_size() -> None:
    async with (
        server(Saying(HEAD + b"transfer-encoding: chunked\r\n\r\n2\r\nhi\r\n", b"zz\r\n")) as url,
        http() as asking,
    ):
        reply = await post(asking, url)
        assert await reply.chunk() == b"hi"
        with pytest.raises(BrokenError, match="is not HTTP"):
            await reply.chunk()
        await reply.close()


@on_both_loops
async def test_a_large_request_and_a_large_answer_that_is_read_in_steps() -> None:
    size = 8_000_000
    saying = Saying(HEAD + b"content-length: %d\r\n\r\n" % size, b"x" * size)
    async with server(saying) as url, http() as asking:
        for _ in range(2):
            reply = await post(asking, url, b"y" * size)
            await asyncio.sleep(0.05)  # so that reading is paused
            assert await reply.read() == b"x" * size
            await reply.close()
        assert saying.connections == 1
        assert [len(one) - size < 300 for one in saying.requests] == [True, True]


@on_both_loops
async def test_an_answer_that_was_not_read_leaves_its_connection_usable() -> None:
    saying = Saying(HEAD + b"content-length: 60000\r\n\r\n" + b"x" * 60_000)
    async with server(saying) as url, http() as asking:
        for _ in range(2):
            reply = await post(asking, url)
            await until(lambda: reply.complete)  # noqa: B023 - awaited here
            await reply.close()
        assert saying.connections == 1


@on_both_loops
async def test_who_answers_before_it_has_the_request_gets_no_other_on_that_connection() -> None:
    connections = 0

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 413 Too Large\r\ncontent-length: 2\r\n\r\nno")
        await asyncio.sleep(5)

    async with server(handle) as url, http() as asking:
        for _ in range(2):
            reply = await post(asking, url, b"y" * 30_000_000)
            assert (reply.status, await reply.read()) == (413, b"no")
            await reply.close()
    assert connections == 2


@on_both_loops
async def test_who_does_not_wait_any_longer_loses_nothing() -> None:
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await request(reader)
        writer.write(HEAD + b"content-length: 5\r\n\r\n")
        for byte in b"hello":
            await asyncio.sleep(0.05)
            writer.write(bytes([byte]))

    async with server(handle) as url, http() as asking:
        reply = await post(asking, url)
        found = b""
        while len(found) < 5:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.012):
                    found += await reply.chunk()
        assert (found, await reply.chunk()) == (b"hello", b"")
        await reply.close()


@on_both_loops
async def test_many_at_once_each_get_their_own() -> None:
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            body = (await request(reader)).partition(b"\r\n\r\n")[2]
            await asyncio.sleep(int(body) % 7 / 1000)
            writer.write(HEAD + b"content-length: %d\r\n\r\n%b" % (len(body), body))

    async with server(handle) as url, http() as asking:
        for _ in range(3):
            bodies = [b"%d" % number for number in range(100)]
            assert await asyncio.gather(*(whole(asking, url, body) for body in bodies)) == bodies


@on_both_loops
async def test_a_connection_that_nobody_needs_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "KEEP_ALIVE_SECONDS", 0.2)
    closed = asyncio.Event()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await request(reader)
        writer.write(OK)
        await reader.read()
        closed.set()

    async with server(handle) as url, http(idle=0.4) as asking:
        assert await whole(asking, url) == b"hi"
        await asyncio.wait_for(closed.wait(), 10)


@on_both_loops
async def test_a_closed_connection_leaves_nothing_behind() -> None:
    """Without a collection of garbage: what closes must not pile up until there is one."""
    saying = Saying(HEAD + b"connection: close\r\ncontent-length: 2\r\n\r\nhi")
    gc.collect()
    gc.disable()
    try:
        async with server(saying) as url, http() as asking:
            for _ in range(5):
                assert await whole(asking, url) == b"hi"
            await until(lambda: not any(isinstance(one, Connection | HttpReply) for one in gc.get_objects()))
    finally:
        gc.enable()
