"""Schema changes, run by Alembic from inside the installed package: no alembic.ini, no checkout needed."""

import asyncio
import time
from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, text
from sqlalchemy.exc import ArgumentError, DBAPIError
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine
from sqlalchemy.pool import NullPool

LOCK_TIMEOUT = "500ms"
"""How long a statement waits for its lock: whoever comes after it waits as long. Shorter than PostgreSQL's pause before
it looks for a deadlock, so that a migration gives way, and never a gateway."""
PATIENCE_SECONDS = 60.0
PAUSE_SECONDS = 1.0

_LOCK = 0x6661727468_01  # "farth", 1: one migration at a time
_BUSY = ("55P03", "40P01")  # lock_not_available, deadlock_detected
_OLDEST = text("""
    SELECT pid, coalesce(nullif(application_name, ''), 'no name') AS name,
        extract(epoch FROM clock_timestamp() - xact_start)::int AS seconds
    FROM pg_stat_activity
    WHERE datname = current_database() AND pid <> pg_backend_pid() AND xact_start IS NOT NULL
    ORDER BY xact_start LIMIT 3
""")


class MigrationError(RuntimeError):
    """The database cannot be brought to this version; the message says why and what to do."""


def upgrade(url: str, revision: str = "head") -> None:
    """Bring the database at `url` (postgresql+asyncpg://…) to this version's schema, each revision in a transaction.

    Several starters at once take turns by an advisory lock; who finds nothing to do is done. Gateways may use the
    database meanwhile: while a query of theirs is in the way of a revision, it steps back and tries again, for
    PATIENCE_SECONDS. One transaction for all would hold more tables, longer, and could wait for whom it holds up.
    Not for use inside a running event loop. Raises MigrationError when the database is unreachable, newer than this
    code, or in use all that time; the schema is a whole revision's then too.
    """
    _run(url, "upgrade", revision)


def downgrade(url: str, revision: str) -> None:
    """Take the schema back to `revision` (`base` drops everything, data included), all in one transaction. Raises as
    `upgrade` does."""
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
        while await _step(engine, direction, revision):
            pass
    finally:
        await engine.dispose()


async def _step(engine: AsyncEngine, direction: str, revision: str) -> bool:
    """One transaction's worth, at the first try that gets its locks; return whether more is left to do."""
    end = time.monotonic() + PATIENCE_SECONDS
    while True:
        try:
            async with engine.begin() as connection:
                await connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _LOCK})
                await connection.execute(text(f"SET LOCAL lock_timeout = '{LOCK_TIMEOUT}'"))
                return await connection.run_sync(_alembic, direction, revision)
        except DBAPIError as error:
            if getattr(error.orig, "sqlstate", None) not in _BUSY:
                raise
            if time.monotonic() > end:
                raise MigrationError(await _in_use(engine, error.statement)) from error
        await asyncio.sleep(PAUSE_SECONDS)


async def _in_use(engine: AsyncEngine, statement: str | None) -> str:
    async with engine.connect() as connection:
        oldest = [f"{row.pid} ({row.name}, {row.seconds} s)" for row in await connection.execute(_OLDEST)]
    words = " ".join((statement or "").split()[:3])
    return (
        f"a table was in use for {PATIENCE_SECONDS:g} s, at `{words} …`. The longest transactions are those of the "
        f"PostgreSQL processes {', '.join(oldest) or '(none now)'}: wait until they have ended, or end them with "
        "SELECT pg_terminate_backend(process), or stop the gateways; then migrate again, which goes on where it stopped"
    )


def _alembic(connection: Connection, direction: str, revision: str) -> bool:
    settings = config()
    scripts = ScriptDirectory.from_config(settings)
    current = MigrationContext.configure(connection).get_current_revision()
    if current is not None and current not in {script.revision for script in scripts.walk_revisions()}:
        raise MigrationError(
            f"the database was made by a newer Farthing (schema {current} is unknown here); "
            "install that version or a later one"
        )
    settings.attributes["connection"] = connection
    if direction == "downgrade":
        command.downgrade(settings, revision)
        return False
    *later, following = [None, *(script.revision for script in scripts.iterate_revisions(revision, current or "base"))]
    if following is not None:
        command.upgrade(settings, following)
    return len(later) > 1
