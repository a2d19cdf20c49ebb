"""Device hours of a running gateway: one engine is counted once, and its bill is what requests and idleness cost."""

import asyncio
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from billing.devices import DeviceHour, device_hours
from billing.margins import margins
from gateway import device_meter
from gateway.settings import Settings
from tests.gateway.running import Gateway, configuration, running_gateway, serving
from tests.gateway.scripted import Connection, Request, Scripted
from tests.gateway.test_real_engine import QUESTION, Engine, free_port

HOURLY = Decimal("3.60")


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_meter, "EVERY_SECONDS", 0.1)


async def hours(gateway: Gateway) -> list[DeviceHour]:
    now = datetime.now(UTC)
    async with gateway.engine.connect() as connection:
        return await device_hours(connection, now - timedelta(days=2), now + timedelta(days=1))


async def wall(gateway: Gateway) -> Decimal:
    return sum((hour.wall_seconds for hour in await hours(gateway)), Decimal(0))


async def until_wall(gateway: Gateway, least: float) -> list[DeviceHour]:
    for _ in range(100):
        if await wall(gateway) >= least:
            break
        await asyncio.sleep(0.1)
    return await hours(gateway)


async def test_replicas_and_restarts_of_the_engine_count_every_second_once(
    settings: dict[str, Any], upstream: Scripted, tmp_path: Path
) -> None:
    account = {"instance": "a", "wall_seconds": 60.0, "idle_seconds": 45.0}

    async def answer(_: Request, connection: Connection) -> None:
        await connection.json(account)

    upstream.paths["/v1/device"] = answer
    async with running_gateway(settings) as gateway:
        async with serving(Settings(**settings | {"data_dir": str(tmp_path / "other")})):
            assert await until_wall(gateway, 60)
            await asyncio.sleep(0.5)
            assert await wall(gateway) == 60
            account |= {"instance": "b", "wall_seconds": 2.0, "idle_seconds": 0.5}
            found = await until_wall(gateway, 62)
        assert sum(hour.idle_seconds for hour in found) == Decimal("45.5")
        assert sum(hour.idle_cost or 0 for hour in found) == Decimal("45.5") * HOURLY / 3600
        assert sum(hour.busy_cost or 0 for hour in found) == Decimal("16.5") * HOURLY / 3600


@pytest.mark.parametrize("answer", [{"wall": 1}, {"instance": "a", "wall_seconds": 1.0, "idle_seconds": 2.0}, None])
async def test_an_account_that_cannot_be_is_no_hour(gateway: Gateway, upstream: Scripted, answer: Any) -> None:
    async def say(_: Request, connection: Connection) -> None:
        await (connection.json({}, 404) if answer is None else connection.json(answer))

    upstream.paths["/v1/device"] = say
    await asyncio.sleep(0.5)
    assert await hours(gateway) == []
    assert (await gateway.chat()).status_code == 200


@pytest.fixture
async def engine(small_model: Path) -> AsyncIterator[Engine]:
    engine = Engine(small_model, await free_port())
    await engine.start()
    yield engine
    await engine.kill()


@pytest.mark.model
async def test_what_requests_cost_and_idle_time_are_the_device_bill(
    engine: Engine, database_url: str, tmp_path: Path
) -> None:
    settings = configuration(engine.url, database_url, tmp_path)
    settings["models"]["tiny"]["upstreams"] = [{"upstream": "engine", "upstream_model": await engine.ready()}]
    async with running_gateway(settings) as gateway:
        await asyncio.gather(
            *(gateway.chat(messages=QUESTION, max_tokens=40, stream=number % 2 == 0) for number in range(4))
        )
        async with gateway.raw_chat(messages=QUESTION, stream=True, max_tokens=500, ignore_eos=True) as (reader, _):
            await asyncio.wait_for(reader.readuntil(b'"content"'), 20)
        await gateway.rows(5)
        await until_wall(gateway, float(await wall(gateway)) + 0.5)
        now = datetime.now(UTC)
        async with gateway.engine.connect() as connection:
            period = (now - timedelta(hours=2), now + timedelta(hours=1))
            found = await margins(connection, *period, "model")
            spread = await margins(connection, *period, "model", spread_idle=True)
        bill = await wall(gateway) * HOURLY / 3600
    (line,), (idle,), (whole,) = found.lines, found.idle, spread.lines
    assert line.cost and idle.cost and 0 < idle.cost < bill
    assert abs(line.cost + idle.cost - bill) < bill / 100
    assert spread.idle == [] and whole.cost == line.cost and whole.idle_cost == idle.cost
