"""Schema changes, run by Alembic from inside the installed package: no alembic.ini, no checkout needed."""

import asyncio
from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, text
from sqlalchemy.exc import ArgumentError, DBAPIError
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.pool import NullPool

_LOCK = 0x6661727468_01  # "farth", 1: one migration at a time


class MigrationError(RuntimeError):
    """The database cannot be brought to this version; the message says why and what to do."""


def upgrade(url: str) -> None:
    """Bring the database at `url` (postgresql+asyncpg://…) to this version's schema, all in one transaction.

    Two starters at once take turns by an advisory lock; the second finds nothing to do. Not for use inside a running
    event loop. Raises MigrationError when the database is unreachable or newer than this code.
    """
    _run(url, "upgrade", "head")


def downgrade(url: str, revision: str) -> None:
    """Take the schema back to `revision` (`base` drops everything, data included). Raises as `upgrade` does."""
    _run(url, "downgrade", revision)


def config() -> Config:
    """Alembic's configuration, pointing at this package."""
    settings = Config()
    settings.set_main_option("script_location", str(Path(__file__).parent).replace("%", "%%"))
    return settings


def _run(url: str, direction: str, revision: str) -> None:
    try:
        asyncio.run(_migrate(url, direction, revision))
    except (OSError, ArgumentError, DBAPIError) as error:
        # Only the first line, and no URL: it may hold a password.
        reason = str(getattr(error, "orig", None) or error).splitlines()[0]
        raise MigrationError(f"could not migrate the database: {reason}") from error


async def _migrate(url: str, direction: str, revision: str) -> None:
    engine = create_async_engine(url, poolclass=NullPool)
    try:
        async with engine.begin() as connection:
            await connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _LOCK})
            await connection.run_sync(_alembic, direction, revision)
    finally:
        await engine.dispose()


def _alembic(connection: Connection, direction: str, revision: str) -> None:
    settings = config()
    known = {script.revision for script in ScriptDirectory.from_config(settings).walk_revisions()}
    unknown = set(MigrationContext.configure(connection).get_current_heads()) - known
    if unknown:
        raise MigrationError(
            f"the database was made by a newer Farthing (schema {', '.join(sorted(unknown))} is unknown here); "
            "install that version or a later one"
        )
    settings.attributes["connection"] = connection
    (command.upgrade if direction == "upgrade" else command.downgrade)(settings, revision)
