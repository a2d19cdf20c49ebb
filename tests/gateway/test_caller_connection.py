"""Callers' connections in front of any ASGI application: what HTTP allows a caller, and an application that fails."""

import asyncio
import contextlib
import contextvars
import gc
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest
import uvicorn

from gateway import caller_connection
from gateway.caller_connection import CallerConnection
from gateway.caller_request import CallerRequest
from gateway.server import connections
from tests.gateway.loops import on_both_loops
from tests.gateway.pooled import until
from tests.gateway.running import Server

GET = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"


async def answer(send: Any, body: bytes, *headers: tuple[bytes, bytes], status: int = 200) -> None:
    await send({"type": "http.response.start", "status": status, "headers": list(headers)})
    await send({"type": "http.response.body", "body": body})


async def body_of(receive: Any) -> bytes:
    body, more = b"", True
    while more:
        message = await receive()
        assert message["type"] == "http.request", message
        body, more = body + message["body"], message["more_body"]
    return body


async def echo(scope: Any, receive: Any, send: Any) -> None:
    body = b"%b %b" % (scope["raw_path"], await body_of(receive))
    await answer(send, body, (b"content-length", b"%d" % len(body)))


@contextlib.asynccontextmanager
async def serving(app: Any, header_seconds: float = 2.0, body_seconds: float = 2.0) -> AsyncIterator[int]:
    """Its port."""
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    made: Any = connections(app, header_seconds, body_seconds)
    server = Server(uvicorn.Config(app, http=made, lifespan="off", log_config=None, timeout_graceful_shutdown=1))
    task = asyncio.create_task(server.serve(sockets=[listener]))
    while not server.started:
        await asyncio.sleep(0.01)
        assert not task.done(), task.exception()
    try:
        yield listener.getsockname()[1]
    finally:
        server.should_exit = True
        await task


