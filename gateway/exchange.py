"""One HTTP exchange as the pipeline sees it: read a bounded body, notice that the caller left, write the answer."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from gateway.errors import ApiError, ClientGoneError

Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]

DISCARD_FACTOR = 4
"""A body over the limit is read and dropped up to this multiple of it: who is still sending would not see the 413."""


class Exchange:
    """Wraps one ASGI call. `gone`: the caller has closed its connection; what is written from then on is dropped."""

    def __init__(self, scope: Mapping[str, Any], receive: Receive, send: Send) -> None:
        self.method: str = scope["method"]
        self.headers: dict[str, str] = {
            name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]
        }
        self.gone = False
        self.started = False
        self.complete = False
        self._receive = receive
        self._send = send

    async def read_body(self, limit: int, seconds: float) -> bytes:
        """The whole body, at most `limit` bytes, at most `seconds` after the headers.

        Raises ApiError 413 or 408, or ClientGoneError. Never holds more than `limit` bytes and one chunk.
        """
        body = bytearray()
        size = 0
        try:
            async with asyncio.timeout(seconds):
                while True:
                    message = await self._receive()
                    if message["type"] == "http.disconnect":
                        self.gone = True
                        raise ClientGoneError
                    size += len(message.get("body", b""))
                    if size <= limit:
                        body += message.get("body", b"")
                    elif size > limit * DISCARD_FACTOR:
                        raise _too_large(limit)
                    if not message.get("more_body", False):
                        break
        except TimeoutError:
            text = f"The request body did not arrive within {seconds:g} seconds; {size} bytes had come."
            raise ApiError(408, "request_timeout", text, headers={"connection": "close"}) from None
        if size > limit:
            raise _too_large(limit)
        return bytes(body)

    async def wait_gone(self) -> None:
        """Return when the caller has closed its connection. Call it once the body is read."""
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.gone = not self.complete

    async def start(self, status: int, headers: Mapping[str, str]) -> None:
        self.started = True
        pairs = [(name.encode(), value.encode()) for name, value in headers.items()]
        await self._send({"type": "http.response.start", "status": status, "headers": pairs})

    async def write(self, data: bytes, *, last: bool = False) -> None:
        """Send `data`; waits while the caller reads slower than we write, so nothing piles up here."""
        if last:
            self.complete = True
        await self._send({"type": "http.response.body", "body": data, "more_body": not last})

    async def respond(self, status: int, headers: Mapping[str, str], body: bytes) -> None:
        """A whole answer with its length."""
        await self.start(status, {"content-type": "application/json", **headers, "content-length": str(len(body))})
        await self.write(body, last=True)


def _too_large(limit: int) -> ApiError:
    text = f"The request body is larger than the limit of {limit} bytes. Send less, or ask the operator to raise it."
    return ApiError(413, "request_too_large", text, headers={"connection": "close"})
