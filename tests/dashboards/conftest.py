"""A ledger with a month of operations, made once, and the dashboard mounted alone on it."""

import hashlib
from collections.abc import AsyncIterator
from datetime import UTC, datetime

import httpx
import pytest
from litestar import Litestar
from sample_ledger import fill
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from dashboards.web import create_router

ADMIN_KEY = "fa-the-right-key"
KEY_HASH = hashlib.sha256(ADMIN_KEY.encode()).digest()
ORIGIN = "http://farthing.test"


def mount(engine: AsyncEngine) -> Litestar:
    return Litestar([create_router(engine, KEY_HASH)])


def visitor(app: Litestar) -> httpx.AsyncClient:
    """A browser-like client that is not signed in."""
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url=ORIGIN)


async def sign_in(client: httpx.AsyncClient, key: str = ADMIN_KEY, **fields: str) -> httpx.Response:
    return await client.post("/dashboard/sign-in", data={"key": key, **fields})


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
