"""PostgreSQL goes away and comes back: 503 with Retry-After meanwhile, nothing lost, nobody restarts anything."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy.ext.asyncio import create_async_engine

from gateway.settings import Settings
from tests.gateway.pooled import until
from tests.gateway.running import CHAT, Gateway, make_people, running_gateway, serving
from tests.gateway.scripted import Scripted
from tests.gateway.wire import Wire


@contextlib.asynccontextmanager
async def cuttable(settings: dict[str, Any], tmp_path: Path) -> AsyncIterator[tuple[Gateway, Wire]]:
    folder = tmp_path / "wire"
    folder.mkdir()
    wire = Wire(str(folder), settings["database_url"])
    await wire.mend()
    async with running_gateway(settings | {"database_url": wire.url}, people_url=settings["database_url"]) as gateway:
        yield gateway, wire
    await wire.cut()


async def test_away_and_back(settings: dict[str, Any], tmp_path: Path) -> None:
    """A key that the gateway has seen, and no budget to lease: served as before, and in the ledger afterwards."""
    async with cuttable(settings, tmp_path) as (gateway, wire):
        assert (await gateway.chat()).status_code == 200
        await wire.cut()
        for _ in range(3):
            await asyncio.sleep(0.5)
            assert (await gateway.chat()).status_code == 200
            assert (await gateway.http.get("/v1/models")).status_code == 200
        ready = await gateway.http.get("/health/ready")
        assert (ready.status_code, ready.json()["reasons"]["database"]) == (503, "does not answer")
        assert (await gateway.http.get("/health/live")).status_code == 200
        unknown = await gateway.http.get("/v1/models", headers={"authorization": "Bearer fk-unknown"})
        assert unknown.status_code == 503, "nobody is told that a key is wrong while nobody can know"
        assert int(unknown.headers["retry-after"]) > 0
        assert unknown.json()["error"]["type"] == "server_error"
        await wire.mend()
        assert (await gateway.chat()).status_code == 200
        assert [row["status"] for row in await gateway.rows(5)] == ["ok"] * 5


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ("57P03", "the database system is starting up"),
        ("57P01", "terminating connection due to administrator command"),
        ("53300", "sorry, too many clients already"),
    ],
)
async def test_a_server_that_turns_everybody_away(
    settings: dict[str, Any], tmp_path: Path, state: str, words: str
) -> None:
    async with cuttable(settings, tmp_path) as (gateway, wire):
        await wire.cut()
        wire.refusing = (state, words)
        await wire.mend()
        await asyncio.sleep(0.1)
        answer = await gateway.chat()
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "2")
        ready = await gateway.http.get("/health/ready")
        assert (ready.status_code, ready.json()["reasons"]["database"]) == (503, "does not answer")
        wire.refusing = None
        assert (await gateway.chat()).status_code == 200


async def test_an_answer_on_its_way_is_finished_and_recorded_later(
    settings: dict[str, Any], tmp_path: Path, upstream: Scripted
) -> None:
    upstream.words, upstream.pause = ["a"] * 10, 0.05
    async with cuttable(settings, tmp_path) as (gateway, wire):
        asking = asyncio.create_task(gateway.chat(stream=True))
        await until(lambda: upstream.chats)
        await wire.cut()
        answer = await asking
        assert answer.text.endswith("data: [DONE]\n\n")
        assert '"error"' not in answer.text
        await gateway.rows(0)
        await wire.mend()
        assert (await gateway.row())["status"] == "ok"


async def test_a_gateway_started_before_its_database(settings: dict[str, Any], tmp_path: Path) -> None:
    folder = tmp_path / "wire"
    folder.mkdir()
    wire = Wire(str(folder), settings["database_url"])

    engine = create_async_engine(settings["database_url"])
    people = await make_people(engine)
    headers = {"authorization": f"Bearer {people.secret}"}
    async with (
        serving(Settings(**(settings | {"database_url": wire.url}))) as (url, _),
        httpx.AsyncClient(base_url=url, headers=headers, trust_env=False) as http,
    ):
        assert (await http.post("/v1/chat/completions", json=CHAT)).status_code == 503
        await wire.mend()
        statuses = []
        while 200 not in statuses and len(statuses) < 50:
            await asyncio.sleep(0.1)
            statuses.append((await http.post("/v1/chat/completions", json=CHAT)).status_code)
        assert set(statuses) <= {200, 503} and statuses[-1] == 200
    await wire.cut()
    await engine.dispose()
