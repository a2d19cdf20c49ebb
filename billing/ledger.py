"""From the spool into PostgreSQL: operations, their attempts and their charges against budgets, each exactly once."""

import asyncio
from collections.abc import Sequence
from typing import NoReturn

import asyncpg
import msgspec
import structlog
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncEngine

from billing import copying, settlements
from billing.frames import encode
from billing.records import OperationRecord
from billing.spool import Spool

BATCH = 500
"""Operations in one transaction."""

IDLE_SECONDS = 0.1
"""Between two looks at the spool."""

BUSY, BUSY_SECONDS = 3, 0.4
"""After so many operations the next look comes later: a transaction for many costs less than several for few, and who
is served meanwhile waits for less of them."""

LONGEST_BACK_OFF_SECONDS = 5.0

_SQLSTATE_OF_THE_DATA = ("22", "23")
"""Error classes of bad data: data exception, integrity violation."""

_CURED_BY_ANOTHER_TRY = ("23503", "23505")
"""A foreign key, a unique one."""

log = structlog.get_logger(__name__)


class LedgerHealth(msgspec.Struct, frozen=True, kw_only=True):
    """For a readiness check and metrics."""

    spooled: int
    """Operations on local disk that PostgreSQL does not have yet."""
    free_bytes: int
    """Room left on the disk under the spool."""
    last_error: str | None
    """Why the last attempt to copy failed; None after a success."""


class Ledger:
    """Copies what is in `spool` to the database of `engine`."""

    def __init__(self, engine: AsyncEngine, spool: Spool) -> None:
        self._engine = engine
        self._spool = spool
        self._turn = asyncio.Lock()
        self._last_error: str | None = None

    def health(self) -> LedgerHealth:
        return LedgerHealth(
            spooled=self._spool.depth,
            free_bytes=self._spool.free_bytes(),
            last_error=self._last_error,
        )

    async def drain(self) -> int:
        """Copy all that is spooled by now; return how many operations were new. Safe to repeat and to cut off anywhere.

        Raises database errors as they come (what was not copied stays spooled) and SpoolError. A record that the
        database can never take is set aside by the spool and does not hold up the rest; it is charged all the same.
        """
        copied = 0
        async with self._turn:
            waiting = self._spool.depth  # not "until it is empty": under load that never comes
            while waiting > 0 and (segment := await self._spool.oldest()) is not None:
                contents = await self._spool.read(segment)
                refused: list[tuple[str, bytes]] = []
                for start in range(0, len(contents.records), BATCH):
                    copied += await self._store(contents.records[start : start + BATCH], refused)
                await self._spool.discard(segment, contents, refused)
                waiting -= contents.lines
        return copied

    async def recover(self) -> int:
        """Copy what an earlier process left in the spool, then free what it has leased; return how many leases.

        In this order, because what a spooled operation was charged is part of its lease. Raises as `drain` does.
        """
        await self.drain()
        async with self._engine.begin() as conn:
            freed = await settlements.free_earlier_runs(conn, self._spool.replica)
        if freed:
            log.warning("orphaned_leases_freed", leases=freed)
        return freed

    async def run(self) -> NoReturn:
        """Recover, then keep copying, until cancelled.

        Any failure (the database is away, most often) is reported once per try with a growing pause, and cured by
        trying again.
        """
        recovered = False
        pause = IDLE_SECONDS
        while True:
            try:
                if not recovered:
                    await self.recover()
                    recovered = True
                copied = await self.drain()
            except Exception as error:  # the loop must outlive whatever it is
                self._last_error = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
                pause = min(pause * 2, LONGEST_BACK_OFF_SECONDS)
                log.warning("ledger_copy_failed", error=self._last_error, spooled=self._spool.depth, retry_in=pause)
            else:
                if self._last_error is not None:
                    log.info("ledger_copy_recovered")
                self._last_error, pause = None, BUSY_SECONDS if copied >= BUSY else IDLE_SECONDS
            await asyncio.sleep(pause)

    async def _store(
        self, records: Sequence[OperationRecord], refused: list[tuple[str, bytes]], again: bool = False
    ) -> int:
        """One transaction; where the data is at fault, halves of it, down to the record that is.

        A budget that goes meanwhile looks like bad data too, but not to the next transaction. So do records that
        somebody else is copying: to the next one they are known.
        """
        try:
            return await self._insert(records)
        except (DBAPIError, asyncpg.PostgresError, ValueError, OverflowError) as error:
            if not _data_is_at_fault(error):
                raise
            if not again and _sqlstate(error) in _CURED_BY_ANOTHER_TRY:
                return await self._store(records, refused, again=True)
            if len(records) == 1:
                await self._settle_refused(records[0])
                reason = error.orig if isinstance(error, DBAPIError) else error
                refused.append((f"refused by the database: {reason}", encode(records[0]).rstrip(b"\n")))
                return 0
        middle = len(records) // 2
        return await self._store(records[:middle], refused) + await self._store(records[middle:], refused)

    async def _settle_refused(self, record: OperationRecord) -> None:
        """Charge a record that cannot be stored, once, for the call was made.

        Where no window can take so much, its hold ends all the same.
        """
        try:
            async with self._engine.begin() as conn:
                if await settlements.set_aside(conn, record.id):
                    await settlements.settle(conn, [record])
        except DBAPIError as error:
            if not _data_is_at_fault(error):
                raise
            async with self._engine.begin() as conn:
                if await settlements.set_aside(conn, record.id):
                    await settlements.settle(conn, [record], count=False)

    async def _insert(self, records: Sequence[OperationRecord]) -> int:
        # The first of two lines with one id is the one that counts.
        by_id = {record.id: record for record in reversed(records)}
        async with self._engine.begin() as conn:
            there = await copying.known(conn, list(by_id))
            new = sorted(by_id.values(), key=_number)
            if there:
                new = [record for record in new if record.id not in there]
            if new:
                await copying.copy(conn, new)
            # Last, so that the windows that leases are taken from are locked as shortly as can be.
            await settlements.settle(conn, new)
        return len(new)


def _number(record: OperationRecord) -> int:
    """An id's place among others, as PostgreSQL has it; two ids take long to compare."""
    return record.id.int


def _data_is_at_fault(error: Exception) -> bool:
    """Whether another try cannot cure it."""
    if isinstance(error, DBAPIError | asyncpg.PostgresError):
        return _sqlstate(error).startswith(_SQLSTATE_OF_THE_DATA)
    return not isinstance(error, asyncpg.InterfaceError)


def _sqlstate(error: Exception) -> str:
    return getattr(error.orig if isinstance(error, DBAPIError) else error, "sqlstate", None) or ""
