"""uvicorn with what it lacks: a deadline and a size limit for request headers, bodies beside `Upgrade`, and word of a
connection that is lost."""

import asyncio
import contextlib
import resource
import sys

import httptools
import uvicorn
from litestar import Litestar
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from gateway.exchange import PEER, Peer
from gateway.settings import Settings

MAX_HEADER_BYTES = 64 * 1024
BACKLOG = 10_000
"""Connections that wait to be accepted; the kernel may allow fewer (net.core.somaxconn)."""
OPEN_FILES = 65_536


def protocol(header_seconds: float) -> type[asyncio.Protocol]:
    """An HTTP protocol class that closes connections whose headers are not complete within `header_seconds`."""

    class GuardedProtocol(HttpToolsProtocol):
        _peer: Peer
        _deadline: asyncio.TimerHandle | None = None
        _header_bytes = 0
        _data = b""

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self._peer = Peer()
            self._arm()

        def data_received(self, data: bytes) -> None:
            self._data = data
            super().data_received(data)
            if self.cycle is None or self.cycle.response_complete:  # of a next request not all headers are here
                self._arm()

        def on_message_begin(self) -> None:
            super().on_message_begin()
            self.scope[PEER] = self._peer  # type: ignore[literal-required]
            self._header_bytes = 0

        def on_header(self, name: bytes, value: bytes) -> None:
            super().on_header(name, value)
            self._header_bytes += len(name) + len(value)
            if self._header_bytes > MAX_HEADER_BYTES:
                self._answer(b"431 Request Header Fields Too Large")

        def on_headers_complete(self) -> None:
            self._disarm()
            if not self.transport.is_closing() and not self._asks_for_upgrade():
                super().on_headers_complete()

        def on_message_complete(self) -> None:
            if not self._asks_for_upgrade():
                super().on_message_complete()

        def _asks_for_upgrade(self) -> bool:
            return self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT"

        def _unsupported_upgrade_warning(self) -> None:
            """Called while the parser's HttpParserUpgrade is handled: it stopped behind the headers, whatever follows.

            We offer no upgrade, so the request goes on as it is (RFC 9110, 7.8): parsed again without the wish. Java's
            HttpClient sends `Upgrade: h2c` with its first POST.
            """
            stopped = sys.exception()
            if not isinstance(stopped, httptools.HttpParserUpgrade) or not self._asks_for_upgrade():
                return
            version = self.parser.get_http_version().encode()
            head = [self.parser.get_method(), b" ", self.url, b" HTTP/", version, b"\r\n"]
            for name, value in self.headers:
                if name != b"upgrade":
                    head += [name, b": ", value, b"\r\n"]
            self.parser = httptools.HttpRequestParser(self)
            self.data_received(b"".join([*head, b"\r\n", self._data[stopped.args[0] :]]))

        def connection_lost(self, exc: Exception | None) -> None:
            self._disarm()
            super().connection_lost(exc)
            self._peer.lost()

        def _arm(self) -> None:
            if self._deadline is None and not self.transport.is_closing():
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
        proxy_headers=False,  # anybody can send X-Forwarded-For; see gateway/client_address.py
        backlog=BACKLOG,
        timeout_graceful_shutdown=round(settings.limits.grace_seconds),
    )


def allow_many_connections() -> None:
    """Raise this process's own limit of open files as far as it may, so that thousands of streams fit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES if hard == resource.RLIM_INFINITY else min(OPEN_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
