"""Replicas as processes over one PostgreSQL, killed at random: never over budget, nothing lost, none counted twice."""

import asyncio
import os
import random
import signal
import sys
import time
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any, get_args

import pytest
from sqlalchemy import delete, insert, select, text
from sqlalchemy.ext.asyncio import create_async_engine

from billing.budgets import set_budget
from billing.ledger import Ledger
from billing.spool import Spool
from billing.tables import budget_window, lease, operation, wallet_entry
from billing.wallets import create_wallet, get_wallet, top_up
from billing.windows import BEGINNING, Window
from tests.billing.replicas import budget, wrong_sums
from tests.billing.test_lease_clocks import stop_clock

_TOO_MANY_LEASES = text("""
    SELECT budget_id, starts_at, split_part(replica, '.', 1) AS place, count(*) FROM lease
    GROUP BY budget_id, starts_at, place HAVING count(*) > 2
""")
"""On one spool a process that lives has a lease, and of the dead at most one, until the next process has copied what
that one left."""
_ALL_WINDOWS = text("""
    SELECT scope_id, sum(leased) AS leased, sum(settled) AS settled
    FROM budget b JOIN budget_window w ON w.budget_id = b.id WHERE NOT b.prepaid GROUP BY b.id
""")

ROOT = Path(__file__).parents[2]
REPLICAS = 2
SECONDS = float(os.environ.get("FARTHING_CRASH_SECONDS", "12"))
"""How long they are killed and started again; `FARTHING_CRASH_SECONDS=600` for a long run."""
SEED = int(os.environ.get("FARTHING_CRASH_SEED") or random.randrange(2**32))
"""Of the budgets, of what is added and of how long they live. It is printed; `FARTHING_CRASH_SEED` takes it again."""


async def live_and_be_killed(url: str, folder: Path, lines: int, recovers: bool) -> set[str]:
    """Let a replica live for so many lines, and perhaps until it has recovered: one that dies before leaves the leases
    of two. Return the ids of the operations that it said were spooled."""
    command = (sys.executable, "-m", "tests.billing.doomed_replica", url, str(folder))
    child = await asyncio.create_subprocess_exec(*command, cwd=ROOT, stdout=asyncio.subprocess.PIPE)
    assert child.stdout is not None
    said = [await child.stdout.readline() for _ in range(lines)]
    while recovers and said[-1] and b"recovered\n" not in said:
        said.append(await child.stdout.readline())
    child.send_signal(signal.SIGKILL)
    rest, _ = await child.communicate()
    return {line for line in (b"".join(said) + rest).decode().splitlines() if len(line) == 36}


@pytest.mark.timeout(120 + 2 * SECONDS)
async def test_killed_replicas_lose_nothing_and_never_overspend(database_url: str, tmp_path: Path) -> None:
    """Now and then the budgets are raised and the wallet is topped up, so that they are near their end for most of the
    time and not only once."""
    engine = create_async_engine(database_url)
    print(f"FARTHING_CRASH_SEED={SEED}")
    chance = random.Random(SEED)
    limits = {scope: Decimal(chance.randrange(300, most)) / 100 for scope, most in (("o", 900), ("a", 600), ("b", 600))}
    windows = {scope: chance.choice(get_args(Window)) for scope in limits}

    async def set_all() -> None:
        async with engine.begin() as conn:
            for scope, amount in limits.items():
                kind: Any = "org" if scope == "o" else "key"
                await set_budget(conn, kind, scope, windows[scope], amount, currency="USD")

    async def fill(amount: int) -> None:
        async with engine.begin() as conn:
            await top_up(conn, wallet, Decimal(amount), expires_at=datetime.now(UTC) + timedelta(seconds=30))

    await set_all()
    async with engine.begin() as conn:
        wallet = await create_wallet(conn, "user", "w", currency="USD")
    await fill(chance.randrange(3, 9))
    wrong: list[Any] = []

    async def watch() -> None:
        while True:
            wrong.extend(await wrong_sums(engine))
            if time.monotonic() < half:
                async with engine.connect() as conn:
                    wrong.extend(await conn.execute(_TOO_MANY_LEASES))
            await asyncio.sleep(0.01)

    async def raise_limits() -> None:
        while True:
            await asyncio.sleep(3)
            for scope in limits:
                limits[scope] += chance.randrange(3)
            await set_all()
            await fill(chance.randrange(1, 4))

    end = time.monotonic() + SECONDS
    half = end - SECONDS / 2
    """Until then they die only when they have recovered, afterwards whenever it comes."""

    async def replica(number: int) -> set[str]:
        spooled: set[str] = set()
        while time.monotonic() < end:
            recovers, lines = time.monotonic() < half, chance.randrange(40, 400)
            spooled |= await live_and_be_killed(database_url, tmp_path / str(number), lines, recovers)
        return spooled

    others = [asyncio.create_task(watch()), asyncio.create_task(raise_limits())]
    spooled = set().union(*await asyncio.gather(*(replica(number) for number in range(REPLICAS))))
    for number in range(REPLICAS):
        spool = Spool(tmp_path / str(number))
        await Ledger(engine, spool).recover()
        await spool.close()
    for task in others:
        task.cancel()
    await asyncio.wait(others)

    assert wrong == []
    async with engine.connect() as conn:
        rows = {str(row.id): row.billed for row in await conn.execute(select(operation.c.id, operation.c.billed))}
        purse = await get_wallet(conn, wallet)
        entries = await conn.execute(select(wallet_entry.c.kind, wallet_entry.c.amount, wallet_entry.c.uncollected))
        entered = [tuple(row) for row in entries]
        budgets = {row.scope_id: row for row in await conn.execute(_ALL_WINDOWS)}
    assert len(spooled) > 50
    assert spooled <= rows.keys()
    assert all(budget.leased == 0 for budget in budgets.values())
    assert budgets["o"].settled == sum(rows.values()) == budgets["a"].settled + budgets["b"].settled
    assert purse is not None and purse.held == 0
    assert purse.balance == sum(amount for _, amount, _ in entered) >= 0
    assert sum(rows.values()) == -sum(amount for kind, amount, _ in entered if kind == "capture")
    assert not any(uncollected for *_, uncollected in entered)
    await engine.dispose()


