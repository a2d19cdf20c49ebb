"""PostgreSQL as the request path sees it: it answers soon, or the caller is told to come back."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

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


@contextlib.asynccontextmanager
async def reachable() -> AsyncIterator[None]:
    """Turn "the database is away" within the block into ApiError 503 with Retry-After; other errors pass."""
    try:
        async with asyncio.timeout(SECONDS):
            yield
    except Exception as error:
        if not is_away(error):
            raise
        raise unavailable("The ledger's database is away.") from error
