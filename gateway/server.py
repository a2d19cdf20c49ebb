"""uvicorn with what it lacks: a deadline and a size limit for request headers, bodies beside `Upgrade`, an end for
callers that do not read, and word of a connection that is lost."""

import asyncio
import contextlib
import gc
import resource
import sys
from typing import Any, cast

import httptools
import uvicorn
from litestar import Litestar
from litestar.routes import ASGIRoute
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from gateway.api.routes import SURFACES
from gateway.exchange import PEER, Peer
from gateway.settings import Settings

MAX_HEADER_BYTES = 64 * 1024
BACKLOG = 10_000
"""Connections that wait to be accepted; the kernel may allow fewer (net.core.somaxconn)."""
OPEN_FILES = 65_536
STALLED_SECONDS = 60.0
"""A caller that takes nothing of its answer for so long is gone: it would hold its place, here and upstream, for ever.
"""
YOUNG_OBJECTS = 20_000


def protocol(header_seconds: float) -> type[asyncio.Protocol]:
    """An HTTP protocol class that closes connections whose headers are not complete within `header_seconds`."""

    class GuardedProtocol(HttpToolsProtocol):
        _peer: Peer
        _deadline: asyncio.TimerHandle | None = None
        _header_bytes = 0
        _unread_bytes = 0
        """Received since the parser last made something of it: it holds a header's value until its end."""
        _in_headers = True
        _data = b""
        _stalled: asyncio.TimerHandle | None = None
        _unsent = 0
        _again = b""
        """What is to be parsed anew, after a wish to upgrade."""

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self._peer = Peer()
            self._arm()

        def data_received(self, data: bytes) -> None:
            self._unread_bytes += len(data)
            while data:
                self._data, self._again = data, b""
                super().data_received(data)
                data = self._again
            if self._unread_bytes > MAX_HEADER_BYTES:
                self._answer(b"431 Request Header Fields Too Large")
            if self.cycle is None or self.cycle.response_complete:  # of a next request not all headers are here
                self._arm()

        def on_message_begin(self) -> None:
            super().on_message_begin()
            cast("dict[str, Any]", self.scope)[PEER] = self._peer
            self._peer.request_is_here = False
            self._header_bytes = 0
            self._in_headers = True

        def on_url(self, url: bytes) -> None:
            super().on_url(url)
            self._count(len(url))

        def on_header(self, name: bytes, value: bytes) -> None:
            if self._in_headers:  # a trailer behind the body could pass for what a proxy in front has checked
                super().on_header(name, value)
            self._count(len(name) + len(value))

        def _count(self, size: int) -> None:
            self._unread_bytes = 0
            self._header_bytes += size
            if self._header_bytes > MAX_HEADER_BYTES:
                self._answer(b"431 Request Header Fields Too Large")

        def on_headers_complete(self) -> None:
            self._unread_bytes = 0
            self._in_headers = False
            self._disarm()
            if not self.transport.is_closing() and not self._asks_for_upgrade():
                super().on_headers_complete()

        def on_body(self, body: bytes) -> None:
            self._unread_bytes = 0
            if not self.transport.is_closing():
                super().on_body(body)

        def on_message_complete(self) -> None:
            self._unread_bytes = 0
            if not self.transport.is_closing() and not self._asks_for_upgrade():
                super().on_message_complete()
                self._peer.request_is_here = True

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
            self._again = b"".join([*head, b"\r\n", self._data[stopped.args[0] :]])

        def pause_writing(self) -> None:
            super().pause_writing()
            self._watch_reader()

        def resume_writing(self) -> None:
            self._unwatch_reader()
            super().resume_writing()

        def _watch_reader(self) -> None:
            self._unsent = self.transport.get_write_buffer_size()
            self._stalled = self.loop.call_later(STALLED_SECONDS, self._look_at_reader)

        def _unwatch_reader(self) -> None:
            if self._stalled is not None:
                self._stalled.cancel()
                self._stalled = None

        def _look_at_reader(self) -> None:
            if self.transport.get_write_buffer_size() == self._unsent:
                self.transport.abort()
            else:
                self._watch_reader()

        def connection_lost(self, exc: Exception | None) -> None:
            self._disarm()
            self._unwatch_reader()
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


class Front:
    """The application, with a short way to the routes that need nothing of its framework."""

    def __init__(self, app: Litestar) -> None:
        self._app: Any = app
        self._direct: dict[str, Any] = {
            route.path: route.route_handler.fn
            for route in app.routes
            if isinstance(route, ASGIRoute) and route.path in SURFACES
        }

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        handler = self._direct.get(scope["path"]) if scope["type"] == "http" else None
        await (handler or self._app)(scope, receive, send)


def config(app: Litestar, settings: Settings) -> uvicorn.Config:
    return uvicorn.Config(
        Front(app),
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


def collect_seldom() -> None:
    """Let the garbage collector look at new objects alone, and after many of them: requests leave next to no cycles,
    and what is loaded by now stays."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS, 20, 20)
