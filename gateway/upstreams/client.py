"""The relay's HTTP client: HTTP/1.1 with keep-alive, over TCP or TLS, on uvloop's transports and httptools' parser.

No cookies, no redirects, no proxy from the environment and no compression: what was sent is what is read, event by
event. An upstream whose bytes nobody takes is not read, so a slow caller does not fill the memory. What failed is never
sent again from here: only who asks knows whether that is safe. It is written for what it costs; see benchmarks.gateway.
"""

import asyncio
import functools
import socket
import ssl
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote, urlsplit

import aiohappyeyeballs

from gateway.rounds import Rounds
from gateway.upstreams.connection import KEEP_ALIVE_SECONDS, Connection, HttpReply, Origin, Times
from gateway.upstreams.transport import UnreachableError

LOOKS = 4
"""At every connection within the shortest time that is allowed for anything."""
NEXT_ADDRESS_SECONDS = 0.25
"""How long one address of a host may take before the next is tried beside it (RFC 8305)."""
_REMEMBERED_URLS = 1024


class HttpClient:
    """Times in seconds. `connect`: until there is a connection; `first_byte`: from the request to the answer's headers;
    `idle`: longest silence within a body; `total`: from the request to the body's end, None without limit.
    """

    def __init__(self, connect: float, first_byte: float, idle: float, total: float | None = None) -> None:
        self._connect_seconds = connect
        self._times = Times(first_byte if total is None else min(first_byte, total), idle, total)
        self._rounds: Rounds[Connection] = Rounds(min(self._times.first_byte, idle, KEEP_ALIVE_SECONDS) / LOOKS)
        self._free: dict[Origin, dict[Connection, None]] = {}
        self._lookups: dict[Origin, asyncio.Task[list[Any]]] = {}

    async def send(self, method: str, url: str, headers: Mapping[str, str], content: bytes | None) -> HttpReply:
        origin, first_lines = _place(method, url)
        lines = "".join([f"{name}: {value}\r\n" for name, value in headers.items()])
        if lines.count("\n") != len(headers) or lines.count("\r") != len(headers) or "\0" in lines:
            raise ValueError("a header of a request to an upstream has a line break in it")
        body = content or b""
        head = f"{first_lines}{lines}content-length: {len(body)}\r\n\r\n".encode("latin-1")
        connection = self._take(origin) or await self._connected(origin)
        reply = connection.ask(head, body, self._times)
        try:
            await reply.answered()
        except BaseException:
            reply.leave()
            raise
        return reply

    async def close(self) -> None:
        for connection in tuple(self._rounds.members):
            connection.abort()

    def _take(self, origin: Origin) -> Connection | None:
        """The connection that was used last."""
        free = self._free.get(origin)
        while free:
            connection, _ = free.popitem()
            if connection.is_fresh():
                return connection
        return None

    async def _connected(self, origin: Origin) -> Connection:
        try:
            async with asyncio.timeout(self._connect_seconds):
                return await self._connect(origin)
        except TimeoutError as error:
            raise UnreachableError(f"no connection within {self._connect_seconds:g} seconds") from error
        except (OSError, UnicodeError) as error:  # UnicodeError: a name that no resolver can be asked for
            raise UnreachableError(str(error) or type(error).__name__) from error

    async def _connect(self, origin: Origin) -> Connection:
        loop = asyncio.get_running_loop()
        found = await asyncio.shield(self._looked_up(origin))
        sock = await aiohappyeyeballs.start_connection(found, happy_eyeballs_delay=NEXT_ADDRESS_SECONDS, loop=loop)
        _, connection = await loop.create_connection(
            lambda: Connection(origin, self._freed, self._lost),
            sock=sock,
            ssl=_tls() if origin.tls else None,
            server_hostname=origin.host if origin.tls else None,
        )
        self._rounds.add(connection)
        return connection

    def _looked_up(self, origin: Origin) -> asyncio.Task[list[Any]]:
        """One lookup for all who wait for it: each takes a thread until the resolver gives up, however soon we do, and
        the other upstreams need threads too."""
        lookup = self._lookups.get(origin)
        if lookup is None:
            lookup = self._lookups[origin] = asyncio.create_task(_addresses(origin))
            lookup.add_done_callback(functools.partial(self._was_looked_up, origin))
        return lookup

    def _was_looked_up(self, origin: Origin, lookup: asyncio.Task[list[Any]]) -> None:
        del self._lookups[origin]
        if not lookup.cancelled():
            lookup.exception()  # seen, also where nobody waits any more

    def _freed(self, connection: Connection) -> None:
        self._free.setdefault(connection.origin, {})[connection] = None

    def _lost(self, connection: Connection) -> None:
        self._free.get(connection.origin, {}).pop(connection, None)
        self._rounds.discard(connection)


async def _addresses(origin: Origin) -> list[Any]:
    """A name is looked up on a thread; an address needs no looking up."""
    try:
        return socket.getaddrinfo(origin.host, origin.port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
    except socket.gaierror:
        return await asyncio.get_running_loop().getaddrinfo(origin.host, origin.port, type=socket.SOCK_STREAM)


@functools.cache
def _tls() -> ssl.SSLContext:
    context = ssl.create_default_context()
    context.set_alpn_protocols(["http/1.1"])
    return context


@functools.lru_cache(_REMEMBERED_URLS)
def _place(method: str, url: str) -> tuple[Origin, str]:
    """Where a request goes, and the lines of its head that depend on nothing else."""
    parts = urlsplit(url)
    assert parts.hostname is not None, "the settings have been checked"
    tls = parts.scheme == "https"
    host = parts.netloc
    if not host.isascii():
        host = parts.hostname.encode("idna").decode() + (f":{parts.port}" if parts.port else "")
    path = quote(parts.path or "/", safe="/%:@!$&'()*+,;=~") + (f"?{parts.query}" if parts.query else "")
    lines = f"{method} {path} HTTP/1.1\r\nhost: {host}\r\n"
    lines += "accept: */*\r\naccept-encoding: identity\r\nuser-agent: farthing\r\n"
    return Origin(parts.hostname, parts.port or (443 if tls else 80), tls), lines
