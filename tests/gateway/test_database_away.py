"""PostgreSQL goes away and comes back: 503 with Retry-After meanwhile, nothing lost, nobody restarts anything."""

import asyncio
import contextlib
import os
import urllib.parse
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy.ext.asyncio import create_async_engine

from gateway.settings import Settings
from tests.gateway.running import CHAT, Gateway, make_people, running_gateway, serving
from tests.gateway.scripted import Scripted


class Wire:
    """A Unix socket in front of PostgreSQL's: cut it, and to the gateway the database is gone."""

    def __init__(self, folder: Path, database_url: str) -> None:
        base, _, place = database_url.partition("?host=")
        self.url = f"{base}?host={folder}"
        self._path = str(folder / ".s.PGSQL.5432")
        self._real = urllib.parse.unquote(place) + "/.s.PGSQL.5432"
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.StreamWriter] = set()
        self.refusing: tuple[str, str] | None = None
        """SQLSTATE and words that a new connection is answered with, as the server does while it starts."""

    async def mend(self) -> None:
        self._server = await asyncio.start_unix_server(self._join, self._path)

    async def cut(self) -> None:
        if self._server is not None:
            self._server.close()
            os.unlink(self._path)  # noqa: PTH108
            for writer in self._open:
                writer.transport.abort()
            self._server = None

    async def _join(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.refusing is not None:
            await reader.read(1000)
            state, words = self.refusing
            fields = f"SFATAL\0VFATAL\0C{state}\0M{words}\0\0".encode()
            writer.write(b"E" + (len(fields) + 4).to_bytes(4) + fields)
            writer.close()
            return
        back_reader, back_writer = await asyncio.open_unix_connection(self._real)
        pair = {writer, back_writer}
        self._open |= pair
        with contextlib.suppress(ConnectionError):
            await asyncio.gather(_pump(reader, back_writer), _pump(back_reader, writer))
        self._open -= pair


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(65536):
        writer.write(data)
        await writer.drain()
    writer.close()


@contextlib.asynccontextmanager
async def cuttable(settings: dict[str, Any], tmp_path: Path) -> AsyncIterator[tuple[Gateway, Wire]]:
    folder = tmp_path / "wire"
    folder.mkdir()
    wire = Wire(folder, settings["database_url"])
    await wire.mend()
    async with running_gateway(settings | {"database_url": wire.url}, people_url=settings["database_url"]) as gateway:
        yield gateway, wire
    await wire.cut()


async def test_away_and_back(settings: dict[str, Any], tmp_path: Path) -> None:
    async with cuttable(settings, tmp_path) as (gateway, wire):
        assert (await gateway.chat()).status_code == 200
        await wire.cut()
        await asyncio.sleep(1.1)  # the key's look-up is forgotten
        for _ in range(3):
            answer = await gateway.chat()
            assert answer.status_code == 503
            assert int(answer.headers["retry-after"]) > 0
            assert answer.json()["error"]["type"] == "server_error"
        ready = await gateway.http.get("/health/ready")
        assert (ready.status_code, ready.json()["reasons"]["database"]) == (503, "does not answer")
        assert (await gateway.http.get("/health/live")).status_code == 200
        wrong = await gateway.http.get("/v1/models", headers={"authorization": "Bearer fk-unknown"})
        assert wrong.status_code == 503, "nobody is told that a key is wrong while nobody can know"
        await wire.mend()
        assert (await gateway.chat()).status_code == 200


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
        await asyncio.sleep(0.2)
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
    wire = Wire(folder, settings["database_url"])

    engine = create_async_engine(settings["database_url"])
    people = await make_people(engine)
    headers = {"authorization": f"Bearer {people.secret}"}
    async with (
        serving(Settings(**(settings | {"database_url": wire.url}))) as url,
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
