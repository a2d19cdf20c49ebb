"""Tells a database that is away from a statement that is wrong."""

import asyncpg
from sqlalchemy.exc import DBAPIError, InterfaceError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError

AWAY_SQLSTATES = ("08", "57P01", "57P02", "57P03", "53300")
"""Connection exception, server shut down (by its operator or a crash), server starting up, too many connections."""


def is_away(error: BaseException) -> bool:
    """Whether the connection or the server is what failed (a time-out included), not the statement."""
    if isinstance(error, OSError | PoolTimeoutError | OperationalError | InterfaceError):
        return True
    cause: BaseException | None = error
    if isinstance(error, DBAPIError):
        if error.connection_invalidated:
            return True
        cause = error.orig
    # SQLAlchemy wraps some of asyncpg's errors in a plain DBAPIError, and lets some through as they are.
    return isinstance(error, DBAPIError | asyncpg.PostgresError) and str(getattr(cause, "sqlstate", "")).startswith(
        AWAY_SQLSTATES
    )
