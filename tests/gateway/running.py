"""A gateway on a real socket in the test's own event loop, with its database, one key and its ledger to look at."""

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch
from uuid import UUID, uuid4

import httpx
import uvicorn
from openai import AsyncOpenAI
from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from billing.notices import Notices, notify
from billing.people import KEYS_CHANNEL, create_key, create_org, create_team, create_user
from billing.tables import attempt, operation
from gateway import app
from gateway.server import config
from gateway.settings import Settings

ADMIN_KEY_HASH = "00" * 32
PATIENCE = 60.0
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}


def configuration(upstream_url: str, database_url: str, data_dir: Path) -> dict[str, Any]:
    """Two models on one scripted engine, a priced one and an unpriced, and one on a hosted (kind openai) upstream."""
    price = {"input_fresh": "10", "input_cached": "1", "output_text": "20"}
    return {
        "database_url": database_url,
        "admin_key_hash": ADMIN_KEY_HASH,
        "data_dir": str(data_dir),
        "roles": {"small": "tiny", "large": "big"},
        "upstreams": {
            "engine": {
                "kind": "engine",
                "base_url": upstream_url,
                "device_price_per_hour": "3.60",
                "connect_window_seconds": 1.0,
            },
            "hosted": {"kind": "openai", "base_url": upstream_url, "connect_window_seconds": 1.0},
        },
        "models": {
            "tiny": {"upstreams": ["engine"], "price": price},
            "big": {"upstreams": ["engine"], "price": price},
            "gratis": {"upstreams": ["engine"]},
            "hosted": {
                "upstreams": [{"upstream": "hosted", "upstream_model": "vendor-1", "cost": price}],
                "price": price,
            },
        },
    }


@dataclass
class People:
    org: UUID
    team: UUID
    user: UUID
    key: UUID
    secret: str


async def make_people(engine: AsyncEngine) -> People:
    async with engine.begin() as connection:
        org = await create_org(connection, "Acme")
        team = await create_team(connection, org, "Search")
        user = await create_user(connection, org, "Ada", team)
        key = await create_key(connection, org, "laptop", team_id=team, user_id=user)
    return People(org, team, user, key.id, key.secret)


@dataclass
class Gateway:
    url: str
    people: People
    engine: AsyncEngine
    http: httpx.AsyncClient
    notices: Notices | None = None
    """Where the gateway runs in this process."""

    @property
    def sdk(self) -> AsyncOpenAI:
        return AsyncOpenAI(base_url=f"{self.url}/v1", api_key=self.people.secret, max_retries=0)

    async def chat(self, **changes: Any) -> httpx.Response:
        return await self.http.post("/v1/chat/completions", json=CHAT | changes)

    async def send(self, body: bytes) -> httpx.Response:
        return await self.http.post("/v1/chat/completions", content=body)

    async def heard(self) -> None:
        """Until the gateway knows what was committed before: it hears of changes in their order, then reads them."""
        assert self.notices is not None
        mark, arrived = str(uuid4()), asyncio.Event()
        self.notices.subscribe(KEYS_CHANNEL, lambda payload: arrived.set() if payload == mark else None)
        async with self.engine.begin() as connection:
            await notify(connection, KEYS_CHANNEL, mark)
        await asyncio.wait_for(arrived.wait(), PATIENCE)
        await asyncio.sleep(0.1)

    async def rows(self, count: int = 1) -> list[dict[str, Any]]:
        """The ledger's operations with their `attempts`, oldest first, once there are `count`; more is a failure."""
        deadline = asyncio.get_running_loop().time() + PATIENCE
        while True:
            found = await self._rows()
            if len(found) >= count or asyncio.get_running_loop().time() > deadline:
                assert len(found) == count, found
                return found
            await asyncio.sleep(0.02)

    async def row(self) -> dict[str, Any]:
        return (await self.rows(1))[0]

    async def _rows(self) -> list[dict[str, Any]]:
        async with self.engine.connect() as connection:
            operations = (await connection.execute(select(operation).order_by(operation.c.id))).mappings().all()
            attempts = (await connection.execute(select(attempt).order_by(attempt.c.number))).mappings().all()
        return [
            dict(row) | {"attempts": [dict(a) for a in attempts if a["operation_id"] == row["id"]]}
            for row in operations
        ]

    @contextlib.asynccontextmanager
    async def socket(self, head: str, body: bytes = b"") -> AsyncIterator[tuple[asyncio.StreamReader, Any]]:
        """A raw connection on which `head` (its first lines) and `body` were sent; authorised."""
        reader, writer = await asyncio.open_connection("127.0.0.1", int(self.url.rpartition(":")[2]))
        try:
            writer.write(f"{head}\r\nhost: x\r\nauthorization: Bearer {self.people.secret}\r\n\r\n".encode() + body)
            await writer.drain()
            yield reader, writer
        finally:
            writer.transport.abort()

    @contextlib.asynccontextmanager
    async def raw_chat(self, **changes: Any) -> AsyncIterator[tuple[asyncio.StreamReader, Any]]:
        """A chat completion on a raw connection that is cut on the way out."""
        body = json.dumps(CHAT | changes).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\ncontent-length: {len(body)}"
        async with self.socket(head, body) as connection:
            yield connection


class Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield  # the test runner keeps its own


@contextlib.asynccontextmanager
async def serving(settings: Settings) -> AsyncIterator[tuple[str, Notices]]:
    """The gateway's URL while it runs, and what it hears of the database with; stopped as SIGTERM would."""
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    made: list[Notices] = []

    def make(engine: AsyncEngine) -> Notices:
        made.append(Notices(engine))
        return made[-1]

    with patch.object(app, "Notices", make):
        server = Server(config(app.create_app(settings), settings))
    task = asyncio.create_task(server.serve(sockets=[listener]))
    while not server.started:
        await asyncio.sleep(0.01)
        assert not task.done(), task.exception()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", made[0]
    finally:
        server.should_exit = True
        await task


@contextlib.asynccontextmanager
async def running_gateway(settings: dict[str, Any], people_url: str | None = None) -> AsyncIterator[Gateway]:
    """Settings as in `configuration`. `people_url`: the database where it differs from what the gateway sees."""
    engine = create_async_engine(people_url or settings["database_url"])
    people = await make_people(engine)
    headers = {"authorization": f"Bearer {people.secret}", "content-type": "application/json"}
    async with (
        serving(Settings(**settings)) as (url, notices),
        httpx.AsyncClient(base_url=url, headers=headers, timeout=120, trust_env=False) as http,
    ):
        await _wait_for_prices(http)
        yield Gateway(url, people, engine, http, notices)
    await engine.dispose()


async def _wait_for_prices(http: httpx.AsyncClient) -> None:
    for _ in range(3000):
        if "price book" not in (await http.get("/health/ready")).text:
            return
        await asyncio.sleep(0.01)
    raise AssertionError("the gateway did not become ready")
