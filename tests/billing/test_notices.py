"""Notices against a real PostgreSQL: heard by all, told apart from silence, mended after every kind of loss."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from billing import notices
from billing.notices import Notices, notify


async def until(condition: Callable[[], bool], seconds: float = 10.0) -> float:
    """Seconds until `condition` held."""
    begun = time.monotonic()
    while not condition():
        assert time.monotonic() - begun < seconds, "it never came"
        await asyncio.sleep(0.005)
    return time.monotonic() - begun


@contextlib.asynccontextmanager
async def listening(
    engine: AsyncEngine, channel: str = "farthing_keys"
) -> AsyncIterator[tuple[Notices, list[str | None]]]:
    heard: list[str | None] = []
    ears = Notices(engine)
    ears.subscribe(channel, heard.append)
    task = asyncio.create_task(ears.run())
    try:
        await until(lambda: ears.healthy)
        yield ears, heard
    finally:
        task.cancel()
        await asyncio.wait({task})


@pytest.fixture
async def engine(database_url: str) -> AsyncIterator[AsyncEngine]:
    engine = create_async_engine(database_url, pool_size=2, max_overflow=0)
    yield engine
    await engine.dispose()


async def say(engine: AsyncEngine, payload: str) -> None:
    async with engine.begin() as conn:
        await notify(conn, "farthing_keys", payload)


async def test_every_replica_hears_what_is_committed_and_nothing_else(engine: AsyncEngine) -> None:
    async with listening(engine) as (_, first), listening(engine) as (_, second), listening(engine, "x") as (_, other):
        await say(engine, "one")
        with contextlib.suppress(ZeroDivisionError):
            async with engine.begin() as conn:
                await notify(conn, "farthing_keys", "undone")
                raise ZeroDivisionError
        await say(engine, "two")
        await until(lambda: len(first) == len(second) == 3)
        assert first == second == [None, "one", "two"]
        assert other == [None]


async def test_the_pool_keeps_all_its_connections(engine: AsyncEngine) -> None:
    async with listening(engine), engine.connect() as one, engine.connect() as two:
        assert (await one.execute(text("SELECT 1"))).scalar() == (await two.execute(text("SELECT 1"))).scalar() == 1


async def test_a_connection_that_the_server_ends_is_made_again_and_the_subscribers_know(engine: AsyncEngine) -> None:
    async with listening(engine) as (ears, heard):
        async with engine.begin() as conn:
            ended = await conn.execute(
                text(
                    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
                    " WHERE datname = current_database() AND pid <> pg_backend_pid()"
                )
            )
            assert ended.scalars().all() == [True]
        await until(lambda: not ears.healthy, seconds=notices.DEAF_SECONDS)
        await until(lambda: ears.healthy)
        await say(engine, "again")
        await until(lambda: len(heard) == 3)
        assert heard == [None, None, "again"]


async def test_silence_is_not_taken_for_calm(engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that takes statements and passes no notifications on, as behind a pooler: never healthy for long."""
    async with listening(engine) as (ears, heard):
        async with engine.connect() as conn:
            raw = (await conn.get_raw_connection()).driver_connection
            assert raw is not None
            unlisten = type(raw).execute

        async def execute(self: object, query: str, *args: object, timeout: float) -> object:  # noqa: ASYNC109
            return await unlisten(self, "UNLISTEN *" if "pg_notify" in query else query, timeout=timeout)

        monkeypatch.setattr(type(raw), "execute", execute)
        took = await until(lambda: not ears.healthy)
        assert took < notices.DEAF_SECONDS + notices.BEAT_SECONDS + 0.5
        monkeypatch.undo()
        await until(lambda: ears.healthy)
        assert heard == [None, None], "the connection was given up for a new one"


async def test_a_subscriber_that_fails_harms_nobody(engine: AsyncEngine) -> None:
    heard: list[str | None] = []

    def clumsy(payload: str | None) -> None:
        raise ValueError(payload)

    ears = Notices(engine)
    ears.subscribe("farthing_keys", clumsy)
    ears.subscribe("farthing_keys", heard.append)
    task = asyncio.create_task(ears.run())
    await until(lambda: ears.healthy)
    await say(engine, "one")
    await until(lambda: heard == [None, "one"])
    assert ears.healthy
    task.cancel()
    await asyncio.wait({task})
