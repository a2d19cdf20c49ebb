"""The relay's one small interface to HTTP, and its httpx implementation."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from typing import Protocol

import httpx

MAX_REPLY_BYTES = 64 * 1024 * 1024
"""Larger than any whole chat answer; what an upstream sends beyond it is not kept in memory."""


class UnreachableError(Exception):
    """No connection could be made: nothing was sent, so trying again is always safe."""


class BrokenError(Exception):
    """The connection failed after something was sent: no answer, or half of one."""


class SilentError(BrokenError):
    """The upstream said nothing for longer than its read timeout."""


class Reply(Protocol):
    """An answer whose headers are here. Close it, or its connection never returns to the pool."""

    @property
    def status(self) -> int: ...
    @property
    def headers(self) -> Mapping[str, str]: ...
    def chunks(self) -> AsyncIterator[bytes]:
        """Body bytes as they come. Raises BrokenError when the connection fails before the body's end."""
        ...

    async def read(self) -> bytes:
        """The whole body, at most MAX_REPLY_BYTES. Raises BrokenError."""
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


class HttpxReply:
    def __init__(self, response: httpx.Response) -> None:
        self._response = response
        self._raw = response.aiter_raw()

    @property
    def status(self) -> int:
        return self._response.status_code

    @property
    def headers(self) -> Mapping[str, str]:
        return self._response.headers

    async def chunks(self) -> AsyncIterator[bytes]:
        try:
            async for chunk in self._raw:
                yield chunk
        except httpx.ReadTimeout as error:
            raise SilentError("it said nothing for too long") from error
        except (httpx.TransportError, httpx.StreamError) as error:
            raise BrokenError(_words(error)) from error

    async def read(self) -> bytes:
        body = bytearray()
        async for chunk in self.chunks():
            body += chunk
            if len(body) > MAX_REPLY_BYTES:
                raise BrokenError(f"it sent more than {MAX_REPLY_BYTES} bytes")
        return bytes(body)

    async def drain(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError, BrokenError):
            async with asyncio.timeout(seconds):
                async for _ in self.chunks():
                    pass

    async def close(self) -> None:
        await self._response.aclose()


class HttpxTransport:
    """HTTP/1.1 keep-alive, no proxy from the environment, no compression (frames must arrive one by one)."""

    def __init__(self, connect_timeout: float, read_timeout: float) -> None:
        self._client = httpx.AsyncClient(
            timeout=httpx.Timeout(read_timeout, connect=connect_timeout),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=100, keepalive_expiry=4.0),
            headers={"accept-encoding": "identity"},
            trust_env=False,
        )

    async def send(self, method: str, url: str, headers: Mapping[str, str], content: bytes | None) -> Reply:
        request = self._client.build_request(method, url, headers=dict(headers), content=content)
        try:
            return HttpxReply(await self._client.send(request, stream=True))
        except (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout) as error:
            raise UnreachableError(_words(error)) from error
        except httpx.TimeoutException as error:
            raise SilentError("it did not answer in time") from error
        except httpx.TransportError as error:
            raise BrokenError(_words(error)) from error

    async def close(self) -> None:
        await self._client.aclose()


def _words(error: Exception) -> str:
    return str(error) or type(error).__name__
