"""One HTTP exchange as the pipeline sees it: read a bounded body, notice that the caller left, write the answer."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from gateway.api.surface import StreamWriter
from gateway.errors import ApiError, ClientGoneError
from gateway.headers import read_headers
from gateway.recording import Recording
from gateway.trusted import Trusted

Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]

DISCARD_FACTOR = 4
"""A body over the limit is read and dropped up to this multiple of it: who is still sending would not see the 413."""
STREAM_HEADERS = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache"}
PEER = "farthing.peer"
"""Entry of the ASGI scope that holds the connection's `Peer`, put there by our server."""


class Peer:
    """The other end of one connection. A caller that closes only its sending half counts as gone as well."""

    __slots__ = ("on_lost", "request_is_here")

    def __init__(self) -> None:
        self.on_lost: Callable[[], None] | None = None
        self.request_is_here = False
        """All of the request that is served next, or now, has come."""

    def lost(self) -> None:
        on_lost, self.on_lost = self.on_lost, None
        if on_lost is not None:
            on_lost()


class Exchange:
    """Wraps one ASGI call. `gone`: the caller has closed its connection; what is written from then on is dropped."""

    def __init__(self, scope: Mapping[str, Any], receive: Receive, send: Send) -> None:
        self.method: str = scope["method"]
        self.headers = read_headers(scope["headers"])
        self.peer_address: str = (scope.get("client") or ("", 0))[0]
        """Of the socket's other end; "" where there is none."""
        self.trusted = Trusted.of(scope)
        self.gone = False
        self.started = False
        self.complete = False
        self.writing = False
        self.written_at = 0.0
        """When something was last sent, on the monotonic clock."""
        self.writer: StreamWriter | None = None
        """Set while the answer is a stream: how to end it with an error."""
        self.recording: Recording | None = None
        """Takes what is written, where the key says so."""
        self._peer: Peer | None = scope.get(PEER)
        self._lost: Callable[[], None] | None = None
        self._receive = receive
        self._send = send

    async def read_body(self, limit: int, seconds: float) -> bytes:
        """The whole body, at most `limit` bytes, at most `seconds` after the headers.

        Raises ApiError 413 or 408, or ClientGoneError. Never holds more than `limit` bytes and one chunk.
        """
        if self._peer is not None and self._peer.request_is_here:  # most are small, and need no clock
            return await self._read(limit)
        try:
            async with asyncio.timeout(seconds):
                return await self._read(limit)
        except TimeoutError:
            text = f"The request body did not arrive within {seconds:g} seconds."
            raise ApiError(408, "request_timeout", text, headers={"connection": "close"}) from None

    async def _read(self, limit: int) -> bytes:
        pieces: list[bytes] = []
        size = 0
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                self.gone = True
                raise ClientGoneError
            piece = message.get("body", b"")
            size += len(piece)
            if size <= limit:
                pieces.append(piece)
            elif size > limit * DISCARD_FACTOR:
                raise _too_large(limit)
            if not message.get("more_body", False):
                break
        if size > limit:
            raise _too_large(limit)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def watch(self, left: Callable[[], None]) -> None:
        """Call `left` when the caller closes its connection before the answer is complete; until `unwatch`."""

        def lost() -> None:
            if not self.complete:
                self.gone = True
                left()

        if self._peer is not None:
            self._lost = self._peer.on_lost = lost

    def unwatch(self) -> None:
        """The connection's next request may be watching by now."""
        if self._peer is not None and self._peer.on_lost is self._lost:
            self._peer.on_lost = None
        self._lost = None  # it holds us, and what holds itself stays until the collector comes

    def tap(self, take: Callable[[bytes], None]) -> None:
        """Give what is sent of the answer's body to `take` as well."""
        send = self._send

        async def tapped(message: Any) -> None:
            if message["type"] == "http.response.body":
                take(message["body"])
            await send(message)

        self._send = tapped

    async def start(self, status: int, headers: Mapping[str, str]) -> None:
        self.started = True
        # Some values are an upstream's words, in which a line break would begin a header of its own.
        pairs = [(name.encode(), value.encode()) for name, value in headers.items() if value.isprintable()]
        await self._send({"type": "http.response.start", "status": status, "headers": pairs})

    async def start_stream(self, headers: Mapping[str, str], writer: StreamWriter) -> None:
        self.writer = writer
        self.written_at = time.monotonic()
        await self.start(200, {**STREAM_HEADERS, **headers})

    async def write(self, data: bytes, *, last: bool = False) -> None:
        """Send `data`; waits while the caller reads slower than we write, so nothing piles up here."""
        if last:
            self.complete = True
        if self.recording is not None:
            self.recording.answer.add(data)
        self.writing = True
        await self._send({"type": "http.response.body", "body": data, "more_body": not last})
        self.writing = False
        self.written_at = time.monotonic()

    def idle_since(self, moment: float) -> bool:
        """Whether this is an open stream on which nothing was sent since `moment` and nothing is waiting to be."""
        open_stream = self.writer is not None and not (self.complete or self.gone or self.writing)
        return open_stream and self.written_at <= moment

    async def respond(self, status: int, headers: Mapping[str, str], body: bytes) -> None:
        """A whole answer with its length."""
        await self.begin(status, headers, body)
        await self.write(body, last=True)

    async def begin(self, status: int, headers: Mapping[str, str], body: bytes) -> None:
        """The head of a whole answer. Our server sends it with the body; until then another can take its place."""
        await self.start(status, {"content-type": "application/json", **headers, "content-length": str(len(body))})

    async def refuse(self, error: ApiError, headers: Mapping[str, str], body: bytes) -> None:
        """The error as the whole answer (`body`), or as the end of the stream that has begun."""
        if self.complete:
            return
        if self.writer is not None and self.started:
            await self.write(self.writer.fail(error), last=True)
        else:
            await self.respond(error.status, {**headers, **error.headers}, body)


def _too_large(limit: int) -> ApiError:
    text = f"The request body is larger than the limit of {limit} bytes. Send less, or ask the operator to raise it."
    return ApiError(413, "request_too_large", text, headers={"connection": "close"})
