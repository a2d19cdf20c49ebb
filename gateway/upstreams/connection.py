"""One HTTP/1.1 connection to an upstream, and the answer that comes over it, parsed by httptools as it comes."""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, cast

import httptools

from gateway.headers import read_headers
from gateway.upstreams.transport import BrokenError, SilentError

MAX_REPLY_BYTES = 64 * 1024 * 1024
"""Larger than any whole answer; what an upstream sends beyond it is not kept in memory."""
MAX_HEADER_BYTES = 64 * 1024
"""Of headers, trailers, preliminary answers: what is no body, and is kept until it is whole."""
READ_BUFFER_BYTES = 64 * 1024
"""Of a body that nobody takes; then its connection is not read any further."""
JOINED_BYTES = 64 * 1024
"""A request's body up to this size goes out in one piece with its headers."""
KEEP_ALIVE_SECONDS = 4.0
"""An idle connection is not used again after this: servers commonly close theirs after 5 seconds."""


class Origin(NamedTuple):
    host: str
    port: int
    tls: bool


class Times(NamedTuple):
    """What one exchange may take, in seconds."""

    first_byte: float
    """Until the headers."""
    idle: float
    """Between two pieces of the body."""
    total: float | None


class HttpReply:
    """An answer, or the wait for one. Its connection fills it in."""

    __slots__ = (
        "_began",
        "_connection",
        "_error",
        "_pieces",
        "_size",
        "_times",
        "_waiter",
        "_waits_since",
        "complete",
        "pairs",
        "status",
    )

    def __init__(self, connection: "Connection", times: Times) -> None:
        self.status = 0
        """0 until the headers are here."""
        self.pairs: list[tuple[bytes, bytes]] = []
        """The headers as they came."""
        self.complete = False
        """The body's end has come."""
        self._connection: Connection | None = connection
        self._times = times
        self._began = time.monotonic()
        self._pieces: list[bytes] = []
        self._size = 0
        self._error: BrokenError | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._waits_since = 0.0

    @property
    def headers(self) -> Mapping[str, str]:
        return read_headers([(name.lower(), value.strip()) for name, value in self.pairs])

    @property
    def at_hand(self) -> bool:
        return bool(self._pieces)

    async def answered(self) -> None:
        """Return when the headers are here. Raises BrokenError."""
        while not self.status:
            if self._error is not None:
                raise self._error
            await self._wait()

    async def chunk(self) -> bytes:
        while not self._pieces:  # what came before the connection broke is part of the answer
            if self.complete:
                return b""
            if self._error is not None:
                raise self._error
            await self._wait()
        return self._taken()

    async def read(self) -> bytes:
        pieces: list[bytes] = []
        size = 0
        while piece := await self.chunk():
            pieces.append(piece)
            size += len(piece)
            if size > MAX_REPLY_BYTES:
                raise BrokenError(f"it sent more than {MAX_REPLY_BYTES} bytes")
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    async def drain(self, seconds: float) -> None:
        if self.complete:
            return
        try:
            async with asyncio.timeout(seconds):
                while await self.chunk():
                    pass
        except (TimeoutError, BrokenError):
            pass

    async def close(self) -> None:
        self.leave()

    def leave(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.left()
            self._pieces.clear()
            self._error = self._error or BrokenError("it was closed")

    async def _wait(self) -> None:
        self._waits_since = time.monotonic()
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _taken(self) -> bytes:
        pieces, self._pieces, self._size = self._pieces, [], 0
        if self._connection is not None:
            self._connection.resume()
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    # What its connection tells

    def begins(self, status: int) -> None:
        self.status = status
        self._wake()

    def adds(self, piece: bytes) -> bool:
        """Whether there is room for more."""
        self._pieces.append(piece)
        self._size += len(piece)
        if self._waiter is not None:
            self._wake()
        return self._size < READ_BUFFER_BYTES

    def ends(self) -> None:
        self.complete = True
        self._wake()

    def fails(self, error: BrokenError) -> None:
        if not self.complete and self._error is None:
            self._error = error
            self._wake()

    def overdue(self, now: float) -> SilentError | None:
        """What took too long. A slow caller, who does not wait for more, is no silence."""
        if self.complete:
            return None
        times = self._times
        if not self.status:
            late = now - self._began >= times.first_byte
            return SilentError("it did not answer in time") if late else None
        if times.total is not None and now - self._began >= times.total:
            return SilentError("it took too long to complete its answer")
        if self._waiter is not None and now - self._waits_since >= times.idle:
            return SilentError("it said nothing for too long")
        return None

    def _wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)