async def test_too_many_leases_of_one_spool_are_seen(database_url: str) -> None:
    engine = create_async_engine(database_url)
    budget_id = await budget(engine, "key", "k", "1")

    async def found(*replicas: str) -> list[Any]:
        async with engine.begin() as conn:
            row = {"budget_id": budget_id, "starts_at": BEGINNING}
            await conn.execute(delete(budget_window))
            await conn.execute(insert(budget_window).values(row))
            await conn.execute(insert(lease), [row | {"replica": name, "granted": 0} for name in replicas])
            return list(await conn.execute(_TOO_MANY_LEASES))

    assert await found("p.1", "p.2", "q.1", "q.2") == []
    assert await found("p.1", "p.2", "p.3", "q.1") == [(budget_id, BEGINNING, "p", 3)]
    await engine.dispose()


@pytest.mark.parametrize("apart", [0, 30])
async def test_eight_processes_and_a_budget_for_one_call(database_url: str, apart: int) -> None:
    """It is ten to the hour, and the clocks of the processes are so many seconds apart: some are in the next hour."""
    engine = create_async_engine(database_url)
    await stop_clock(engine, datetime(2026, 11, 29, 12, 59, 50, tzinfo=UTC))
    await budget(engine, "key", "k", "0.01", window="hour")
    children = []
    for number in range(8):
        calls = 7 if number < 2 else 6  # 50 together
        command = [sys.executable, "-m", "tests.billing.last_call", database_url, f"p{number}.1", str(calls)]
        if apart:
            command.append(str(number % 2 * apart))
        pipes = {"stdin": asyncio.subprocess.PIPE, "stdout": asyncio.subprocess.PIPE}
        children.append(await asyncio.create_subprocess_exec(*command, cwd=ROOT, **pipes))

    async def told(child: asyncio.subprocess.Process) -> str:
        assert child.stdout is not None
        return (await child.stdout.readline()).decode().strip()

    async def go() -> None:
        for child in children:
            assert child.stdin is not None
            child.stdin.write(b"go\n")

    assert await asyncio.gather(*map(told, children)) == ["ready"] * 8
    await go()
    admitted = await asyncio.gather(*map(told, children))
    assert sorted(admitted) == ["0"] * 7 + ["1"]
    async with engine.connect() as conn:
        windows = list(await conn.execute(text("SELECT starts_at, leased FROM budget_window WHERE leased > 0")))
    assert windows == [(datetime(2026, 11, 29, 12, tzinfo=UTC), Decimal("0.01"))]
    await go()
    assert [await child.wait() for child in children] == [0] * 8
    await engine.dispose()
