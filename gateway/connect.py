"""Database addresses as people write them, and a connection for one command."""

import contextlib
from collections.abc import AsyncIterator

from sqlalchemy import URL, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError
from sqlalchemy.ext.asyncio import AsyncConnection, create_async_engine

CONNECT_SECONDS = 10


class DatabaseUnavailableError(RuntimeError):
    """The address is wrong or nobody answers there; the message says which and what to do."""


def asyncpg_url(address: str) -> URL:
    """SQLAlchemy's URL for `postgresql://…` (or `postgres://…`) as psql and hosting companies write it.

    Raises DatabaseUnavailableError when it is none.
    """
    try:
        url = make_url(address)
    except (ArgumentError, ValueError):  # ValueError: a port that is no number
        shown = address.rpartition("@")[2]  # what stands before it may be a password
        raise DatabaseUnavailableError(
            f"{shown!r} is not a database URL; write it like postgresql://user:password@host:5432/name"
        ) from None
    if url.get_backend_name() not in ("postgresql", "postgres"):
        raise DatabaseUnavailableError(f"Farthing needs PostgreSQL, and {url.render_as_string()} is something else")
    query = dict(url.query)
    if "sslmode" in query:  # libpq's name for what asyncpg calls ssl
        query["ssl"] = query.pop("sslmode")
    return url.set(drivername="postgresql+asyncpg", query=query)


def libpq_url(url: URL) -> str:
    """The same address without SQLAlchemy's driver, password included."""
    query = dict(url.query)
    if "ssl" in query:
        query["sslmode"] = query.pop("ssl")
    return url.set(drivername="postgresql", query=query).render_as_string(hide_password=False)


@contextlib.asynccontextmanager
async def transaction(url: URL) -> AsyncIterator[AsyncConnection]:
    """One transaction on `url`. Raises DatabaseUnavailableError when there is no connection to be had."""
    engine = create_async_engine(url, connect_args={"timeout": CONNECT_SECONDS})
    try:
        try:
            connection = await engine.connect()
        except (OSError, TimeoutError, TypeError, ValueError, DBAPIError) as error:
            reason = str(getattr(error, "orig", None) or error) or type(error).__name__
            where = url.render_as_string(hide_password=True)
            raise DatabaseUnavailableError(f"cannot connect to {where}: {reason}") from error
        async with contextlib.aclosing(connection), connection.begin():
            yield connection
    finally:
        await engine.dispose()
