"""Migrations while gateways and reports use the database: they step back, and nobody waits for them long."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

import migrations
from billing.ids import new_id

EARLIER = "0004"
CALL = text(
    "INSERT INTO operation (id, started_at, org_id, key_id, api, requested_model, stream, status, http_status,"
    " total_seconds, currency) VALUES (:id, now(), :id, :id, 'chat.completions', 'auto', false, 'ok', 200, 1, 'USD')"
)
ATTEMPT = text(
    "INSERT INTO attempt (operation_id, number, upstream, model, started_at, status, input_fresh, input_cached,"
    " input_cache_write, output_text, output_reasoning, usage_source, total_seconds)"
    " VALUES (:id, 1, 'engine', 'm', now(), 'ok', 1, 0, 0, 1, 0, 'engine', 1)"
)


@asynccontextmanager
async def a_long_report(engine: AsyncEngine) -> AsyncIterator[AsyncConnection]:
    """That keeps the ledger from being altered."""
    async with engine.connect() as connection:
        await connection.execute(text("SELECT count(*) FROM attempt"))
        yield connection


async def record(engine: AsyncEngine) -> float:
    """A call, as the ledger does: its operation, then its attempts. How many seconds it took."""
    began = time.monotonic()
    async with engine.begin() as connection:
        await connection.execute(CALL, {"id": new_id()})
        await asyncio.sleep(0.005)
        await connection.execute(ATTEMPT, {"id": new_id()})
    return time.monotonic() - began


async def version(engine: AsyncEngine) -> str:
    async with engine.connect() as connection:
        found: str = (await connection.execute(text("SELECT version_num FROM alembic_version"))).scalar_one()
        return found


async def test_nobody_waits_long_for_a_migration_that_waits(database_url: str, engine: AsyncEngine) -> None:
    await asyncio.to_thread(migrations.downgrade, database_url, EARLIER)
    async with a_long_report(engine):
        migrating = asyncio.create_task(asyncio.to_thread(migrations.upgrade, database_url))
        end = time.monotonic() + 2.5
        async with asyncio.timeout(20):
            while time.monotonic() < end:
                assert await record(engine) < 2, "as long as the report"
        assert not migrating.done() and await version(engine) == EARLIER
    await migrating
    assert await version(engine) > EARLIER


async def test_a_migration_comes_to_its_end_while_calls_are_recorded(database_url: str, engine: AsyncEngine) -> None:
    """Some of them have written to the one table of the ledger, and would wait for the other for as long as it does."""
    await asyncio.to_thread(migrations.downgrade, database_url, EARLIER)
    over = asyncio.Event()

    async def gateway() -> None:
        while not over.is_set():
            await record(engine)

    gateways = asyncio.gather(*(gateway() for _ in range(4)))
    try:
        async with asyncio.timeout(30):
            await asyncio.to_thread(migrations.upgrade, database_url)
    finally:
        over.set()
        await gateways
    assert await version(engine) > EARLIER


async def test_a_database_that_stays_in_use_is_left_as_it_was(
    database_url: str, engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(migrations, "PATIENCE_SECONDS", 0.3)
    await asyncio.to_thread(migrations.downgrade, database_url, EARLIER)
    async with a_long_report(engine) as report:
        process = (await report.execute(text("SELECT pg_backend_pid()"))).scalar_one()
        with pytest.raises(migrations.MigrationError) as refused:
            await asyncio.to_thread(migrations.upgrade, database_url)
        assert "a table was in use for 0.3 s, at `ALTER TABLE attempt …`." in str(refused.value)
        assert f"processes {process} (no name, " in str(refused.value)
        assert await version(engine) == EARLIER
