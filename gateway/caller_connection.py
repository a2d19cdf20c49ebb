"""A caller's connection: HTTP/1.1 read by httptools, its requests handed to the ASGI application one after the other.

It takes the place of uvicorn's own protocol, which costs more and lacks a deadline and a size limit for headers, bodies
beside `Upgrade`, an end for callers that do not read, and word of a connection that is lost.
"""

import asyncio
import contextlib
import time
from collections import deque
from functools import partial
from typing import Any, cast

import httptools
from uvicorn.protocols.utils import get_local_addr, get_remote_addr
from uvicorn.server import ServerState

from gateway.caller_request import CallerRequest, scope_of
from gateway.exchange import PEER, Peer
from gateway.next_task import NextTask
from gateway.refusals import BAD, LARGE, LATE, MAX_HEADER_BYTES, SLOW
from gateway.rounds import Rounds

KEEP_ALIVE_SECONDS = 75.0
"""How long a connection without a request stays open: longer than proxies commonly keep theirs (60 seconds), which
would send a request into one that we are closing."""
LINGER_SECONDS = 5.0
"""How long what still comes is read and dropped after an answer that is the last: to close with bytes unread resets the
connection, and who is still sending may lose the answer."""
LINGER_BYTES = 32 * 1024 * 1024
"""How much of it at most, as large as bodies usually may be: one without end is cut."""
LINGER_REFUSED_BYTES = 1024 * 1024
"""The same after what was no request."""
LEAST_BODY_BYTES = 1024 * 1024
"""What must come of a body within its time, unless it ends before."""
BODY_FACTOR = 2
"""Of its time, so that who reads a body by a clock of its own can say better what is wrong."""
MAX_QUEUED = 100
"""Requests that came before the running one was answered. Behind them the connection takes no more."""
STALLED_SECONDS = 60.0
"""A caller that takes nothing of its answer for so long is gone: it would hold its place, here and upstream, for ever.
"""
_BETWEEN = len(b": \r\n")


