"""A ledger with a month of operations, made once, and an operator who looks at it."""

from collections.abc import AsyncIterator
from datetime import UTC, datetime

import httpx
import pytest
from sample_ledger import fill
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine
from visiting import mount, sign_in, visitor


@pytest.fixture(scope="session")
async def sample_engine(postgres_url: str, template_database: str) -> AsyncIterator[AsyncEngine]:
    """On a database that `sample_ledger` filled; tests only read it."""
    admin = create_async_engine(postgres_url, isolation_level="AUTOCOMMIT")
    async with admin.connect() as connection:
        await connection.execute(text(f"CREATE DATABASE dashboards_sample TEMPLATE {template_database}"))
    await admin.dispose()
    engine = create_async_engine(postgres_url.replace("/postgres?", "/dashboards_sample?"))
    async with engine.begin() as connection:
        await fill(connection, datetime.now(UTC), operations=1200)
    yield engine
    await engine.dispose()


@pytest.fixture
async def engine(database_url: str) -> AsyncIterator[AsyncEngine]:
    """On an empty database of this test's own."""
    engine = create_async_engine(database_url)
    yield engine
    await engine.dispose()


@pytest.fixture
async def operator(sample_engine: AsyncEngine) -> AsyncIterator[httpx.AsyncClient]:
    """Signed in, on the sample ledger."""
    async with visitor(mount(sample_engine)) as client:
        assert (await sign_in(client)).status_code == 303
        yield client
