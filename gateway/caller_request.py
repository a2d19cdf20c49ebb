"""One request that came over a connection, as an ASGI application sees it: its body in, its answer out."""

import asyncio
import http
import urllib.parse
from collections.abc import Iterable
from typing import Any, Literal, Protocol

import httptools
import structlog

JOINED_BYTES = 64 * 1024
"""An answer up to this size goes out in one piece with its headers."""
BUFFERED_BYTES = 64 * 1024
"""Of a body that nobody takes; then its connection is not read any further."""
_STATUS_LINES = {int(status): f"HTTP/1.1 {status:d} {status.phrase}\r\n".encode() for status in http.HTTPStatus}
_WITHOUT_BODY = (204, 304)
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_FAILED = b"Internal Server Error"
_FAILED_HEADERS = [
    (b"content-type", b"text/plain"),
    (b"content-length", b"%d" % len(_FAILED)),
    (b"connection", b"close"),
]

Headers = Iterable[tuple[bytes, bytes]]

log = structlog.get_logger()


class Line(Protocol):
    """The connection that a request came over."""

    is_full: bool
    """What was written is not taken as fast."""

    def default_headers(self) -> list[tuple[bytes, bytes]]: ...
    def write(self, data: bytes) -> None: ...
    async def writable(self) -> None: ...
    def resume_reading(self) -> None: ...
    def answered(self, request: "CallerRequest") -> None: ...
    def close(self) -> None: ...


