"""Jobs in a real PostgreSQL: one replica at a time, whatever fails."""

import asyncio

import pytest
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine
from structlog.testing import capture_logs

from billing.housekeeping import Housekeeping, Job, run_alone
from tests.billing.replicas import until


async def nothing(engine: AsyncEngine) -> None:
    pass


async def test_a_job_runs_in_one_replica_at_a_time(engine: AsyncEngine) -> None:
    running, most, turns = 0, 0, 0

    async def work(_: AsyncEngine) -> None:
        nonlocal running, most, turns
        running += 1
        most, turns = max(most, running), turns + 1
        await asyncio.sleep(0.01)
        running -= 1

    replicas = [asyncio.create_task(Housekeeping(engine, [Job("j", 0.001, work)]).run()) for _ in range(4)]
    await until(lambda: turns >= 20)
    for replica in replicas:
        replica.cancel()
    await asyncio.wait(replicas)
    assert most == 1


async def test_another_job_needs_not_wait(engine: AsyncEngine) -> None:
    started, go = asyncio.Event(), asyncio.Event()

    async def work(_: AsyncEngine) -> None:
        started.set()
        await go.wait()

    slow = asyncio.create_task(run_alone(engine, Job("slow", 1, work)))
    await started.wait()
    assert not await run_alone(engine, Job("slow", 1, nothing))
    assert await run_alone(engine, Job("quick", 1, nothing))
    go.set()
    assert await slow
    assert await run_alone(engine, Job("slow", 1, nothing))


async def test_a_failing_job_is_tried_again_and_ends_no_other(engine: AsyncEngine) -> None:
    others = 0

    async def fail(_: AsyncEngine) -> None:
        raise RuntimeError("no")

    async def work(_: AsyncEngine) -> None:
        nonlocal others
        others += 1

    def failed() -> list[str]:
        return [entry["job"] for entry in said if entry["event"] == "job_failed"]

    with capture_logs() as said:
        task = asyncio.create_task(Housekeeping(engine, [Job("bad", 0.01, fail), Job("good", 0.01, work)]).run())
        await until(lambda: failed().count("bad") >= 3 and others >= 3)
        task.cancel()
        await asyncio.wait([task])
    assert set(failed()) == {"bad"}


async def test_a_database_that_is_away_is_one_line_and_no_end() -> None:
    away = create_async_engine("postgresql+asyncpg://postgres@/postgres?host=/nowhere/at/all")
    with capture_logs() as said:
        task = asyncio.create_task(Housekeeping(away, [Job("j", 0.01, nothing)]).run())
        await until(lambda: len(said) >= 3)
        task.cancel()
        await asyncio.wait([task])
    assert {entry["event"] for entry in said} == {"job_waits_for_the_database"}
    assert not any("exc_info" in entry for entry in said)
    await away.dispose()


async def test_two_jobs_of_one_name_are_refused(engine: AsyncEngine) -> None:
    with pytest.raises(ValueError, match="the same name"):
        Housekeeping(engine, [Job("j", 1, nothing), Job("j", 2, nothing)])
