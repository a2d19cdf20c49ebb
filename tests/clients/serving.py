"""A running Farthing for clients: the engine and the gateway as processes, one key, and the ledger to look at."""

import asyncio
import contextlib
import json
import os
import socket
import time
import urllib.request
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any, TypeVar
from uuid import UUID

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncConnection, create_async_engine

from billing.budgets import set_budget
from billing.people import create_key, create_org
from billing.tables import operation
from gateway.processes import PythonChild

T = TypeVar("T")
PATIENCE = 300.0
"""The engine's first start packs weights."""
SMALL, LARGE = "smollm2-135m", "qwen2.5-coder-0.5b"
"""The first answers quickly; the second has a chat template with tools."""
PRICE = '{ input_fresh = "10", input_cached = "1", output_text = "20" }'
CONFIGURATION = """
[roles]
small = "{small}"
large = "{large}"
[upstreams.engine]
kind = "engine"
base_url = "{engine}/v1"
[upstreams.scripted]
kind = "openai"
base_url = "{scripted}/v1"
[models."{small}"]
upstreams = ["engine"]
price = {price}
[models."{large}"]
upstreams = ["engine"]
price = {price}
[models.scripted]
upstreams = ["scripted"]
context = 4096
price = {price}
"""


@dataclass(frozen=True)
class Key:
    id: UUID
    secret: str


@dataclass(frozen=True)
class Farthing:
    url: str
    database_url: str
    org: UUID
    key: str
    """One that may do everything."""

    @property
    def v1(self) -> str:
        return f"{self.url}/v1"

    @property
    def environment(self) -> dict[str, str]:
        """For clients that run as a process of their own."""
        return {**os.environ, "FARTHING_URL": self.url, "FARTHING_KEY": self.key, "SMALL": SMALL, "LARGE": LARGE}

    def new_key(self, budget: Decimal | None = None) -> Key:
        async def make(connection: AsyncConnection) -> Key:
            made = await create_key(connection, self.org, "another")
            if budget is not None:
                await set_budget(connection, "key", made.id, "none", budget, currency="USD")
            return Key(made.id, made.secret)

        return in_database(self.database_url, make)

    def operations(self, key: Key, count: int) -> list[Mapping[str, Any]]:
        """What `key` asked for so far, once it is `count`; another number a second later is a failure."""

        async def read(connection: AsyncConnection) -> list[Mapping[str, Any]]:
            rows = await connection.execute(select(operation).where(operation.c.key_id == key.id))
            return [dict(row) for row in rows.mappings()]

        deadline = time.monotonic() + 10
        while len(in_database(self.database_url, read)) < count and time.monotonic() < deadline:
            time.sleep(0.1)
        time.sleep(1)
        found = in_database(self.database_url, read)
        assert len(found) == count, found
        return found


def in_database(url: str, work: Callable[[AsyncConnection], Awaitable[T]]) -> T:
    async def run() -> T:
        engine = create_async_engine(url)
        try:
            async with engine.begin() as connection:
                return await work(connection)
        finally:
            await engine.dispose()

    return asyncio.run(run())


@contextlib.contextmanager
def farthing(database_url: str, scripted: str, folder: Path) -> Iterator[Farthing]:
    async def people(connection: AsyncConnection) -> tuple[UUID, str]:
        org = await create_org(connection, "Acme")
        return org, (await create_key(connection, org, "everything")).secret

    org, key = in_database(database_url, people)
    with process(folder, "engine", ["engine", "serve", SMALL, LARGE], "/health", {}) as engine:
        config = folder / "farthing.toml"
        names = {"small": SMALL, "large": LARGE, "engine": engine, "scripted": scripted, "price": PRICE}
        config.write_text(CONFIGURATION.format(**names))
        env = {
            "FARTHING_DATABASE_URL": database_url,
            "FARTHING_ADMIN_KEY_HASH": "00" * 32,
            "FARTHING_DATA_DIR": str(folder / "data"),
        }
        with process(folder, "gateway", ["gateway", "--config", str(config)], "/health/ready", env) as gateway:
            yield Farthing(gateway, database_url, org, key)


@contextlib.contextmanager
def process(folder: Path, name: str, arguments: list[str], health: str, env: dict[str, str]) -> Iterator[str]:
    """`python -m …` on a free port, ready; its address."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    child = PythonChild(name, folder / f"{name}.log", [*arguments, "--port", str(port)], env, 10)
    child.start()
    try:
        url = f"http://127.0.0.1:{port}"
        deadline = time.monotonic() + PATIENCE
        while not _answers(url + health):
            assert child.exit_code() is None and time.monotonic() < deadline, child.last_lines()
            time.sleep(0.1)
        yield url
    finally:
        child.stop()


def _answers(url: str) -> bool:
    with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=5) as answer:
        return bool(json.load(answer))
    return False
