"""PostgreSQL's NOTIFY as a replica hears it: one LISTEN connection a process, mending itself, knowing if it is deaf.

The connection beats: three times a second it notifies itself and hears that. So a cut line, a server that hangs and a
pooler that passes no notifications on (PgBouncer by transaction) are all known as silence, not taken for calm.
"""

import asyncio
import contextlib
import time
import uuid
from collections.abc import AsyncIterator, Callable
from typing import Any, NoReturn

import structlog
from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

Callback = Callable[[str | None], None]
"""Called in the event loop with a notice's payload, or with None: notices may have been missed, look at everything."""

BEAT_SECONDS = 0.3
DEAF_SECONDS = 1.0
"""Nothing heard for so long, not even the own beat: notices may be missing."""
LOST_SECONDS = 3.0
"""After so much silence the connection is given up for a new one."""
FIRST_BACK_OFF_SECONDS = 0.1
LONGEST_BACK_OFF_SECONDS = 2.0

log = structlog.get_logger(__name__)


async def notify(conn: AsyncConnection, channel: str, payload: str) -> None:
    """Tell every replica, when `conn`'s transaction commits; nobody, when it rolls back. Payload: below 8000 bytes."""
    await conn.execute(select(func.pg_notify(channel, payload)))


class Notices:
    """Subscribe first, then let `run` run for as long as the process lives."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine
        self._callbacks: dict[str, list[Callback]] = {}
        self._beat_channel = f"farthing_beat_{uuid.uuid4().hex}"
        self._heard = float("-inf")

    @property
    def healthy(self) -> bool:
        """Whether a notice sent now would arrive, as far as the last second can tell."""
        return time.monotonic() - self._heard < DEAF_SECONDS

    def subscribe(self, channel: str, callback: Callback) -> None:
        """Call `callback` with the payload of every notice on `channel`, and with None whenever listening (re)starts.

        What a callback raises is logged and goes no further.
        """
        self._callbacks.setdefault(channel, []).append(callback)

    async def run(self) -> NoReturn:
        """Listen until cancelled. Nothing that the database does ends it."""
        pause = FIRST_BACK_OFF_SECONDS
        while True:
            try:
                async with self._connection() as connection:
                    await self._listen(connection)
                    await self._beat(connection)
            except Exception as error:  # whatever it is, the next connection may be better
                if self._heard > float("-inf"):
                    pause = FIRST_BACK_OFF_SECONDS
                if pause == FIRST_BACK_OFF_SECONDS:
                    log.warning("not listening to the database; trying again", reason=repr(error))
            self._heard = float("-inf")
            await asyncio.sleep(pause)
            pause = min(pause * 2, LONGEST_BACK_OFF_SECONDS)

    @contextlib.asynccontextmanager
    async def _connection(self) -> AsyncIterator[Any]:
        """An asyncpg connection made as the engine makes its own, but outside of its pool."""
        async with asyncio.timeout(LOST_SECONDS):
            pooled = await self._engine.raw_connection()
        connection: Any = pooled.driver_connection
        pooled.detach()
        try:
            yield connection
        finally:
            connection.terminate()

    async def _listen(self, connection: Any) -> None:
        def heard(*_: object) -> None:
            self._heard = time.monotonic()

        def arrived(_connection: object, _pid: int, channel: str, payload: str) -> None:
            heard()
            self._tell(channel, payload)

        async with asyncio.timeout(LOST_SECONDS):
            await connection.add_listener(self._beat_channel, heard)
            for channel in self._callbacks:
                await connection.add_listener(channel, arrived)
        for channel in self._callbacks:
            self._tell(channel, None)

    async def _beat(self, connection: Any) -> NoReturn:
        """Return by raising, when the connection is lost or has said nothing for LOST_SECONDS."""
        lost = asyncio.Event()
        connection.add_termination_listener(lambda _: lost.set())
        begun = time.monotonic()
        while True:
            await connection.execute("SELECT pg_notify($1, '')", self._beat_channel, timeout=LOST_SECONDS)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(lost.wait(), BEAT_SECONDS)
            if lost.is_set():
                raise ConnectionError("the connection was closed")
            if time.monotonic() - max(begun, self._heard) > LOST_SECONDS:
                raise ConnectionError(f"nothing heard for {LOST_SECONDS:g} seconds; does a pooler hold notices back?")

    def _tell(self, channel: str, payload: str | None) -> None:
        for callback in self._callbacks[channel]:
            try:
                callback(payload)
            except Exception:
                log.exception("a notice was not understood", channel=channel)
