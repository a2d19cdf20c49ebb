"""Eight gateway processes on one database, with a budget for exactly one call."""

import asyncio
import os
from contextlib import AsyncExitStack
from decimal import Decimal
from pathlib import Path

import httpx
import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from billing.budgets import set_budget
from tests.gateway.running import ADMIN_KEY_HASH, CHAT, make_people
from tests.gateway.scripted import Scripted
from tests.gateway.test_process import TOML, Launcher, free_port

GATEWAYS, CALLS = 8, 50
WORST_CASE = Decimal("0.0002")  # 10 tokens of prompt at 10 a million, 5 of output at 20


@pytest.mark.e2e
@pytest.mark.timeout(300)
async def test_one_of_fifty_calls_is_admitted(
    engine: AsyncEngine, upstream: Scripted, database_url: str, tmp_path: Path
) -> None:
    config = tmp_path / "farthing.toml"
    config.write_text(TOML.format(url=upstream.url), encoding="utf-8")
    people = await make_people(engine)
    async with engine.begin() as connection:
        await set_budget(connection, "org", people.org, "day", WORST_CASE, currency="USD")
    environment = os.environ | {"FARTHING_DATABASE_URL": database_url, "FARTHING_ADMIN_KEY_HASH": ADMIN_KEY_HASH}
    headers = {"authorization": f"Bearer {people.secret}"}
    async with AsyncExitStack() as stack:
        ports = []
        for number in range(GATEWAYS):
            ports.append(free_port())
            own = environment | {"FARTHING_DATA_DIR": str(tmp_path / str(number))}
            await stack.enter_async_context(Launcher(config, own).running(ports[-1]))
        http = await stack.enter_async_context(httpx.AsyncClient(headers=headers, timeout=60, trust_env=False))
        answers = await asyncio.gather(
            *(
                http.post(
                    f"http://127.0.0.1:{ports[number % GATEWAYS]}/v1/chat/completions", json=CHAT | {"max_tokens": 5}
                )
                for number in range(CALLS)
            )
        )
        assert sorted(answer.status_code for answer in answers) == [200] + [402] * (CALLS - 1)
        assert len(upstream.chats) == 1
    async with engine.connect() as connection:
        query = text("SELECT settled + leased FROM budget_window")
        assert 0 < (await connection.execute(query)).scalar_one() <= WORST_CASE
