"""uvicorn with a deadline and a size limit for request headers, which it has not of its own."""

import asyncio

import uvicorn
from litestar import Litestar
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from gateway.settings import Settings

MAX_HEADER_BYTES = 64 * 1024


def protocol(header_seconds: float) -> type[asyncio.Protocol]:
    """An HTTP protocol class that closes connections whose headers are not complete within `header_seconds`."""

    class GuardedProtocol(HttpToolsProtocol):
        _deadline: asyncio.TimerHandle | None = None
        _header_bytes = 0

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self._arm()

        def data_received(self, data: bytes) -> None:
            if self.cycle is None or self.cycle.response_complete:
                self._arm()
            super().data_received(data)

        def on_message_begin(self) -> None:
            super().on_message_begin()
            self._header_bytes = 0

        def on_header(self, name: bytes, value: bytes) -> None:
            super().on_header(name, value)
            self._header_bytes += len(name) + len(value)
            if self._header_bytes > MAX_HEADER_BYTES:
                self._answer(b"431 Request Header Fields Too Large")

        def on_headers_complete(self) -> None:
            self._disarm()
            if not self.transport.is_closing():
                super().on_headers_complete()

        def connection_lost(self, exc: Exception | None) -> None:
            self._disarm()
            super().connection_lost(exc)

        def _arm(self) -> None:
            if self._deadline is None:
                self._deadline = self.loop.call_later(header_seconds, self._answer, b"408 Request Timeout")

        def _disarm(self) -> None:
            if self._deadline is not None:
                self._deadline.cancel()
                self._deadline = None

        def _answer(self, status: bytes) -> None:
            if not self.transport.is_closing():
                self.transport.write(b"HTTP/1.1 " + status + b"\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
                self.transport.close()

    return GuardedProtocol


def config(app: Litestar, settings: Settings) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=protocol(settings.limits.header_seconds),
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,  # anybody can send X-Forwarded-For; the sign-in's brake counts by address
        timeout_graceful_shutdown=round(settings.limits.grace_seconds),
    )
