"""PostgreSQL as the request path sees it: it answers soon, or the caller is told to come back."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import asyncpg
from sqlalchemy.exc import DBAPIError, InterfaceError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from gateway.errors import unavailable

SECONDS = 3.0
"""Longest wait for the database within one step of a request."""

AWAY_SQLSTATES = ("08", "57P01", "57P02", "57P03", "53300")
"""Connection exception, server shut down (by its operator or a crash), server starting up, too many connections."""


def connect(url: str) -> AsyncEngine:
    """A pool that checks a connection before handing it out, so a restarted server costs no request."""
    return create_async_engine(
        url, pool_pre_ping=True, pool_size=10, max_overflow=20, pool_timeout=SECONDS, connect_args={"timeout": SECONDS}
    )


@contextlib.asynccontextmanager
async def reachable() -> AsyncIterator[None]:
    """Turn "the database is away" within the block into ApiError 503 with Retry-After; other errors pass."""
    try:
        async with asyncio.timeout(SECONDS):
            yield
    except (OSError, PoolTimeoutError) as error:
        raise unavailable("The ledger's database is away.") from error
    except (DBAPIError, asyncpg.PostgresError) as error:
        if not is_away(error):
            raise
        raise unavailable("The ledger's database is away.") from error


def is_away(error: DBAPIError | asyncpg.PostgresError) -> bool:
    """Whether the connection or the server is what failed, not the statement."""
    cause: object = error
    if isinstance(error, DBAPIError):
        if error.connection_invalidated or isinstance(error, OperationalError | InterfaceError):
            return True
        cause = error.orig
    return str(getattr(cause, "sqlstate", "")).startswith(AWAY_SQLSTATES)
