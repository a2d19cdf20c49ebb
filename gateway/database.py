"""PostgreSQL as the request path sees it: it answers soon, or the caller is told to come back."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from types import TracebackType

from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine

from billing.availability import is_away
from gateway.errors import unavailable

SECONDS = 3.0
"""Longest wait for the database within one step of a request."""


def connect(url: str) -> AsyncEngine:
    """A pool that checks a connection before handing it out, so a restarted server costs no request."""
    return create_async_engine(
        url,
        pool_pre_ping=True,
        pool_size=10,
        max_overflow=20,
        pool_timeout=SECONDS,
        connect_args={"timeout": SECONDS},
        hide_parameters=True,  # errors are logged, and what callers sent is among the parameters
    )


class _Reachable(contextlib.AbstractAsyncContextManager[None]):
    def __init__(self, seconds: float) -> None:
        self._limit = asyncio.timeout(seconds)

    async def __aenter__(self) -> None:
        await self._limit.__aenter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            await self._limit.__aexit__(kind, error, traceback)
        except TimeoutError as timeout:
            error = timeout
        if isinstance(error, Exception) and is_away(error):
            raise unavailable("The ledger's database is away.") from error


def reachable(seconds: float = SECONDS) -> contextlib.AbstractAsyncContextManager[None]:
    """Turn "the database is away" within the block into ApiError 503 with Retry-After; other errors pass.

    A block that takes longer than `seconds` is taken for one.
    """
    return _Reachable(seconds)


@contextlib.asynccontextmanager
async def transaction(engine: AsyncEngine) -> AsyncIterator[AsyncConnection]:
    """A transaction within `reachable`."""
    async with reachable(), engine.begin() as connection:
        yield connection