class Connection(asyncio.Protocol):
    """Serves one request at a time. `free` is told when it can take another, `lost` when it is closed."""

    __slots__ = (
        "_free",
        "_free_since",
        "_is_open",
        "_is_paused",
        "_lost",
        "_parser",
        "_reply",
        "_reusable",
        "_transport",
        "_unread",
        "origin",
    )

    def __init__(
        self, origin: Origin, free: Callable[["Connection"], None], lost: Callable[["Connection"], None]
    ) -> None:
        self.origin = origin
        self._free = free
        self._lost = lost
        self._free_since = time.monotonic()
        self._is_open = True
        self._reply: HttpReply | None = None
        self._reusable = True
        self._is_paused = False
        self._unread = 0
        """Bytes since the parser last made something of them."""

    def ask(self, head: bytes, body: bytes, times: Times) -> HttpReply:
        """Send a request. It has to be free."""
        reply = self._reply = HttpReply(self, times)
        self._unread = 0
        if len(body) <= JOINED_BYTES:
            self._transport.write(head + body)
        else:
            self._transport.write(head)
            self._transport.write(body)
        return reply

    def left(self) -> None:
        """The reply is not read any further."""
        reply, self._reply = self._reply, None
        in_step = reply is not None and reply.complete and self._reusable and self._can_send()
        if in_step and not self._transport.get_write_buffer_size():  # else it answered before it had the request
            self.resume()
            self._free_since = time.monotonic()
            self._free(self)
        else:
            self._transport.abort()

    def is_fresh(self) -> bool:
        """Whether it is still open, and was not idle for too long."""
        return self._can_send() and time.monotonic() - self._free_since < KEEP_ALIVE_SECONDS

    def _can_send(self) -> bool:
        return self._is_open and not self._transport.is_closing()

    def look(self, now: float) -> None:
        """End what takes too long, and a connection that nobody needed for long."""
        if self._reply is None:
            if now - self._free_since >= KEEP_ALIVE_SECONDS:
                self._transport.close()
        elif (error := self._reply.overdue(now)) is not None:
            self._breaks(error)

    def abort(self) -> None:
        self._transport.abort()

    def resume(self) -> None:
        if self._is_paused:
            self._is_paused = False
            if self._can_send():
                self._transport.resume_reading()

    def _breaks(self, error: BrokenError) -> None:
        if self._reply is not None:
            self._reply.fails(error)
        self._transport.abort()

    # What the event loop calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's own is none by its class
        self._parser = httptools.HttpResponseParser(self)

    def data_received(self, data: bytes) -> None:
        if self._reply is None:  # nobody asked
            self._transport.abort()
            return
        self._unread += len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            self._breaks(BrokenError("what it sent is not HTTP"))
        else:
            if self._unread > MAX_HEADER_BYTES:
                self._breaks(BrokenError("its headers are too large"))

    def connection_lost(self, exc: Exception | None) -> None:
        self._is_open = False
        del self._parser  # which holds us
        self._lost(self)
        reply = self._reply
        if reply is None:
            return
        if exc is None and reply.status and _ends_with_its_connection(reply.pairs):
            reply.ends()
        else:
            reply.fails(BrokenError(str(exc or "") or "before its answer was complete"))

    # What the parser calls, while there is a reply

    def on_message_begin(self) -> None:
        assert self._reply is not None
        if self._reply.complete:  # another answer, which nobody asked for
            self._reusable = False

    def on_header(self, name: bytes, value: bytes) -> None:
        assert self._reply is not None
        if not self._reply.status:  # else it is a trailer
            self._reply.pairs.append((name, value))

    def on_headers_complete(self) -> None:
        assert self._reply is not None
        status = self._parser.get_status_code()
        if self._reply.status:
            return
        if status < 200:  # the answer follows
            self._reply.pairs.clear()
            return
        self._unread = 0
        self._reply.begins(status)

    def on_body(self, body: bytes) -> None:
        reply = self._reply
        assert reply is not None
        self._unread = 0
        if not reply.complete and not reply.adds(body) and not self._is_paused:
            self._is_paused = True
            self._transport.pause_reading()

    def on_message_complete(self) -> None:
        assert self._reply is not None
        if self._reply.status and not self._reply.complete:
            self._reusable = self._parser.should_keep_alive()
            self._reply.ends()


def _ends_with_its_connection(pairs: Sequence[tuple[bytes, bytes]]) -> bool:
    """Whether an answer with these headers has no other end (RFC 9112, 6.3)."""
    for name, value in pairs:
        name = name.lower()
        if name == b"content-length" or (name == b"transfer-encoding" and value.rstrip().lower().endswith(b"chunked")):
            return False
    return True
