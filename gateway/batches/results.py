"""Writes what lines of batches came to: all that is there in one transaction, since a commit is what takes its time."""

import asyncio
from collections.abc import Awaitable, Callable, Collection

import structlog
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from gateway.batches import claims
from gateway.batches.claims import Claimant, ClaimedLine, Result, Step
from gateway.batches.names import batch_name
from gateway.database import transaction
from gateway.errors import ApiError

AGAIN_SECONDS = 2.0
"""Between two tries to reach the database."""

log = structlog.get_logger()


async def lasting(engine: AsyncEngine, work: Callable[[AsyncConnection], Awaitable[None]]) -> None:
    """Do `work` in a transaction as soon as the database can be reached."""
    while True:
        try:
            async with transaction(engine) as conn:
                return await work(conn)
        except ApiError:
            await asyncio.sleep(AGAIN_SECONDS)


class Results:
    """`me`: who this process claims lines as."""

    def __init__(self, engine: AsyncEngine, me: Callable[[], Claimant]) -> None:
        self._engine = engine
        self._me = me
        self._waiting: list[tuple[Result, asyncio.Future[None]]] = []
        self._writing: asyncio.Task[None] | None = None
        self._lines = asyncio.Lock()
        """Who changes several lines: two who did so at once could wait for each other."""

    async def write(self, result: Result) -> None:
        """Returns when it is written, or another process turns out to have the line."""
        done = asyncio.get_running_loop().create_future()
        self._waiting.append((result, done))
        if self._writing is None or self._writing.done():
            self._writing = asyncio.create_task(self._write())
        await done

    async def renew(self, lines: Collection[ClaimedLine], step: Step | None) -> None:
        """Raises ApiError 503 when the database is away."""
        async with self._lines, transaction(self._engine) as conn:
            await claims.renew(conn, self._me(), lines, step)

    async def _write(self) -> None:
        while self._waiting:
            group, self._waiting = self._waiting, []
            error = await self._store([result for result, _ in group])
            for _, done in group:
                if not done.done():
                    done.set_result(None) if error is None else done.set_exception(error)

    async def _store(self, results: list[Result]) -> Exception | None:
        try:
            async with self._lines:
                await lasting(self._engine, lambda conn: self._finish(conn, results))
        except Exception as error:  # told to each of those who wait
            return error
        return None

    async def _finish(self, conn: AsyncConnection, results: list[Result]) -> None:
        written = await claims.finish_lines(conn, self._me(), results)
        for line in [result.line for result in results if result not in written]:
            log.warning("line of a batch was taken over", batch=batch_name(line.batch_id), line=line.number)
