"""Fixtures of the gateway's tests: a scripted upstream and a gateway in front of it."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from anthropic import AsyncAnthropic
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from tests.gateway.running import Gateway, configuration, running_gateway
from tests.gateway.scripted import Scripted, scripted_upstream


@pytest.fixture
async def upstream() -> AsyncIterator[Scripted]:
    async with scripted_upstream() as running:
        yield running


@pytest.fixture
def settings(upstream: Scripted, database_url: str, tmp_path: Path) -> dict[str, Any]:
    """The gateway's settings; a test changes them before it asks for `gateway`, or starts one itself."""
    return configuration(upstream.url, database_url, tmp_path)


@pytest.fixture
async def gateway(settings: dict[str, Any]) -> AsyncIterator[Gateway]:
    async with running_gateway(settings) as running:
        yield running


@pytest.fixture
async def claude(gateway: Gateway) -> AsyncIterator[AsyncAnthropic]:
    async with AsyncAnthropic(base_url=gateway.url, api_key=gateway.people.secret, max_retries=2) as client:
        yield client


@pytest.fixture
async def engine(database_url: str) -> AsyncIterator[AsyncEngine]:
    engine = create_async_engine(database_url, pool_size=20)
    yield engine
    await engine.dispose()