class CallerRequest:
    """`receive` and `send` are ASGI's. What is sent after the caller has left is dropped.

    `old`: of HTTP/1.0, which knows no chunks and keeps no connection.
    """

    __slots__ = (
        "_continue",
        "_event",
        "_framing",
        "_head",
        "_left",
        "_line",
        "_more",
        "_old",
        "_pieces",
        "_told_end",
        "_unread",
        "complete",
        "disconnected",
        "keep_alive",
        "scope",
        "size",
        "started",
    )

    def __init__(self, line: Line, scope: dict[str, Any], *, keep_alive: bool, old: bool, expects: bool) -> None:
        self.scope = scope
        self.keep_alive = keep_alive
        self.started = False
        """Some of the answer was handed to the connection. Until then another start takes the place of the first, whose
        head waits for the body where there is a content-length."""
        self.complete = False
        """The whole answer was handed to the connection."""
        self.disconnected = False
        self.size = 0
        """Bytes of its body that have come."""
        self._line = line
        self._old = old
        self._continue = expects
        """It waits for a word before it sends its body."""
        self._pieces: list[bytes] = []
        self._unread = 0
        self._more = True
        self._told_end = False
        self._event: asyncio.Event | None = None
        self._framing: Literal["none", "length", "chunks", "close"] = "none"
        self._head = b""
        self._left = 0
        """Bytes of the answer that are still to come by its content-length."""

    async def run(self, app: Any) -> None:
        try:
            await app(self.scope, self.receive, self.send)
        except asyncio.CancelledError:
            pass  # the server stops
        except Exception as error:
            log.error("the application failed", path=self.scope["path"], exc_info=error)
        if self.complete or self.disconnected:
            return
        if self.started:
            self._line.close()
        else:
            await self._fail()

    async def _fail(self) -> None:
        await self.send({"type": "http.response.start", "status": 500, "headers": _FAILED_HEADERS})
        await self.send({"type": "http.response.body", "body": _FAILED})

    # What its connection tells

    @property
    def has_come(self) -> bool:
        """All of its body is here."""
        return not self._more

    def adds(self, piece: bytes) -> bool:
        """More of its body. Whether there is room for yet more."""
        self.size += len(piece)
        self._pieces.append(piece)
        self._unread += len(piece)
        self._wake()
        return self._unread <= BUFFERED_BYTES

    def ends(self) -> None:
        """All of its body has come."""
        self._more = False
        self._wake()

    def lost(self) -> None:
        self.disconnected = not self.complete
        self._wake()

    def _wake(self) -> None:
        if self._event is not None:
            self._event.set()

    # ASGI

    async def receive(self) -> dict[str, Any]:
        if self._continue and not self.started:
            self._line.write(_CONTINUE)
        self._continue = False
        self._line.resume_reading()
        while not self.disconnected and not self.complete:
            if self._pieces or not (self._more or self._told_end):
                pieces, self._pieces, self._unread = self._pieces, [], 0
                self._told_end = not self._more
                body = pieces[0] if len(pieces) == 1 else b"".join(pieces)
                return {"type": "http.request", "body": body, "more_body": self._more}
            if self._event is None:
                self._event = asyncio.Event()
            self._event.clear()
            await self._event.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        if self._line.is_full and not self.disconnected:
            await self._line.writable()
        if self.disconnected:
            return
        kind = message["type"]
        if kind == "http.response.start" and not self.started:
            self._start(message["status"], message.get("headers", ()))
        elif kind == "http.response.body" and (self._head or self.started) and not self.complete:
            self._send(message.get("body", b""), not message.get("more_body", False))
        else:
            raise RuntimeError(f"{kind} cannot be sent now")

    def _start(self, status: int, headers: Headers) -> None:
        pieces = [_STATUS_LINES.get(status) or b"HTTP/1.1 %d \r\n" % status]
        lines = 1
        length: int | None = None
        says_close = False
        for name, value in (*self._line.default_headers(), *headers):
            name = name.lower()
            if name == b"content-length":
                length = int(value)
            elif name == b"connection":
                says_close = b"close" in value.lower()
            elif name == b"transfer-encoding":  # ours to choose
                continue
            pieces += (name, b": ", value, b"\r\n")
            lines += 1
        self._framing = self._framed(status, length)
        if self._framing == "chunks":
            pieces.append(b"transfer-encoding: chunked\r\n")
            lines += 1
        if says_close or self._framing == "close" or (self._continue and self._more):
            self.keep_alive = False  # lastly: it was not asked for its body, and may take that for a reason to keep it
        if not self.keep_alive and not says_close:
            pieces.append(b"connection: close\r\n")
            lines += 1
        head = b"".join(pieces)
        if head.count(b"\n") != lines or head.count(b"\r") != lines or b"\0" in head:
            raise RuntimeError("a header of the answer has a line break in it")
        self._left = length or 0
        if self._framing == "length":
            self._head = head + b"\r\n"  # goes out with what follows at once
        else:
            self.started, self._head = True, b""
            self._line.write(head + b"\r\n")

    def _framed(self, status: int, length: int | None) -> Literal["none", "length", "chunks", "close"]:
        if status in _WITHOUT_BODY or self.scope["method"] == "HEAD":
            return "none"
        if length is not None:
            return "length"
        return "close" if self._old else "chunks"

    def _send(self, body: bytes, last: bool) -> None:
        if self._framing == "chunks":
            data = self._chunk(body) + b"0\r\n\r\n" if last else self._chunk(body)
        elif self._framing == "none":
            data = b""
        else:
            data = body
            if self._framing == "length":
                data = self._counted(body, last)
        if data:
            self._line.write(data)
        if last:
            self.complete = True
            self._wake()
            self._line.answered(self)

    def _chunk(self, body: bytes) -> bytes:
        """What is still to be written of the chunk: a large body is not copied, as many may be sent the same one."""
        if len(body) <= JOINED_BYTES:
            return b"%x\r\n%b\r\n" % (len(body), body) if body else b""
        self._line.write(b"%x\r\n" % len(body))
        self._line.write(body)
        return b"\r\n"

    def _counted(self, body: bytes, last: bool) -> bytes:
        self._left -= len(body)
        if self._left < 0 or (last and self._left):
            raise RuntimeError("the answer is not as long as its content-length says")
        head, self._head = self._head, b""
        if not head:
            return body
        self.started = True
        if len(body) <= JOINED_BYTES:
            return head + body
        self._line.write(head)
        return body


def scope_of(method: bytes, target: bytes, headers: list[tuple[bytes, bytes]], version: str) -> dict[str, Any]:
    """What the ASGI scope of a request says of itself; its connection adds what it knows."""
    url = httptools.parse_url(target)
    path = url.path.decode("ascii")
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": version,
        "method": method.decode("ascii"),
        "scheme": "http",
        "path": urllib.parse.unquote(path) if "%" in path else path,
        "raw_path": url.path,
        "root_path": "",
        "query_string": url.query or b"",
        "headers": headers,
    }
