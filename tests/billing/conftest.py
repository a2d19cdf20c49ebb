"""What the billing tests share."""

from collections.abc import AsyncIterator

import pytest
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine

from billing.leases import Leases
from tests.billing.replicas import a_replica


@pytest.fixture
async def conn(database_url: str) -> AsyncIterator[AsyncConnection]:
    engine = create_async_engine(database_url)
    async with engine.begin() as connection:
        yield connection
    await engine.dispose()


@pytest.fixture
async def engine(database_url: str) -> AsyncIterator[AsyncEngine]:
    engine = create_async_engine(database_url, pool_size=20)
    yield engine
    await engine.dispose()


@pytest.fixture
async def leases(engine: AsyncEngine) -> AsyncIterator[Leases]:
    async with a_replica(engine) as leases:
        yield leases