async def said(port: int, *pieces: bytes, closes: bool = False) -> bytes:
    """All that comes back until the connection is closed: by us a moment after the latest bytes, or by the server."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    for piece in pieces:
        writer.write(piece)
        await writer.drain()
        await asyncio.sleep(0.02)
    found = b""
    with contextlib.suppress(TimeoutError, ConnectionError):
        while data := await asyncio.wait_for(reader.read(1 << 20), 0.2 if found and not closes else 10):
            found += data
        assert closes, f"it was closed: {found!r}"
    writer.transport.abort()
    return found


@on_both_loops
async def test_requests_in_a_row_are_answered_in_their_order() -> None:
    async def slow(scope: Any, receive: Any, send: Any) -> None:
        await asyncio.sleep(0.1 if scope["path"] == "/1" else 0)
        await echo(scope, receive, send)

    requests = [b"POST /%d HTTP/1.1\r\ncontent-length: 3\r\n\r\nb-%d" % (number, number) for number in (1, 2, 3)]
    async with serving(slow) as port:
        for pieces in ([b"".join(requests)], requests, [b"".join(requests)[:70], b"".join(requests)[70:]]):
            found = await said(port, *pieces)
            assert [found.count(b"/%d b-%d" % (number, number)) for number in (1, 2, 3)] == [1, 1, 1]
            assert found.index(b"/1 b-1") < found.index(b"/2 b-2") < found.index(b"/3 b-3")


@pytest.mark.parametrize("running", [False, True])
@on_both_loops
async def test_who_still_sends_after_its_request_was_refused_gets_the_answer_once(running: bool) -> None:
    """A body that is too slow, and no request behind one that is not answered yet."""
    told = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        while not told:
            message = await receive()
            if message["type"] == "http.disconnect":
                told.append(message)
        await answer(send, b"too late")

    async with serving(app, body_seconds=0.1) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(GET + b"\x16\x03\x01" if running else b"POST / HTTP/1.1\r\ncontent-length: 9\r\n\r\nhalf")
        while not told:  # noqa: ASYNC110 - what is waited for happens elsewhere
            await asyncio.sleep(0.01)
        for _ in range(3):
            writer.write(GET)
            await asyncio.sleep(0.05)
        found = await asyncio.wait_for(reader.read(), 5)
        assert found.startswith(b"HTTP/1.1 400 " if running else b"HTTP/1.1 408 ") and found.count(b"HTTP/1.1") == 1
        writer.transport.abort()


@on_both_loops
async def test_a_refused_connection_is_closed_whatever_follows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(caller_connection, "LINGER_SECONDS", 0.2)
    async with serving(echo, header_seconds=0.2) as port:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        many = b"".join(b"x-%d: %b\r\n" % (number, b"a" * 4096) for number in range(17))
        writer.write(b"GET / HTTP/1.1\r\n" + many + b"\r\nGET / HTTP/1.1\r\nx: ")
        await asyncio.sleep(0.1)
        gc.collect()
        assert any(isinstance(one, CallerConnection) for one in gc.get_objects())
        await until(lambda: not any(isinstance(one, CallerConnection) for one in gc.get_objects()))
        writer.transport.abort()


@on_both_loops
async def test_a_request_knows_nothing_of_the_one_before() -> None:
    said_here: contextvars.ContextVar[str] = contextvars.ContextVar("said_here", default="nothing")
    tasks = set()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        task = asyncio.current_task()
        assert task is not None and task not in tasks
        tasks.add(task)
        body = said_here.get().encode()
        said_here.set(scope["path"])
        await answer(send, body, (b"content-length", b"%d" % len(body)))

    async with serving(app) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for count in (1, 1, 3):
            writer.write(GET * count)
            for _ in range(count):
                found = await asyncio.wait_for(reader.readuntil(b"nothing"), 5)
                assert found.startswith(b"HTTP/1.1 200 OK\r\n")
            await asyncio.sleep(0.05)  # time to prepare for the next
        writer.transport.abort()


@on_both_loops
async def test_a_request_byte_by_byte() -> None:
    request = b"POST /a HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n2\r\nhi\r\n0\r\n\r\n"
    async with serving(echo) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for place in range(len(request)):
            writer.write(request[place : place + 1])
            await asyncio.sleep(0)
        assert await asyncio.wait_for(reader.readuntil(b"/a hi"), 5)
        writer.transport.abort()


@pytest.mark.parametrize(
    ("start", "status"),
    [(b"GET / HTTP/1.1\r\nx: ", 408), (b"\x16\x03\x01", 400), (b"GET / HTTP/1.1\r\nx: " + b"a" * 200_000, 431)],
)
@on_both_loops
async def test_who_is_still_sending_when_refused_does_not_lose_the_answer(start: bytes, status: int) -> None:
    async with serving(echo, header_seconds=0.2) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(start)
        await asyncio.sleep(0.5)
        for _ in range(3):  # to a socket that is closed, the second is answered with a reset
            writer.write(b"\r\n\r\n" + GET)
            await asyncio.sleep(0.05)
        found = await asyncio.wait_for(reader.read(), 5)
        assert found.startswith(b"HTTP/1.1 %d " % status) and found.count(b"HTTP/1.1") == 1
        writer.transport.abort()


@on_both_loops
async def test_an_old_client_gets_no_chunks() -> None:
    async with serving(lambda scope, receive, send: answer(send, b"hello")) as port:
        head, _, body = (await said(port, b"GET / HTTP/1.0\r\n\r\n", closes=True)).partition(b"\r\n\r\n")
        assert body == b"hello" and b"chunked" not in head and b"connection: close" in head
        assert b"5\r\nhello\r\n0\r\n\r\n" in await said(port, GET)


@pytest.mark.parametrize("status", [200, 204, 304])
@on_both_loops
async def test_an_answer_without_a_body(status: int) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await answer(send, b"hello" if scope["method"] == "HEAD" else b"", status=status)

    async with serving(app) as port:
        method = b"HEAD" if status == 200 else b"GET"
        found = await said(port, method + GET[3:], method + GET[3:])
        assert found.count(b"HTTP/1.1 %d " % status) == 2 and b"hello" not in found
        assert found.endswith(b"\r\n\r\n")


@on_both_loops
async def test_who_waits_for_a_word_before_the_body_gets_it() -> None:
    head = b"POST /a HTTP/1.1\r\nexpect: 100-continue\r\ncontent-length: 2\r\n\r\n"
    async with serving(echo) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(head)
        assert await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5) == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(b"hi")
        assert (await asyncio.wait_for(reader.readuntil(b"/a hi"), 5)).startswith(b"HTTP/1.1 200 OK\r\n")
        writer.transport.abort()

    async def refusing(scope: Any, receive: Any, send: Any) -> None:
        await answer(send, b"no", (b"connection", b"close"), status=403)

    async with serving(refusing) as port:
        assert (await said(port, head, closes=True)).startswith(b"HTTP/1.1 403 ")


@on_both_loops
async def test_who_was_not_asked_for_the_body_cannot_send_another_request_in_its_place() -> None:
    head = b"POST /a HTTP/1.1\r\nexpect: 100-continue\r\ncontent-length: 100\r\n\r\n"
    async with serving(lambda scope, receive, send: answer(send, b"no", status=403)) as port:
        found = await said(port, head, GET, closes=True)
        assert found.count(b"HTTP/1.1") == 1 and b"connection: close" in found
    async with serving(echo) as port:  # HTTP/1.0 knows no such word
        found = await said(port, head.replace(b"/1.1", b"/1.0").replace(b"100\r", b"2\r"), b"hi", closes=True)
        assert found.startswith(b"HTTP/1.1 200 ") and found.endswith(b"/a hi")


@on_both_loops
async def test_what_follows_a_tunnel_is_no_request() -> None:
    """A proxy in front of us may take it for the body that the length announces."""
    head = b"CONNECT /a HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(GET)
    async with serving(echo) as port:
        for pieces in ([head, GET], [head + GET]):
            found = await said(port, *pieces, closes=True)
            assert found.startswith(b"HTTP/1.1 400 ") and found.count(b"HTTP/1.1") == 1


@on_both_loops
async def test_who_still_sends_sees_the_last_answer() -> None:
    head = b"POST / HTTP/1.1\r\nconnection: close\r\ncontent-length: 30000000\r\n\r\n"
    async with serving(lambda scope, receive, send: answer(send, b"no", status=403)) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(head)
        for _ in range(30):
            await writer.drain()
            writer.write(b"x" * 1_000_000)
        await writer.drain()
        assert (await asyncio.wait_for(reader.read(), 5)).startswith(b"HTTP/1.1 403 ")
        writer.transport.abort()


@on_both_loops
async def test_who_sends_without_end_is_not_read_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(caller_connection, "LINGER_SECONDS", 0.2)
    head = b"POST / HTTP/1.1\r\nconnection: close\r\ntransfer-encoding: chunked\r\n\r\n"
    async with serving(lambda scope, receive, send: answer(send, b"no", status=403)) as port:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(head)
        with pytest.raises(ConnectionError):
            for _ in range(100):
                writer.write(b"1\r\nx\r\n")
                await writer.drain()
                await asyncio.sleep(0.02)
        writer.transport.abort()


@on_both_loops
async def test_a_body_that_does_not_come_ends_its_connection() -> None:
    """Also where the application has no clock for it."""
    head = b"POST /a HTTP/1.1\r\ncontent-length: 20\r\n\r\n"
    async with serving(echo, body_seconds=0.1) as port:
        assert (await said(port, head, b"hi", closes=True)).startswith(b"HTTP/1.1 408 ")
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(head)
        answered = asyncio.create_task(reader.read())
        for _ in range(19):  # takes longer in all
            if not answered.done():
                writer.write(b"x")
                await asyncio.sleep(0.02)
        with contextlib.suppress(ConnectionError):  # we may have written into what was closed
            assert (await answered).startswith(b"HTTP/1.1 408 ")
        writer.transport.abort()

    async def slow(scope: Any, receive: Any, send: Any) -> None:
        await asyncio.sleep(1.0)
        await echo(scope, receive, send)

    async with serving(slow, body_seconds=0.4) as port:  # it is not the caller that is slow
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"POST /a HTTP/1.1\r\ncontent-length: 3000000\r\n\r\n" + b"x" * 3_000_000)
        assert await asyncio.wait_for(reader.readline(), 10) == b"HTTP/1.1 200 OK\r\n"
        writer.transport.abort()


@on_both_loops
async def test_a_rest_that_is_passed_over_is_no_slow_request(monkeypatch: pytest.MonkeyPatch) -> None:
    head = b"POST / HTTP/1.1\r\ncontent-length: 4\r\n\r\n"
    async with serving(lambda s, r, send: answer(send, b"no", status=403), 0.2, 0.2) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for piece in (head, b"ab", b"cd"):
            writer.write(piece)
            await asyncio.sleep(0.1)
        await asyncio.sleep(0.8)
        writer.write(GET)
        for _ in range(2):
            await asyncio.wait_for(reader.readuntil(b"HTTP/1.1 403 "), 10)
        writer.transport.abort()
    monkeypatch.setattr(caller_connection, "KEEP_ALIVE_SECONDS", 0.3)
    async with serving(lambda s, r, send: answer(send, b"no", status=403)) as port:
        assert (await said(port, head, b"ab", b"cd", closes=True)).count(b"HTTP/1.1") == 1


@on_both_loops
async def test_very_many_short_headers() -> None:
    async with serving(echo) as port:
        assert (await said(port, GET[:-2] + b"a:\r\n" * 10_000 + b"\r\n")).startswith(b"HTTP/1.1 200 ")
        assert (await said(port, GET[:-2] + b"a:\r\n" * 20_000 + b"\r\n", closes=True)).startswith(b"HTTP/1.1 431 ")


@on_both_loops
async def test_very_many_requests_in_a_row() -> None:
    """They are not all kept: those that are not answered were not begun, and their caller can tell."""

    async def slow(scope: Any, receive: Any, send: Any) -> None:
        await asyncio.sleep(0.001)
        await echo(scope, receive, send)

    request = b"POST /%d HTTP/1.1\r\ncontent-length: 2\r\n\r\nhi"
    async with serving(slow) as port:
        found = await said(port, b"".join(request % number for number in range(1000)), closes=True)
        assert found.count(b"HTTP/1.1 200 ") == 1 + caller_connection.MAX_QUEUED
        assert found.count(b"connection: close") == 1 and found.endswith(b"/100 hi")


@on_both_loops
async def test_what_follows_a_request_to_close_is_for_nobody() -> None:
    closing = b"GET /a HTTP/1.1\r\nconnection: close\r\n\r\n"
    async with serving(echo) as port:
        found = await said(port, closing + GET.replace(b"/ ", b"/b "), closes=True)
        assert found.count(b"HTTP/1.1 200") == 1 and found.endswith(b"/a ")


@on_both_loops
async def test_a_body_that_nobody_reads_is_passed_over() -> None:
    async with serving(lambda scope, receive, send: answer(send, scope["raw_path"])) as port:
        found = await said(port, b"POST /a HTTP/1.1\r\ncontent-length: 900000\r\n\r\n", b"x" * 900_000, GET)
        assert found.count(b"HTTP/1.1 200") == 2


@on_both_loops
async def test_a_body_is_not_read_faster_than_the_application_takes_it() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await asyncio.sleep(60)

    async with serving(app) as port:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"POST / HTTP/1.1\r\ncontent-length: 50000000\r\n\r\n")
        sent = 0
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(1):
                while sent < 50_000_000:
                    writer.write(b"x" * 100_000)
                    await writer.drain()
                    sent += 100_000
        writer.transport.abort()
        assert sent < 20_000_000, "what the sockets' buffers hold, not all of it"


@on_both_loops
async def test_an_application_that_fails(caplog: pytest.LogCaptureFixture) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] == "/raises":
            raise ValueError("secret")
        if scope["path"] == "/late":
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"part", "more_body": True})
            raise ValueError("secret")
        if scope["path"] == "/splits":
            await answer(send, b"", (b"x", b"a\r\ny: b"))
        if scope["path"] == "/long":
            await answer(send, b"hello", (b"content-length", b"2"))
        if scope["path"] == "/short":
            await answer(send, b"hello", (b"content-length", b"10"))

    async with serving(app) as port:
        for path in (b"raises", b"silent", b"splits", b"long", b"short"):
            found = await said(port, GET.replace(b"/ ", b"/%b " % path), closes=True)
            assert found.startswith(b"HTTP/1.1 500 ") and b"connection: close" in found, path
            assert b"secret" not in found and b"y: b" not in found
        found = await said(port, GET.replace(b"/ ", b"/late "), closes=True)
        assert found.startswith(b"HTTP/1.1 200 ") and b"part" in found and not found.endswith(b"0\r\n\r\n")


@on_both_loops
async def test_a_start_that_was_not_sent_yet_gives_way_to_another() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"5"), (b"x", b"1")]})
        if scope["path"] == "/late":
            await send({"type": "http.response.body", "body": b"he", "more_body": True})
        with contextlib.suppress(RuntimeError):
            await answer(send, b"sorry", (b"content-length", b"5"), status=503)
        if scope["path"] == "/late":
            await send({"type": "http.response.body", "body": b"llo"})

    async with serving(app) as port:
        found = await said(port, GET, closes=False)
        assert found.startswith(b"HTTP/1.1 503 ") and found.endswith(b"\r\n\r\nsorry") and b"x: 1" not in found
        found = await said(port, GET.replace(b"/ ", b"/late "), closes=False)
        assert found.startswith(b"HTTP/1.1 200 ") and found.endswith(b"\r\n\r\nhello")


@on_both_loops
async def test_nonsense_behind_a_request_never_becomes_part_of_its_answer() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for _ in range(20):
            await send({"type": "http.response.body", "body": b"part", "more_body": True})
            await asyncio.sleep(0.02)

    async with serving(app) as port:
        found = await said(port, GET, b"no request\r\n\r\n", closes=True)
        assert found.count(b"HTTP/1.1") == 1 and b"part" in found and not found.endswith(b"0\r\n\r\n")


@on_both_loops
async def test_an_idle_connection_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(caller_connection, "KEEP_ALIVE_SECONDS", 0.2)
    async with serving(echo) as port:
        assert (await said(port, GET, closes=True)).startswith(b"HTTP/1.1 200 ")


@on_both_loops
async def test_a_large_answer_is_whole() -> None:
    body = b"x" * 5_000_000
    async with serving(lambda s, r, send: answer(send, body, (b"content-length", b"%d" % len(body)))) as port:
        for _ in range(2):
            assert len((await said(port, GET)).partition(b"\r\n\r\n")[2]) == len(body)


@on_both_loops
async def test_a_closed_connection_leaves_nothing_behind() -> None:
    """Without a collection of garbage: what closes must not pile up until there is one."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        while (await receive()).get("more_body"):
            pass
        await answer(send, b"hello", (b"content-length", b"5"))

    gc.collect()
    gc.disable()
    try:
        async with serving(app) as port:
            for _ in range(3):
                await said(port, GET, GET)
                await said(port, GET.replace(b"1.1", b"1.0"), closes=True)
                await said(port, b"GET / HTTP/1.1\r\nconnection: close\r\n\r\n", closes=True)
                _, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(b"POST / HTTP/1.1\r\ncontent-length: 9\r\n\r\nhalf")
                await asyncio.sleep(0.02)
                writer.transport.abort()
            await until(lambda: not any(isinstance(one, CallerConnection | CallerRequest) for one in gc.get_objects()))
    finally:
        gc.enable()
