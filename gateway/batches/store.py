"""Batches as their callers see them: made, looked up, listed, cancelled. What runs them is in `claims` and `steps`."""

from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

import msgspec
from sqlalchemy import func, insert, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from billing.ids import new_id
from billing.tables import batch

WINDOW = timedelta(hours=24)
"""OpenAI's only completion window."""


class StoredBatch(msgspec.Struct, frozen=True, kw_only=True):
    """A row of `batch`, without the columns of those who run it."""

    id: UUID
    endpoint: str
    input_file_id: UUID
    metadata: dict[str, str] | None
    status: str
    errors: list[dict[str, Any]] | None
    model: str | None
    output_file_id: UUID | None
    error_file_id: UUID | None
    total: int
    completed: int
    failed: int
    input_tokens: int
    cached_tokens: int
    output_tokens: int
    reasoning_tokens: int
    created_at: datetime
    expires_at: datetime
    in_progress_at: datetime | None
    finalizing_at: datetime | None
    completed_at: datetime | None
    failed_at: datetime | None
    expired_at: datetime | None
    cancelling_at: datetime | None
    cancelled_at: datetime | None


_COLUMNS = tuple(batch.c[name] for name in StoredBatch.__struct_fields__)


async def create_batch(
    conn: AsyncConnection,
    *,
    org_id: UUID,
    key_id: UUID,
    endpoint: str,
    input_file_id: UUID,
    metadata: Mapping[str, str] | None,
    output_seconds: int,
) -> StoredBatch:
    """A batch whose input nobody has read yet. The key is the one that its lines will be charged to."""
    row = {
        "id": new_id(),
        "org_id": org_id,
        "key_id": key_id,
        "endpoint": endpoint,
        "input_file_id": input_file_id,
        "metadata": metadata,
        "output_seconds": output_seconds,
        "expires_at": func.now() + WINDOW,
    }
    made = await conn.execute(insert(batch).values(row).returning(*_COLUMNS))
    return StoredBatch(**made.mappings().one())


async def find_batch(conn: AsyncConnection, org_id: UUID, identifier: UUID) -> StoredBatch | None:
    query = select(*_COLUMNS).where(batch.c.id == identifier, batch.c.org_id == org_id)
    row = (await conn.execute(query)).mappings().one_or_none()
    return None if row is None else StoredBatch(**row)


async def list_batches(conn: AsyncConnection, org_id: UUID, *, after: UUID | None, limit: int) -> list[StoredBatch]:
    """Newest first; those made before the batch `after`."""
    query = select(*_COLUMNS).where(batch.c.org_id == org_id)
    if after is not None:
        query = query.where(batch.c.id < after)
    rows = await conn.execute(query.order_by(batch.c.id.desc()).limit(limit))
    return [StoredBatch(**row) for row in rows.mappings()]


async def cancel_batch(conn: AsyncConnection, org_id: UUID, identifier: UUID) -> StoredBatch | None:
    """The batch, no line of which starts from now on; None when there is none. One that has ended stays as it is."""
    running = batch.c.status.in_(("validating", "in_progress"))
    stop = update(batch).where(batch.c.id == identifier, batch.c.org_id == org_id, running)
    await conn.execute(stop.values(status="cancelling", cancelling_at=func.now()))
    return await find_batch(conn, org_id, identifier)
