"""A real HTTP server whose answers a test scripts. Unscripted it answers as Farthing's engine does, word by word."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from engine.protocol import Account, Usage

PROMPT_FRESH, PROMPT_CACHED = 6, 4
CONTEXT = 1000


def account(delivered: int, generated: int | None = None) -> Account:
    """What this engine says it used: 2 s of prefill and 1 s for each generated token."""
    generated = delivered if generated is None else generated
    return Account(
        input_fresh=PROMPT_FRESH,
        input_cached=PROMPT_CACHED,
        output_text=delivered,
        generated_tokens=generated,
        prefill_device_seconds=2.0,
        decode_device_seconds=float(generated),
        kv_block_seconds=1.5,
        queue_seconds=0.25,
        ttft_seconds=0.5,
        total_seconds=3.0,
    )


@dataclass
class Request:
    method: str
    path: str
    headers: dict[str, str]
    raw: bytes

    @property
    def body(self) -> dict[str, Any]:
        return json.loads(self.raw)  # type: ignore[no-any-return]


@dataclass
class Connection:
    """The server's side of one request."""

    writer: asyncio.StreamWriter
    reader: asyncio.StreamReader

    async def left(self) -> None:
        """Return when the other side has closed the connection."""
        await self.reader.read()

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def json(self, value: Any, status: int = 200, headers: str = "") -> None:
        body = msgspec.json.encode(value)
        head = f"HTTP/1.1 {status} X\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n{headers}\r\n"
        await self.send(head.encode() + body)

    async def start(self) -> None:
        await self.send(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")

    async def chunk(self, data: bytes) -> None:
        await self.send(b"%x\r\n%s\r\n" % (len(data), data))

    async def frame(self, value: Any) -> None:
        await self.chunk(b"data: " + msgspec.json.encode(value) + b"\n\n")

    async def done(self) -> None:
        await self.chunk(b"data: [DONE]\n\n")
        await self.send(b"0\r\n\r\n")

    def die(self) -> None:
        """Reset the connection, as a killed process does."""
        self.writer.transport.abort()


Script = Callable[[Request, Connection], Awaitable[None]]


def frame(delta: dict[str, Any], tokens: int, finish: str | None = None) -> dict[str, Any]:
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    return _object("chat.completion.chunk") | {"choices": [choice], "usage": Usage.of(account(tokens))}


def _object(kind: str) -> dict[str, Any]:
    return {"id": "chatcmpl-1", "object": kind, "created": 1, "model": "scripted"}


@dataclass
class Scripted:
    """`script` answers chat completions, `paths` other paths; the rest is the engine's. `requests`: what came in."""

    words: list[str] = field(default_factory=lambda: ["Hello", " ", "world"])
    pause: float = 0.0
    script: Script | None = None
    paths: dict[str, Script] = field(default_factory=dict)
    abortable: bool = True
    healthy: bool = True
    loaded: list[str] | None = None
    requests: list[Request] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    port: int = 0
    _running: dict[str, asyncio.Event] = field(default_factory=dict)
    _server: asyncio.Server | None = None
    _writers: set[asyncio.StreamWriter] = field(default_factory=set)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    @property
    def chats(self) -> list[Request]:
        return [request for request in self.requests if request.path.endswith("/chat/completions")]

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """Refuse connections from now on and reset those that are open."""
        if self._server is not None:
            self._server.close()
            for writer in self._writers:
                writer.transport.abort()
            await self._server.wait_closed()
            self._server = None

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            while request := await _read_request(reader):
                self.requests.append(request)
                await self._answer(request, Connection(writer, reader))
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            self._writers.discard(writer)
            writer.close()

    async def _answer(self, request: Request, connection: Connection) -> None:
        if request.path in self.paths:
            await self.paths[request.path](request, connection)
        elif request.path.endswith("/chat/completions"):
            await (self.script or self.chat)(request, connection)
        elif request.path == "/tokenize":
            await connection.json({"count": PROMPT_FRESH + PROMPT_CACHED, "max_model_len": CONTEXT, "tokens": []})
        elif request.path == "/v1/abort":
            await self._abort(request.body["id"], connection)
        elif request.path == "/v1/models" and self.loaded is not None:
            await connection.json({"object": "list", "data": [{"id": name} for name in self.loaded]})
        elif request.path == "/health":
            await connection.json({"status": "ok"}, 200 if self.healthy else 503)
        else:
            await connection.json({"error": {"message": "no such path"}}, 404)

    async def _abort(self, identifier: str, connection: Connection) -> None:
        running = self._running.get(identifier)
        if not self.abortable or running is None:
            await connection.json({"error": {"message": "unknown id"}}, 404)
            return
        self.aborted.append(identifier)
        running.set()
        await connection.json({"id": identifier})

    async def chat(self, request: Request, connection: Connection) -> None:
        """Say `words`, one token each, until aborted."""
        identifier = request.headers.get("x-farthing-request-id", "")
        aborted = self._running[identifier] = asyncio.Event()
        stream = request.body.get("stream", False)
        try:
            if stream:
                await connection.start()
                await connection.frame(frame({"role": "assistant", "content": ""}, 0))
            said = 0
            for word in self.words:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(aborted.wait(), self.pause)
                if aborted.is_set():
                    break
                said += 1
                if stream:
                    await connection.frame(frame({"content": word}, said))
            finish = "abort" if aborted.is_set() else "stop"
            usage = {"usage": Usage.of(account(said)), "farthing": account(said, said + aborted.is_set())}
            if stream:
                await connection.frame(frame({}, said, finish))
                await connection.frame(_object("chat.completion.chunk") | {"choices": []} | usage)
                await connection.done()
            else:
                message = {"role": "assistant", "content": "".join(self.words[:said])}
                choice = {"index": 0, "message": message, "finish_reason": finish}
                await connection.json(_object("chat.completion") | {"choices": [choice]} | usage)
        finally:
            del self._running[identifier]


async def _read_request(reader: asyncio.StreamReader) -> Request | None:
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError:
        return None
    first, *lines = head.decode("latin-1").strip().split("\r\n")
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
    method, path, _ = first.split(" ")
    return Request(method, path, headers, await reader.readexactly(int(headers.get("content-length", 0))))


@contextlib.asynccontextmanager
async def scripted_upstream() -> AsyncIterator[Scripted]:
    upstream = Scripted()
    await upstream.start()
    try:
        yield upstream
    finally:
        await upstream.stop()
