"""Bodies of requests and answers, of keys whose payloads are recorded (`Restrictions.record_payloads`).

They take a way of their own into PostgreSQL and never hold up an answer or a row of the ledger: what waits is kept in
memory, at most QUEUE_BYTES of it. A payload that finds no room there, or whose process is killed, is not recorded; its
operation is, like any other.
"""

import asyncio
from collections import deque
from collections.abc import Iterable
from typing import NoReturn
from uuid import UUID

import msgspec
import structlog
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncEngine

from billing.tables import payload

BODY_BYTES = 256 * 1024
"""Of each body so many bytes are kept, from its start."""
QUEUE_BYTES = 64 * 1024 * 1024
BATCH_BYTES = 4 * 1024 * 1024
"""In one transaction."""
PAUSE_SECONDS = 0.5
LONGEST_PAUSE_SECONDS = 5.0

log = structlog.get_logger(__name__)


class Body:
    """The start of a body that comes in pieces, and how long all of it is."""

    __slots__ = ("kept", "size")

    def __init__(self) -> None:
        self.kept = bytearray()
        self.size = 0

    def add(self, piece: bytes) -> None:
        if (room := BODY_BYTES - len(self.kept)) > 0:
            self.kept += piece[:room]
        self.size += len(piece)


class Payload(msgspec.Struct, frozen=True, kw_only=True):
    """Both bodies of one operation: their starts, and their whole sizes in bytes."""

    operation_id: UUID
    request: bytes
    request_bytes: int
    answer: bytes
    answer_bytes: int

    @property
    def size(self) -> int:
        return len(self.request) + len(self.answer)


class Payloads:
    """Takes payloads at any time; `run` writes them."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine
        self._waiting: deque[Payload] = deque()
        self._bytes = 0
        self.dropped = 0
        """Payloads that were not recorded because there was no room for them."""

    def put(self, found: Payload) -> None:
        """Record it soon, unless too much is waiting."""
        if self._bytes + found.size > QUEUE_BYTES:
            self.dropped += 1
            log.warning("payload_dropped", operation=str(found.operation_id), waiting=len(self._waiting))
            return
        self._waiting.append(found)
        self._bytes += found.size

    async def run(self) -> NoReturn:
        """Write what waits until cancelled. A failure is tried again."""
        pause = PAUSE_SECONDS
        while True:
            await asyncio.sleep(pause)
            try:
                await self.drain()
                pause = PAUSE_SECONDS
            except Exception as error:  # the loop must outlive whatever it is
                pause = min(pause * 2, LONGEST_PAUSE_SECONDS)
                log.warning("payloads_wait", reason=type(error).__name__, waiting=len(self._waiting), retry_in=pause)

    async def drain(self) -> None:
        """Write all that waits. Raises database errors; what was not written still waits."""
        while self._waiting:
            batch = self._next_batch()
            await self._write(batch)
            for each in batch:
                self._waiting.popleft()
                self._bytes -= each.size

    def _next_batch(self) -> list[Payload]:
        batch: list[Payload] = []
        size = 0
        for each in self._waiting:
            size += each.size
            if batch and size > BATCH_BYTES:
                break
            batch.append(each)
        return batch

    async def _write(self, batch: Iterable[Payload]) -> None:
        rows = [msgspec.structs.asdict(each) for each in sorted(batch, key=lambda each: each.operation_id)]
        async with self._engine.begin() as conn:
            await conn.execute(insert(payload).on_conflict_do_nothing(), rows)
