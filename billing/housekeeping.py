"""What has to be done now and then, whoever of the replicas does it: rollups, retention, alerts and their like.

Each job runs in one replica at a time. What a job does must be safe to repeat and to cut off anywhere: a replica may
die in the middle of it, and the next one does it again.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable
from random import uniform
from typing import NamedTuple, NoReturn

import structlog
from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncEngine

from billing.availability import is_away

log = structlog.get_logger(__name__)


class Job(NamedTuple):
    """Something to do every so often."""

    name: str
    """Also that of its lock in the database: no two jobs share one."""
    every_seconds: float
    """From one end to the next start, in each replica that gets the lock."""
    run: Callable[[AsyncEngine], Awaitable[object]]


class Housekeeping:
    """Runs `jobs` on the database of `engine`, side by side. A running job has one connection more than it takes."""

    def __init__(self, engine: AsyncEngine, jobs: Iterable[Job]) -> None:
        self._engine = engine
        self._jobs = tuple(jobs)
        if len({job.name for job in self._jobs}) < len(self._jobs):
            raise ValueError("two jobs have the same name; they would shut each other out")

    async def run(self) -> None:
        """Run every job at its times until cancelled. A job that fails is logged and has its next turn."""
        async with asyncio.TaskGroup() as group:
            for job in self._jobs:
                group.create_task(self._repeat(job))
            await asyncio.Event().wait()  # without jobs too: only a cancellation ends it

    async def _repeat(self, job: Job) -> NoReturn:
        while True:
            began = time.monotonic()
            try:
                await run_alone(self._engine, job)
            except Exception as error:  # one job's failure is never another's end
                if is_away(error):
                    log.warning("job_waits_for_the_database", job=job.name, retry_in=job.every_seconds)
                else:
                    log.exception("job_failed", job=job.name, retry_in=job.every_seconds)
            # What takes long has its next turn later: no job keeps the database busy for more than a fifth of the time.
            # Replicas that started together drift apart, so that a job's turns spread over them.
            pause = max(job.every_seconds, 4 * (time.monotonic() - began))
            await asyncio.sleep(pause * uniform(0.9, 1.1))  # noqa: S311


async def run_alone(engine: AsyncEngine, job: Job) -> bool:
    """Run `job` now, unless another replica does; return whether it ran. Raises what the job raises.

    The lock is a transaction's, so it ends with its connection, also behind a pooler. That transaction reads and writes
    nothing: it keeps no row alive.
    """
    async with engine.begin() as conn:
        key = func.hashtextextended(f"farthing job {job.name}", 0)
        if not (await conn.execute(select(func.pg_try_advisory_xact_lock(key)))).scalar_one():
            return False
        await job.run(engine)
    return True
