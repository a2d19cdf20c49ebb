"""The relay's one small interface to HTTP, and its implementation on aiohttp's client.

HTTP/1.1 with keep-alive, no cookies, no redirects, no proxy from the environment and no compression: what was sent is
what is read, event by event. aiohttp stops reading from an upstream whose bytes nobody takes, so a slow caller does not
fill the memory.
"""

import asyncio
from collections.abc import Mapping
from typing import Protocol

import aiohttp

MAX_REPLY_BYTES = 64 * 1024 * 1024
"""Larger than any whole answer; what an upstream sends beyond it is not kept in memory."""
KEEP_ALIVE_SECONDS = 4.0
"""An idle connection is not used again after this: servers commonly close theirs after 5 seconds."""
READ_BUFFER_BYTES = 64 * 1024


class UnreachableError(Exception):
    """No connection could be made: nothing was sent, so trying again is always safe."""


class BrokenError(Exception):
    """The connection failed after something was sent: no answer, or half of one."""


class SilentError(BrokenError):
    """The upstream took longer than it may."""


class Reply(Protocol):
    """An answer whose headers are here. Close it, or its connection never returns to the pool."""

    @property
    def status(self) -> int: ...
    @property
    def headers(self) -> Mapping[str, str]: ...
    async def chunk(self) -> bytes:
        """The bytes of the body that have come, at least one; b"" at its end. Raises BrokenError."""
        ...

    async def read(self) -> bytes:
        """The rest of the body, at most MAX_REPLY_BYTES. Raises BrokenError."""
        ...

    async def drain(self, seconds: float) -> None:
        """Read what is left for at most so long: a connection that was read to its end can be used again."""
        ...

    async def close(self) -> None: ...


class Transport(Protocol):
    async def send(self, method: str, url: str, headers: Mapping[str, str], content: bytes | None) -> Reply:
        """Send one request, return when the answer's headers are here. Raises UnreachableError or BrokenError."""
        ...

    async def close(self) -> None: ...


class AiohttpTransport:
    """Times in seconds. `connect`: until there is a connection; `first_byte`: from the request to the answer's headers;
    `idle`: longest silence within a body; `total`: from the request to the body's end, None without limit.
    """

    def __init__(self, connect: float, first_byte: float, idle: float, total: float | None = None) -> None:
        self._connect = connect
        self._first_byte = first_byte if total is None else min(first_byte, total)
        self._idle = idle
        self._total = total
        self._session: aiohttp.ClientSession | None = None

    async def send(self, method: str, url: str, headers: Mapping[str, str], content: bytes | None) -> Reply:
        session = self._session or self._open()
        watch = _Watch(self._first_byte, self._idle, self._total)
        try:
            try:
                response = await session.request(method, url, headers=headers, data=content, allow_redirects=False)
            except BaseException:
                watch.stop()
                raise
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            raise UnreachableError(_words(error)) from error
        except TimeoutError as error:
            raise SilentError("it did not answer in time") from error
        except (aiohttp.ClientError, OSError) as error:
            raise BrokenError(_words(error)) from error
        except asyncio.CancelledError as error:
            if not watch.rang:
                raise
            raise SilentError("it did not answer in time") from error
        watch.answered(response.content)
        return AiohttpReply(response, watch)

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    def _open(self) -> aiohttp.ClientSession:
        """Made at the first request, because it belongs to the event loop that runs then."""
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_SECONDS),
            timeout=aiohttp.ClientTimeout(connect=self._connect),
            cookie_jar=aiohttp.DummyCookieJar(),
            headers={"accept-encoding": "identity", "user-agent": "farthing"},
            auto_decompress=False,
            read_bufsize=READ_BUFFER_BYTES,
        )
        return self._session


class _Watch:
    """What the current task's exchange may take: until the headers, between pieces, in all.

    One timer, which is set anew when it rings and not with every piece: hardly any rings, and setting one costs.
    """

    __slots__ = (
        "_cancelling",
        "_content",
        "_deadline",
        "_headers_by",
        "_idle",
        "_loop",
        "_task",
        "_timer",
        "rang",
        "waits_since",
    )

    def __init__(self, first_byte: float, idle: float, total: float | None) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._loop = asyncio.get_running_loop()
        now = self._loop.time()
        self._task = task
        self._cancelling = task.cancelling()
        self._idle = idle
        self._headers_by = now + first_byte
        self._deadline = None if total is None else now + total
        self._content: aiohttp.StreamReader | None = None
        self.waits_since: float | None = None
        """Since when a piece of the body is awaited."""
        self.rang = False
        """The wait for the headers was too long, and the task is not cancelled by anybody else."""
        self._timer = self._loop.call_at(min(self._headers_by, now + idle), self._look)

    def answered(self, content: aiohttp.StreamReader) -> None:
        """The headers are here. From now on the wait for `content` is ended with a TimeoutError."""
        self._content = content

    def wait(self) -> None:
        self.waits_since = self._loop.time()

    def stop(self) -> None:
        self._timer.cancel()
        if self.rang and self._content is None:
            self.rang = self._task.uncancel() <= self._cancelling

    def _look(self) -> None:
        """A slow caller is no silence."""
        now = self._loop.time()
        if self._content is None:
            if now >= self._headers_by:
                self.rang = True
                self._task.cancel()
                return
            due = min(self._headers_by, now + self._idle)
        elif self._deadline is not None and now >= self._deadline:
            self._content.set_exception(TimeoutError("it took too long to complete its answer"))
            return
        elif self.waits_since is not None and now - self.waits_since >= self._idle:
            self._content.set_exception(TimeoutError("it said nothing for too long"))
            return
        else:
            due = (now if self.waits_since is None else self.waits_since) + self._idle
            due = due if self._deadline is None else min(due, self._deadline)
        self._timer = self._loop.call_at(due, self._look)


class AiohttpReply:
    def __init__(self, response: aiohttp.ClientResponse, watch: _Watch) -> None:
        self._response = response
        self._content = response.content
        self._watch = watch

    @property
    def status(self) -> int:
        return self._response.status

    @property
    def headers(self) -> Mapping[str, str]:
        return self._response.headers

    async def chunk(self) -> bytes:
        if self._content.exception() is None and self._content.is_eof():
            return self._content.read_nowait()
        # What came before the connection broke is part of the answer, but aiohttp raises first. It has no public way.
        if self._content.exception() is not None and (rest := self._content._read_nowait(-1)):
            return rest
        self._watch.wait()
        try:
            return await self._content.readany()
        except TimeoutError as error:
            raise SilentError(str(error)) from error
        except (aiohttp.ClientError, OSError, RuntimeError) as error:  # RuntimeError: the connection is closed
            raise BrokenError(_words(error)) from error
        finally:
            self._watch.waits_since = None

    async def read(self) -> bytes:
        pieces: list[bytes] = []
        size = 0
        while piece := await self.chunk():
            pieces.append(piece)
            size += len(piece)
            if size > MAX_REPLY_BYTES:
                raise BrokenError(f"it sent more than {MAX_REPLY_BYTES} bytes")
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    async def drain(self, seconds: float) -> None:
        if self._content.at_eof():
            return
        try:
            async with asyncio.timeout(seconds):
                while await self.chunk():
                    pass
        except (TimeoutError, BrokenError):
            pass

    async def close(self) -> None:
        self._watch.stop()
        self._response.close()  # once its end was read, the connection is back in the pool and stays open


def _words(error: Exception) -> str:
    if isinstance(error, aiohttp.ClientResponseError):  # its words are the bytes that came, and our upstream's address
        return "what it sent is not HTTP"
    return str(error) or type(error).__name__
