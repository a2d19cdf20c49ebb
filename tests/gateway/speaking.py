"""Servers that say chosen bytes, and the relay's HTTP client to ask them with."""

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable

from gateway.upstreams.client import HttpClient
from gateway.upstreams.connection import HttpReply

HEAD = b"HTTP/1.1 200 OK\r\n"
OK = HEAD + b"content-length: 2\r\n\r\nhi"

Handle = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@contextlib.asynccontextmanager
async def server(handle: Handle, tls: ssl.SSLContext | None = None) -> AsyncIterator[str]:
    """Its URL while it runs."""

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            await handle(reader, writer)
        writer.close()

    running = await asyncio.start_server(connected, "127.0.0.1", 0, ssl=tls)
    try:
        yield f"{'https' if tls else 'http'}://127.0.0.1:{running.sockets[0].getsockname()[1]}"
    finally:
        running.close()


class Saying:
    """Answers every request on a connection with the same bytes; counts both."""

    def __init__(self, *answer: bytes, then_close: bool = False) -> None:
        self.answer = answer
        self.then_close = then_close
        self.connections = 0
        self.requests: list[bytes] = []

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        while True:
            self.requests.append(await request(reader))
            for piece in self.answer:
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(0)
            if self.then_close:
                return


async def request(reader: asyncio.StreamReader) -> bytes:
    head = await reader.readuntil(b"\r\n\r\n")
    length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0] or 0)
    return head + await reader.readexactly(length)


@contextlib.asynccontextmanager
async def http(connect: float = 1.0, first_byte: float = 2.0, idle: float = 2.0) -> AsyncIterator[HttpClient]:
    made = HttpClient(connect=connect, first_byte=first_byte, idle=idle)
    try:
        yield made
    finally:
        await made.close()


async def post(http: HttpClient, url: str, content: bytes = b"{}") -> HttpReply:
    return await http.send("POST", f"{url}/v1/x?a=b", {"content-type": "application/json"}, content)


async def whole(http: HttpClient, url: str, content: bytes = b"{}") -> bytes:
    reply = await post(http, url, content)
    try:
        return await reply.read()
    finally:
        await reply.close()


BODIES = {
    "length": b"content-length: 11\r\n\r\nhello world",
    "chunked": b"transfer-encoding: chunked\r\n\r\n5;a=b\r\nhello\r\n6\r\n world\r\n0\r\ntrailer: x\r\n\r\n",
    "until it closes": b"\r\nhello world",
}
