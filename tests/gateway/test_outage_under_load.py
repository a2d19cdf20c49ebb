"""The database goes away while callers go on. FARTHING_OUTAGE_SECONDS says for how long: 60 is a whole minute."""

import asyncio
import os
import time
from collections import Counter
from decimal import Decimal
from pathlib import Path
from typing import Any

from sqlalchemy import func, select

from billing.budgets import set_budget
from billing.people import create_key, create_org
from billing.tables import operation
from tests.gateway.running import CHAT, Gateway
from tests.gateway.scripted import Scripted
from tests.gateway.test_database_away import cuttable

SECONDS = float(os.environ.get("FARTHING_OUTAGE_SECONDS", "4"))
CALLERS = 4
"""Of each key."""
PAUSE = 0.05


async def another_key(gateway: Gateway, budget: Decimal) -> str:
    """Of an organisation with a hard budget."""
    async with gateway.engine.begin() as connection:
        org = await create_org(connection, "Payers")
        key = await create_key(connection, org, "paying")
        await set_budget(connection, "org", str(org), "none", budget, currency="USD")
    await gateway.heard()
    return key.secret


class Load:
    """Callers of one key, each with one request after the other."""

    def __init__(self, gateway: Gateway, secret: str) -> None:
        self.seen: Counter[int] = Counter()
        self.latest: int | None = None
        self._headers = {"authorization": f"Bearer {secret}"}
        self._http = gateway.http
        self._tasks = [asyncio.create_task(self._call()) for _ in range(CALLERS)]

    async def _call(self) -> None:
        while True:
            answer = await self._http.post("/v1/chat/completions", json=CHAT | {"max_tokens": 5}, headers=self._headers)
            self.seen[answer.status_code] += 1
            self.latest = answer.status_code
            assert answer.status_code != 503 or int(answer.headers["retry-after"]) > 0
            await asyncio.sleep(PAUSE)

    async def until_served(self) -> None:
        """Return once all callers' latest requests were served."""
        before = self.seen[200]
        deadline = time.monotonic() + 20
        while self.seen[200] < before + 2 * CALLERS or self.latest != 200:
            assert time.monotonic() < deadline, self.seen
            await asyncio.sleep(0.05)

    async def stop(self) -> None:
        for task in self._tasks:
            assert not task.done(), task.exception()
            task.cancel()
        await asyncio.wait(self._tasks)


async def test_callers_go_on_and_everything_recovers_by_itself(
    settings: dict[str, Any], upstream: Scripted, tmp_path: Path
) -> None:
    async with cuttable(settings, tmp_path) as (gateway, wire):
        paying = await another_key(gateway, Decimal(1))
        free, bounded = Load(gateway, gateway.people.secret), Load(gateway, paying)
        await free.until_served()
        await bounded.until_served()
        await wire.cut()
        before = bounded.seen[200]
        down_until = time.monotonic() + SECONDS
        stranger = {"authorization": "Bearer fk-nobody-knows-it"}
        while time.monotonic() < down_until:
            answer = await gateway.http.get("/v1/models", headers=stranger)
            assert answer.status_code == 503, "nobody can know yet that the key is wrong"
            await asyncio.sleep(min(1.0, SECONDS / 4))
        assert bounded.seen[200] > before, "the lease at hand is spent meanwhile"
        await wire.mend()
        await free.until_served()
        await bounded.until_served()
        statuses = [(await gateway.http.get("/v1/models", headers=stranger)).status_code for _ in range(20)]
        assert set(statuses) <= {401, 503} and statuses[-1] == 401
        await free.stop()
        await bounded.stop()
        assert set(free.seen) == {200}, "a cached key without a budget needs no database"
        assert set(bounded.seen) <= {200, 503}
        await all_recorded(gateway, free.seen[200] + bounded.seen[200])


async def all_recorded(gateway: Gateway, served: int) -> None:
    """Each answer that was read has its row; those that the callers' end cut off may have one more each."""
    deadline = time.monotonic() + 30
    while True:
        async with gateway.engine.connect() as connection:
            query = select(func.count()).where(operation.c.status == "ok")
            found = (await connection.execute(query)).scalar_one()
        if served <= found <= served + 2 * CALLERS:
            return
        assert time.monotonic() < deadline, (served, found)
        await asyncio.sleep(0.2)
