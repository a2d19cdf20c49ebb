"""From the spool into PostgreSQL: operations, their attempts and their charges against budgets, each exactly once."""

import asyncio
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

import msgspec
import structlog
from sqlalchemy import Table, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncEngine

from billing import settlements
from billing.frames import encode
from billing.records import OperationRecord
from billing.spool import Spool
from billing.tables import attempt, operation

BATCH = 500
"""Operations in one transaction."""

IDLE_SECONDS = 0.1
"""Between two looks at the spool."""

LONGEST_BACK_OFF_SECONDS = 5.0

_SQLSTATE_OF_THE_DATA = ("22", "23")
"""Error classes of bad data: data exception, integrity violation."""

_FOREIGN_KEY = "23503"

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
                await self.drain()
            except Exception as error:  # the loop must outlive whatever it is
                self._last_error = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
                pause = min(pause * 2, LONGEST_BACK_OFF_SECONDS)
                log.warning("ledger_copy_failed", error=self._last_error, spooled=self._spool.depth, retry_in=pause)
            else:
                if self._last_error is not None:
                    log.info("ledger_copy_recovered")
                self._last_error, pause = None, IDLE_SECONDS
            await asyncio.sleep(pause)

    async def _store(
        self, records: Sequence[OperationRecord], refused: list[tuple[str, bytes]], again: bool = False
    ) -> int:
        """One transaction; where the data is at fault, halves of it, down to the record that is.

        A budget that goes meanwhile looks like bad data too, but not to the next transaction.
        """
        try:
            return await self._insert(records)
        except DBAPIError as error:
            if not _data_is_at_fault(error):
                raise
            if len(records) == 1 and not again and _sqlstate(error) == _FOREIGN_KEY:
                return await self._store(records, refused, again=True)
            if len(records) == 1:
                await self._settle_refused(records[0])
                refused.append((f"refused by the database: {error.orig}", encode(records[0]).rstrip(b"\n")))
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
        # In key order, so that two who copy the same records wait for each other and never deadlock.
        records = sorted(records, key=lambda record: record.id)
        async with self._engine.begin() as conn:
            rows = msgspec.json.encode(records).decode()
            new = set((await conn.execute(_INSERT_OPERATIONS, {"rows": rows})).scalars())
            # The first of two lines with one id is the one that was inserted.
            inserted = {record.id: record for record in reversed(records) if record.id in new}
            attempts = [row for record in inserted.values() for row in _attempt_rows(record)]
            if attempts:
                await conn.execute(_INSERT_ATTEMPTS, {"rows": msgspec.json.encode(attempts).decode()})
            # Last, so that the windows that leases are taken from are locked as shortly as can be.
            await settlements.settle(conn, inserted.values())
        return len(new)


def _data_is_at_fault(error: DBAPIError) -> bool:
    """Whether another try cannot cure it."""
    return _sqlstate(error).startswith(_SQLSTATE_OF_THE_DATA)


def _sqlstate(error: DBAPIError) -> str:
    return getattr(error.orig, "sqlstate", None) or ""


def _attempt_rows(record: OperationRecord) -> Iterator[dict[str, Any]]:
    for item in record.attempts:
        fields = msgspec.structs.asdict(item)
        yield {"operation_id": record.id} | fields | msgspec.structs.asdict(fields.pop("tokens"))


def _insert(table: Table, returning: str) -> Any:
    """INSERT of a JSON array of objects whose names are the columns: one parameter, whatever the number of rows.

    JSON carries amounts as strings and PostgreSQL reads them as NUMERIC, so they stay exact.
    """
    columns = ", ".join(column.name for column in table.columns if column.name != "recorded_at")
    return text(
        f"INSERT INTO {table.name} ({columns}) "  # noqa: S608 - names come from our tables
        f"SELECT {columns} FROM jsonb_populate_recordset(NULL::{table.name}, CAST(:rows AS jsonb)) "
        f"ON CONFLICT DO NOTHING RETURNING {returning}"
    )


_INSERT_OPERATIONS = _insert(operation, "id")
_INSERT_ATTEMPTS = _insert(attempt, "operation_id")
