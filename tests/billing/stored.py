"""Operations put straight into the ledger's tables."""

from typing import Any

import msgspec
from sqlalchemy import insert
from sqlalchemy.ext.asyncio import AsyncConnection

from billing.records import NO_COLUMNS, OperationRecord
from billing.tables import attempt, operation


async def store(conn: AsyncConnection, record: OperationRecord) -> None:
    """The operation and its attempts."""
    cached = {} if record.cached is None else _row(record.cached)
    await conn.execute(insert(operation).values(_row(record, *NO_COLUMNS) | cached))
    for one in record.attempts:
        row = _row(one, "tokens") | msgspec.structs.asdict(one.tokens) | {"operation_id": record.id}
        await conn.execute(insert(attempt).values(row))


def _row(record: msgspec.Struct, *without: str) -> dict[str, Any]:
    return {name: value for name, value in msgspec.structs.asdict(record).items() if name not in without}
