"""Replicas that are killed at random over one PostgreSQL: never over budget, nothing lost, nothing counted twice."""

import asyncio
import random
import signal
import sys
from decimal import Decimal
from pathlib import Path

from sqlalchemy import select
from sqlalchemy.ext.asyncio import create_async_engine

from billing.budgets import Budget, list_budgets, set_budget
from billing.ledger import Ledger
from billing.spool import Spool
from billing.tables import operation

ROOT = Path(__file__).parents[2]
REPLICAS, LIVES = 2, 2


async def live_and_be_killed(url: str, folder: Path, lines: int) -> set[str]:
    """Let a replica live for so many lines; return the ids of the operations that it said were spooled."""
    command = (sys.executable, "-m", "tests.billing.doomed_replica", url, str(folder))
    child = await asyncio.create_subprocess_exec(*command, cwd=ROOT, stdout=asyncio.subprocess.PIPE)
    assert child.stdout is not None
    said = [await child.stdout.readline() for _ in range(lines)]
    child.send_signal(signal.SIGKILL)
    rest, _ = await child.communicate()
    return {line for line in (b"".join(said) + rest).decode().splitlines() if len(line) == 36}


async def test_killed_replicas_lose_nothing_and_never_overspend(database_url: str, tmp_path: Path) -> None:
    engine = create_async_engine(database_url)
    async with engine.begin() as conn:
        for kind, scope, limit in (("org", "o", 6), ("key", "a", 4), ("key", "b", 3)):
            await set_budget(conn, kind, scope, "none", Decimal(limit), currency="USD")  # type: ignore[arg-type]
    over: list[Budget] = []

    async def watch() -> None:
        while True:
            async with engine.connect() as conn:
                over.extend(b for b in await list_budgets(conn) if b.leased + b.settled > b.limit_amount)
            await asyncio.sleep(0.01)

    async def replica(number: int) -> set[str]:
        spooled: set[str] = set()
        for _ in range(LIVES):
            spooled |= await live_and_be_killed(database_url, tmp_path / str(number), random.randrange(40, 120))
        return spooled

    watcher = asyncio.create_task(watch())
    spooled = set().union(*await asyncio.gather(*(replica(number) for number in range(REPLICAS))))
    for number in range(REPLICAS):
        spool = Spool(tmp_path / str(number))
        await Ledger(engine, spool).recover()
        await spool.close()
    watcher.cancel()

    assert over == []
    async with engine.connect() as conn:
        rows = {str(row.id): row.billed for row in await conn.execute(select(operation.c.id, operation.c.billed))}
        budgets = {budget.scope_id: budget for budget in await list_budgets(conn)}
    assert len(spooled) > 50
    assert spooled <= rows.keys()
    assert all(budget.leased == 0 for budget in budgets.values())
    assert budgets["o"].settled == sum(rows.values()) == budgets["a"].settled + budgets["b"].settled
    await engine.dispose()
