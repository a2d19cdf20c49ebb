"""Rows into the ledger by COPY, in PostgreSQL's binary format: what has to be fast, because every operation goes there.

COPY cannot skip a row that is there already: ask `known` first, and sort by id, so that two who copy the same rows wait
for each other and never deadlock. Who loses that race gets a unique violation, and finds them known at the next try.
"""

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from operator import attrgetter
from typing import Any, TypeVar
from uuid import UUID

import msgspec
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from billing.records import NO_COLUMNS, TOKEN_CLASSES, AttemptRecord, CachedAnswer, OperationRecord

OPERATION = tuple(name for name in OperationRecord.__struct_fields__ if name not in {*NO_COLUMNS, "tags"})
CACHED = CachedAnswer.__struct_fields__
ATTEMPT = tuple(name for name in AttemptRecord.__struct_fields__ if name != "tokens")

PIECE = 25
"""Rows that are encoded in one turn of the event loop."""

T = TypeVar("T")

_KNOWN = text("SELECT id FROM operation WHERE id = ANY(:ids)")
_of_operation = attrgetter(*OPERATION)
_of_cached = attrgetter(*CACHED)
_NOT_CACHED = (None,) * len(CACHED)
_of_attempt = attrgetter(*ATTEMPT, *(f"tokens.{name}" for name in TOKEN_CLASSES))


async def known(conn: AsyncConnection, ids: Sequence[UUID]) -> set[UUID]:
    """Which of these operations the ledger has."""
    return set((await conn.execute(_KNOWN, {"ids": ids})).scalars())


async def copy(conn: AsyncConnection, records: Sequence[OperationRecord]) -> None:
    """Add operations, none of which is there, and their attempts.

    Raises asyncpg's errors, and ValueError or OverflowError for what no column can hold.
    """
    operations = (
        (
            *_of_operation(record),
            *(_NOT_CACHED if record.cached is None else _of_cached(record.cached)),
            msgspec.json.encode(record.tags).decode(),
        )
        for record in records
    )
    attempts = ((record.id, *_of_attempt(attempt)) for record in records for attempt in record.attempts)
    await _copy(conn, "operation", (*OPERATION, *CACHED, "tags"), operations)
    if any(record.attempts for record in records):
        await _copy(conn, "attempt", ("operation_id", *ATTEMPT, *TOKEN_CLASSES), attempts)


async def _copy(conn: AsyncConnection, table: str, columns: Sequence[str], rows: Iterable[tuple[Any, ...]]) -> None:
    driver: Any = (await conn.get_raw_connection()).driver_connection
    await driver.copy_records_to_table(table, records=_piece_by_piece(rows), columns=columns)


async def _piece_by_piece(rows: Iterable[T]) -> AsyncIterator[T]:
    """To encode many rows takes its time: requests come in between."""
    for number, row in enumerate(rows, 1):
        yield row
        if number % PIECE == 0:
            await asyncio.sleep(0)
