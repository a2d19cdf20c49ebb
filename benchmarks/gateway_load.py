"""The load on a gateway: keep-alive connections on loopback, as many at once or as many a second as asked for.

All of it runs in this process, on uvloop with httptools, so that one core does for the load, the upstream and the
database of a gateway that has a core of its own.
"""

import asyncio
import json
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar, cast
from urllib.parse import urlsplit

import httptools

from benchmarks.gateway_upstream import CHUNKS, HOLD, TEXT

T = TypeVar("T")
PATIENCE = 60.0
QUESTION = "Explain in one sentence what a farthing was, who struck it, and what it bought in its last year. " * 2
STREAMED = b'"stream": true'


class Answer(NamedTuple):
    first: float
    """When the first text came."""
    end: float
    body: bytes


class FailedRequestError(RuntimeError):
    """A gateway answered with something else than what it was asked for."""


@dataclass
class Samples:
    """Seconds from when each request was sent to its first text, and to its end."""

    first: list[float] = field(default_factory=list)
    whole: list[float] = field(default_factory=list)


def quantile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


class Connection(asyncio.Protocol):
    """One keep-alive connection, one request at a time."""

    transport: asyncio.Transport
    waiting: "asyncio.Future[Answer] | None" = None
    open = True

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's own is none by its class

    def ask(self, request: bytes) -> "asyncio.Future[Answer]":
        self.parser = httptools.HttpResponseParser(self)
        self.first, self.body = 0.0, b""
        self.started: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.waiting = asyncio.get_running_loop().create_future()
        self.transport.write(request)
        return self.waiting

    def data_received(self, data: bytes) -> None:
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(f"not HTTP: {error}")

    def on_body(self, body: bytes) -> None:
        self.body += body
        if not self.first and b'"content"' in self.body:
            self.first = time.perf_counter()
            if not self.started.done():
                self.started.set_result(None)

    def on_message_complete(self) -> None:
        self.open = self.parser.should_keep_alive()
        if self.parser.get_status_code() != 200 or not self.first:
            self._fail(f"{self.parser.get_status_code()} {self.body[:500].decode(errors='replace')}")
        elif self.waiting is not None and not self.waiting.done():
            self.waiting.set_result(Answer(self.first, time.perf_counter(), self.body))

    def connection_lost(self, exc: Exception | None) -> None:
        self.open = False
        self._fail("the connection was closed")

    def _fail(self, why: str) -> None:
        for future in (self.waiting, self.started) if self.waiting is not None else ():
            if not future.done():
                future.set_exception(FailedRequestError(why))
                future.exception()  # whoever waits for the other one has been told


class Load:
    """Requests to one address. Every method raises FailedRequestError on the first answer that is not a good one."""

    def __init__(self, url: str, model: str, headers: Mapping[str, str]) -> None:
        self._url = urlsplit(url)
        self._head = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        self._model = model
        self._idle: list[Connection] = []

    def _request(self, stream: bool, text: str = QUESTION) -> bytes:
        body: dict[str, Any] = {"model": self._model, "max_tokens": 64, "temperature": 0.5}
        body["messages"] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": text}]
        if stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        data = json.dumps(body).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: {self._url.netloc}\r\ncontent-type: application/json\r\n"
        return f"{head}{self._head}content-length: {len(data)}\r\n\r\n".encode() + data

    async def _connection(self) -> Connection:
        while self._idle:
            if (connection := self._idle.pop()).open:
                return connection
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(Connection, self._url.hostname, self._url.port)
        return connection

    async def _one(self, request: bytes) -> Answer:
        connection = await self._connection()
        answer = await asyncio.wait_for(connection.ask(request), PATIENCE)
        if STREAMED in request and b"[DONE]" not in answer.body[-64:]:
            raise FailedRequestError(f"a stream ended without [DONE]: …{answer.body[-200:]!r}")
        self._idle.append(connection)
        return answer

    async def check(self) -> None:
        """One of each kind: nothing of the upstream's answer may be missing."""
        for stream in (False, True):
            body = (await self._one(self._request(stream))).body
            text = body.count(b" word") == CHUNKS if stream else TEXT.encode() in body
            if not text or b'"total_tokens":' not in body:
                raise FailedRequestError(f"an answer lacks text or usage: {body!r}")

    async def at_once(self, connections: int, stream: bool, more: Callable[[int], bool]) -> int:
        """Ask over and over on `connections` at once while `more(answers so far)`. Returns how many were answered."""
        request, answered = self._request(stream), 0

        async def worker() -> None:
            nonlocal answered
            while more(answered):
                await self._one(request)
                answered += 1

        await _all(worker() for _ in range(connections))
        return answered

    async def at_rate(self, rate: float, seconds: float, stream: bool) -> Samples:
        """`rate` requests a second, whatever becomes of those before."""
        request, samples = self._request(stream), Samples()
        began = time.perf_counter()

        async def asked(number: int) -> None:
            await asyncio.sleep(began + number / rate - time.perf_counter())
            sent = time.perf_counter()
            answer = await self._one(request)
            samples.first.append(answer.first - sent)
            samples.whole.append(answer.end - sent)

        await _all(asked(number) for number in range(int(rate * seconds)))
        return samples

    async def hold(self, count: int, meanwhile: Callable[[], None]) -> None:
        """Open `count` streams, call `meanwhile` once each has its first text, and see each one to its end.

        `meanwhile` has to tell the upstream to go on.
        """
        request, gate = self._request(True, HOLD.decode()), asyncio.Semaphore(64)

        async def begin() -> Connection:
            async with gate:
                connection = await self._connection()
                connection.ask(request)
                await asyncio.wait_for(connection.started, PATIENCE)
                return connection

        connections = await _all(begin() for _ in range(count))
        meanwhile()
        for connection in connections:
            assert connection.waiting is not None
            body = (await asyncio.wait_for(connection.waiting, PATIENCE)).body
            if body.count(b" word") != CHUNKS:
                raise FailedRequestError(f"a held stream lacks text: …{body[-200:]!r}")
            connection.transport.close()


async def _all(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """What all of `work` returns; the first failure ends the rest."""
    tasks = [asyncio.create_task(one) for one in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