class CallerConnection(asyncio.Protocol):
    """`app`: an ASGI application. `header_seconds`: from a request's first byte, or the connection's begin, to the end
    of the request's headers. `body_seconds`: for each LEAST_BODY_BYTES of a body. `state` and `app_state` are
    uvicorn's, whose server closes and counts connections."""

    __slots__ = (
        "_app",
        "_app_state",
        "_body_bytes",
        "_body_seconds",
        "_body_since",
        "_client",
        "_expects",
        "_header_bytes",
        "_header_seconds",
        "_headers",
        "_idle_since",
        "_in_headers",
        "_is_paused",
        "_lingered",
        "_lingers_since",
        "_moved_at",
        "_next_task",
        "_parser",
        "_peer",
        "_queue",
        "_refused",
        "_request",
        "_rounds",
        "_running",
        "_server",
        "_state",
        "_takes_more",
        "_transport",
        "_unread",
        "_unsent",
        "_url",
        "_waits_since",
        "_writable",
        "is_full",
    )

    def __init__(
        self,
        app: Any,
        header_seconds: float,
        body_seconds: float,
        rounds: "Rounds[CallerConnection]",
        state: ServerState,
        app_state: dict[str, Any],
    ) -> None:
        self.is_full = False
        """What is written is not taken as fast: wait until it is `writable`."""
        self._app = app
        self._header_seconds = header_seconds
        self._body_seconds = body_seconds * BODY_FACTOR
        self._rounds = rounds
        self._state = state
        self._app_state = app_state
        self._peer = Peer()
        self._next_task = NextTask()
        self._running: CallerRequest | None = None
        self._queue: deque[CallerRequest] = deque()
        """What was sent before the running one was answered."""
        self._request: CallerRequest | None = None
        """The latest."""
        self._takes_more = True
        self._refused = False
        """What comes is for nobody: the last answer is sent."""
        self._is_paused = False
        self._in_headers = True
        self._header_bytes = 0
        self._unread = 0
        """Received since the parser last made something of it: it holds a header's value until its end."""
        self._url = b""
        self._headers: list[tuple[bytes, bytes]] = []
        self._expects = False
        self._waits_since: float | None = time.monotonic()
        """Since when headers are awaited."""
        self._idle_since: float | None = None
        self._lingers_since: float | None = None
        self._lingered = 0
        """Bytes that were dropped since."""
        self._body_since: float | None = None
        self._body_bytes = 0
        """What had come of a body `_body_since`."""
        self._unsent = 0
        self._moved_at = 0.0
        """When less or more than `_unsent` was last left to send."""
        self._writable: asyncio.Event | None = None

    # What a request needs

    def default_headers(self) -> list[tuple[bytes, bytes]]:
        return self._state.default_headers

    def write(self, data: bytes) -> None:
        if not self._transport.is_closing():
            self._transport.write(data)

    async def writable(self) -> None:
        if self._writable is not None:
            await self._writable.wait()

    def resume_reading(self) -> None:
        if self._is_paused and not self._queue and not self._transport.is_closing():
            self._is_paused = False
            self._transport.resume_reading()

    def answered(self, request: CallerRequest) -> None:
        self._state.total_requests += 1
        self._running = None
        if self._transport.is_closing():
            return
        if not request.keep_alive:
            self._leave(request)
        elif self._queue:
            self._run(self._queue.popleft())
        else:
            self._next_task.prepare()
            if self._waits_since is None:
                self._idle_since = time.monotonic()
            else:  # the next one's headers have begun
                self._waits_since = time.monotonic()
        self.resume_reading()

    def _leave(self, request: CallerRequest) -> None:
        """`request`, the last one, is answered."""
        if request.has_come and self._takes_more:
            self._transport.close()
        else:
            self._linger()

    def _linger(self) -> None:
        self._lingers_since = time.monotonic()
        with contextlib.suppress(OSError):  # it is closed by now
            self._transport.write_eof()

    def close(self) -> None:
        self._transport.close()

    # What the server and its clock call

    def shutdown(self) -> None:
        """No further request: the running one is the last."""
        if self._running is None:
            self._transport.close()
        else:
            self._running.keep_alive = False

    def look(self, now: float) -> None:
        unsent = self._transport.get_write_buffer_size()
        if unsent == 0 or unsent != self._unsent:
            self._unsent, self._moved_at = unsent, now
        elif now - self._moved_at >= STALLED_SECONDS:
            self._transport.abort()
        late = self._waits_since is not None and now - self._waits_since >= self._header_seconds
        if self._is_over(now):
            self._transport.close()
        elif late and self._running is None and self._lingers_since is None:
            self._refuse(LATE)
        elif self._is_slow(now):
            self._refuse(SLOW)

    def _is_over(self, now: float) -> bool:
        """Whether nothing has to come any more."""
        if self._lingers_since is not None:
            return now - self._lingers_since >= LINGER_SECONDS
        return self._idle_since is not None and now - self._idle_since >= KEEP_ALIVE_SECONDS

    def _is_slow(self, now: float) -> bool:
        """Whether of a body that is awaited too little comes: not every application has a clock for it."""
        request = self._request
        if request is None or request.has_come or request.complete or self._is_paused:
            self._body_since = None
        elif self._body_since is None or request.size - self._body_bytes >= LEAST_BODY_BYTES:
            self._body_since, self._body_bytes = now, request.size
        else:
            return now - self._body_since >= self._body_seconds
        return False

    def _refuse(self, answer: bytes) -> None:
        """End the connection, with an answer unless another has begun."""
        if self._refused or self._transport.is_closing():
            return
        if self._lingers_since is None and (self._running is None or not self._running.started):
            self.write(answer)
            self._refused = True
            self._waits_since = self._idle_since = None
            self._linger()
            self._lose()
        else:
            self._transport.close()

    def _lose(self) -> None:
        """Nothing that is sent from now on arrives."""
        for request in (self._running, self._request, *self._queue):
            if request is not None:
                request.lost()
        self._running = self._request = None
        self._queue.clear()
        self._next_task.cancel()
        self._peer.lost()

    def _run(self, request: CallerRequest) -> None:
        self._running = request
        task = self._next_task.begin(partial(request.run, self._app))
        self._state.tasks.add(task)
        task.add_done_callback(self._state.tasks.discard)

    def _pause_reading(self) -> None:
        if not self._is_paused:
            self._is_paused = True
            self._transport.pause_reading()

    # What the event loop calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's own is none by its class
        self._server, self._client = get_local_addr(self._transport), get_remote_addr(self._transport)
        self._parser = self._new_parser()
        self._state.connections.add(cast(Any, self))
        self._rounds.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._state.connections.discard(cast(Any, self))
        self._rounds.discard(self)
        self._lose()
        self.resume_writing()
        del self._parser  # which holds us

    def pause_writing(self) -> None:
        self.is_full = True
        self._writable = asyncio.Event()

    def resume_writing(self) -> None:
        self.is_full = False
        if self._writable is not None:
            self._writable.set()
            self._writable = None

    def data_received(self, data: bytes) -> None:
        self._unread += len(data)
        if self._lingers_since is not None:
            self._lingered += len(data)
            if self._lingered > (LINGER_REFUSED_BYTES if self._refused else LINGER_BYTES):
                self._transport.close()
                return
        while data and not self._refused:
            data = self._parse(data)
        if self._unread > MAX_HEADER_BYTES:
            self._refuse(LARGE)

    def _parse(self, data: bytes) -> bytes:
        """What has to be parsed anew."""
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as stopped:
            return self._without_upgrade(data[stopped.args[0] :])
        except httptools.HttpParserError:
            self._refuse(BAD)
        return b""

    def _without_upgrade(self, rest: bytes) -> bytes:
        """The parser stopped behind the headers of a request that wishes to upgrade, whatever follows.

        We offer no upgrade, so the request goes on as it is (RFC 9110, 7.8): parsed again without the wish. Java's
        HttpClient sends `Upgrade: h2c` with its first POST. A tunnel (CONNECT) has no body, but who is in front of us
        may think so: nothing behind it can be read as a request.
        """
        if self._parser.get_method() == b"CONNECT":
            self._refuse(BAD)
            return b""
        version = self._parser.get_http_version().encode()
        head = [self._parser.get_method(), b" ", self._url, b" HTTP/", version, b"\r\n"]
        for name, value in self._headers:
            if name != b"upgrade":
                head += [name, b": ", value, b"\r\n"]
        self._parser = self._new_parser()
        return b"".join([*head, b"\r\n", rest])

    def _new_parser(self) -> httptools.HttpRequestParser:
        parser = httptools.HttpRequestParser(self)
        # What follows a request that asks to close is for nobody, and no reason to refuse that request.
        parser.set_dangerous_leniencies(lenient_data_after_close=True)
        return parser

    # What the parser calls

    def on_message_begin(self) -> None:
        self._peer.request_is_here = False
        self._idle_since = None
        self._waits_since = time.monotonic()
        self._body_since = None
        self._in_headers = True
        self._header_bytes = 0
        self._url = b""
        self._headers = []
        self._expects = False

    def on_url(self, url: bytes) -> None:
        self._url += url
        self._count(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_headers:  # a trailer behind the body could pass for what a proxy in front has checked
            name = name.lower()
            self._headers.append((name, value))
            if name == b"expect":
                self._expects = value.lower() == b"100-continue"
        self._count(len(name) + len(value) + _BETWEEN)

    def _count(self, size: int) -> None:
        self._unread = 0
        self._header_bytes += size
        if self._header_bytes > MAX_HEADER_BYTES:
            self._refuse(LARGE)

    def on_headers_complete(self) -> None:
        self._unread = 0
        self._in_headers = False
        self._waits_since = None
        if self._refused or self._transport.is_closing() or self._parser.should_upgrade():
            return
        if not self._takes_more:
            self._request = None
            return
        version = self._parser.get_http_version()
        old = version == "1.0"
        self._request = CallerRequest(
            self,
            {
                **scope_of(self._parser.get_method(), self._url, self._headers, version),
                "server": self._server,
                "client": self._client,
                "state": self._app_state.copy(),
                PEER: self._peer,
            },
            keep_alive=not old and self._parser.should_keep_alive(),
            old=old,
            expects=self._expects and not old,
        )
        if self._running is None:
            self._run(self._request)
        else:
            self._queue.append(self._request)
            self._pause_reading()
            if len(self._queue) == MAX_QUEUED:
                self._request.keep_alive = self._takes_more = False

    def on_body(self, body: bytes) -> None:
        self._unread = 0
        request = self._request
        if request is None or request.complete or self._refused or self._transport.is_closing():
            return
        if not request.adds(body):
            self._pause_reading()

    def on_message_complete(self) -> None:
        self._unread = 0
        if self._request is None or self._refused or self._transport.is_closing() or self._parser.should_upgrade():
            return
        self._request.ends()
        self._peer.request_is_here = True
        if self._lingers_since is not None:
            self._transport.close()
        elif self._running is None:
            self._idle_since = time.monotonic()
