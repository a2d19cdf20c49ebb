"""Takes work on batches in every gateway process, a few lines at a time; see `claims` for how the processes share it.

At the stop no new line is taken; those under way are cut off and given back.
"""

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import TypeVar

import structlog
from litestar.types import ASGIApp
from sqlalchemy.ext.asyncio import AsyncEngine

from billing.availability import is_away
from billing.ids import new_id
from gateway.batches import claims, steps
from gateway.batches.claims import Claimant, ClaimedLine, Step
from gateway.batches.execution import Execution
from gateway.batches.files import purge_files
from gateway.batches.names import batch_name
from gateway.batches.results import Results, lasting
from gateway.database import transaction
from gateway.errors import ApiError
from gateway.live import Live

CLAIM_SECONDS = 20.0
RENEW_SECONDS = 5.0
POLL_SECONDS = 2.0
"""How soon work that another process made, or put off, is noticed here."""
PURGE_SECONDS = 60.0
STOP_SECONDS = 5.0

log = structlog.get_logger()
T = TypeVar("T")


class BatchRunner:
    """One a process."""

    def __init__(self, engine: AsyncEngine, live: Live) -> None:
        self._engine = engine
        self._live = live
        self._id = new_id()
        self._results = Results(engine, self._me)
        self._lines: dict[asyncio.Task[None], ClaimedLine] = {}
        self._step: tuple[asyncio.Task[None], Step] | None = None
        self._awake = asyncio.Event()
        self._cut_off_until = 0.0

    def wake(self) -> None:
        """There may be something to do."""
        self._awake.set()

    async def run(self, app: ASGIApp) -> None:
        """Work on whatever batches there are, for ever; outlives a database that is away."""
        execution = Execution(self._engine, app, self._me, self._results)
        background = [
            asyncio.create_task(self._repeat(RENEW_SECONDS, self._renew)),
            asyncio.create_task(self._repeat(PURGE_SECONDS, self._purge)),
        ]
        try:
            while True:
                self._awake.clear()
                if not await self._guarded(lambda: self._take(execution)):
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(self._awake.wait(), POLL_SECONDS)
        finally:
            for task in background:
                task.cancel()
            await self._stop(execution)

    async def _take(self, execution: Execution) -> bool:
        """Start whatever can be started; False when there is nothing, or no room."""
        step, lines = None, []
        async with transaction(self._engine) as conn:
            if self._step is None:
                step = await claims.claim_step(conn, self._me())
            free = self._live.settings.limits.batch_lines - len(self._lines)
            if free > 0:
                running = Counter(line.batch_id for line in self._lines.values())
                lines = await claims.claim_lines(conn, self._me(), running, free)
        if step is not None:
            self._step = asyncio.create_task(self._advance(step)), step
        for line in lines:
            task = asyncio.create_task(execution.run(line))
            self._lines[task] = line
            task.add_done_callback(self._line_ended)
        return step is not None or bool(lines)

    def _line_ended(self, task: asyncio.Task[None]) -> None:
        line = self._lines.pop(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:  # it is taken again when its claim runs out
            log.error("line not finished", batch=batch_name(line.batch_id), line=line.number, exc_info=error)
        self._awake.set()

    async def _advance(self, step: Step) -> None:
        try:
            if step.status == "validating":
                done = await steps.validate(self._engine, self._me(), step, self._live.settings.limits.body_bytes)
            else:
                done = await steps.close(self._engine, self._me(), step)
            if not done:
                await self._give_back(step)
        except Exception as error:  # it is tried again when its claim has run out
            log.error("batch not advanced", batch=batch_name(step.id), status=step.status, exc_info=error)
        finally:
            self._step = None
            self._awake.set()

    async def _stop(self, execution: Execution) -> None:
        execution.cut_off()
        step, lines = self._step, list(self._lines)
        if step is not None:
            step[0].cancel()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STOP_SECONDS):
                if lines:
                    await asyncio.wait(lines)
                if step is not None:
                    await asyncio.wait([step[0]])
                    await self._give_back(step[1])
        for task in lines:
            task.cancel()
        await asyncio.gather(*lines, return_exceptions=True)

    async def _give_back(self, step: Step) -> None:
        await lasting(self._engine, lambda conn: claims.give_back_step(conn, self._me(), step))

    async def _renew(self) -> None:
        if not self._lines and self._step is None:
            return
        await self._results.renew(list(self._lines.values()), None if self._step is None else self._step[1])

    async def _purge(self) -> None:
        async with self._engine.begin() as conn:
            await purge_files(conn)

    async def _repeat(self, seconds: float, work: Callable[[], Awaitable[None]]) -> None:
        while True:
            await self._guarded(work)
            await asyncio.sleep(seconds)

    async def _guarded(self, work: Callable[[], Awaitable[T]]) -> T | None:
        """None, and a line in the log, when it fails: the next turn tries again."""
        try:
            return await work()
        except Exception as error:
            if isinstance(error, ApiError) or is_away(error):
                self._cut_off_until = time.monotonic() + CLAIM_SECONDS
                log.warning("batches wait for the database", reason=str(error))
            else:
                log.exception("batches failed")
            return None

    def _me(self) -> Claimant:
        grace = CLAIM_SECONDS if time.monotonic() < self._cut_off_until else 0
        return Claimant(self._id, lasts=timedelta(seconds=CLAIM_SECONDS), grace=timedelta(seconds=grace))
