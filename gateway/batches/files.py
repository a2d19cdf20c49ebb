"""Files in PostgreSQL: one row each, the content in chunks of 1 MiB, so that no file is ever in memory as a whole.

A file belongs to an organisation. From `expires_at` on nobody sees it; its rows go once no open batch reads it.
"""

from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import datetime, timedelta
from typing import Literal
from uuid import UUID

import msgspec
from sqlalchemy import BigInteger, ColumnElement, and_, bindparam, delete, exists, func, or_, select, text, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from billing.ids import new_id
from billing.tables import BATCH_IS_OPEN, batch, file, file_chunk
from gateway.database import reachable

CHUNK_BYTES = 1024 * 1024
KEEP_SECONDS = 30 * 24 * 3600
"""How long a file lives for which nobody said anything else; also the longest that may be asked for."""

Purpose = Literal["batch", "batch_output"]
_ABANDONED = timedelta(days=1)
"""After so long an upload that has not ended never will: a chunk may take `limits.body_seconds`."""


class StoredFile(msgspec.Struct, frozen=True, kw_only=True):
    id: UUID
    purpose: Purpose
    filename: str
    bytes: int
    created_at: datetime
    expires_at: datetime


class ChunkWriter:
    """Cuts what is written into chunks, each handed to `store` with its number as soon as it is full."""

    def __init__(self, store: Callable[[int, bytes], Awaitable[None]]) -> None:
        self._store = store
        self._pending = bytearray()
        self._number = 0
        self.bytes = 0

    async def write(self, data: bytes | bytearray) -> None:
        self._pending += data
        self.bytes += len(data)
        while len(self._pending) >= CHUNK_BYTES:
            await self._flush()

    async def close(self) -> int:
        """Store what is left; return the number of bytes written in all."""
        if self._pending:
            await self._flush()
        return self.bytes

    async def _flush(self) -> None:
        data = bytes(self._pending[:CHUNK_BYTES])
        del self._pending[:CHUNK_BYTES]
        await self._store(self._number, data)
        self._number += 1


async def begin_file(conn: AsyncConnection, org_id: UUID, key_id: UUID, purpose: Purpose, filename: str) -> UUID:
    """A file that nobody sees yet; add its chunks, then finish it."""
    identifier = new_id()
    expires_at = func.now() + timedelta(seconds=KEEP_SECONDS)
    row = {"id": identifier, "org_id": org_id, "key_id": key_id, "purpose": purpose, "filename": filename}
    await conn.execute(insert(file).values(row | {"expires_at": expires_at}))
    return identifier


async def add_chunk(conn: AsyncConnection, identifier: UUID, number: int, data: bytes) -> None:
    await conn.execute(insert(file_chunk).values(file_id=identifier, number=number, data=data))


async def finish_file(conn: AsyncConnection, identifier: UUID, size: int, keep_seconds: int) -> StoredFile:
    """From now on it is there, for so long after it was begun."""
    expires_at = file.c.created_at + timedelta(seconds=keep_seconds)
    change = update(file).where(file.c.id == identifier).values(bytes=size, expires_at=expires_at)
    return StoredFile(**(await conn.execute(change.returning(*_COLUMNS))).mappings().one())


async def find_file(conn: AsyncConnection, org_id: UUID, identifier: UUID) -> StoredFile | None:
    query = select(*_COLUMNS).where(file.c.id == identifier, *_seen_by(org_id))
    row = (await conn.execute(query)).mappings().one_or_none()
    return None if row is None else StoredFile(**row)


async def list_files(
    conn: AsyncConnection, org_id: UUID, *, after: UUID | None, limit: int, descending: bool, purpose: str | None
) -> list[StoredFile]:
    """Those made before (`descending`: newest first) or after the file `after`."""
    query = select(*_COLUMNS).where(*_seen_by(org_id))
    if purpose is not None:
        query = query.where(file.c.purpose == purpose)
    if after is not None:
        query = query.where(file.c.id < after if descending else file.c.id > after)
    query = query.order_by(file.c.id.desc() if descending else file.c.id).limit(limit)
    return [StoredFile(**row) for row in (await conn.execute(query)).mappings()]


async def delete_file(conn: AsyncConnection, org_id: UUID, identifier: UUID) -> bool:
    """Nobody sees it from now on; False when there is none. An open batch that reads it reads on."""
    gone = update(file).where(file.c.id == identifier, *_seen_by(org_id)).values(expires_at=func.now())
    if (await conn.execute(gone)).rowcount == 0:
        return False
    await purge_files(conn, identifier)
    return True


async def abandon_file(conn: AsyncConnection, identifier: UUID) -> None:
    """Remove a file that was begun and will not be finished."""
    await conn.execute(delete(file).where(file.c.id == identifier))


async def purge_files(conn: AsyncConnection, identifier: UUID | None = None) -> int:
    """Remove what has expired, and uploads that never ended, with their content; of one file or of all."""
    read = exists().where(batch.c.input_file_id == file.c.id, text(BATCH_IS_OPEN))
    abandoned = and_(file.c.bytes.is_(None), file.c.created_at < func.now() - _ABANDONED)
    gone = delete(file).where(or_(file.c.expires_at <= func.now(), abandoned), ~read)
    if identifier is not None:
        gone = gone.where(file.c.id == identifier)
    return (await conn.execute(gone)).rowcount


async def read_span(conn: AsyncConnection, identifier: UUID, position: int, length: int) -> bytes:
    """So many bytes from `position` on; fewer where the file ends before, or is gone."""
    parameters = {"id": identifier, "start": position, "length": length, "chunk": CHUNK_BYTES}
    return b"".join((await conn.execute(_SPAN, parameters)).scalars())


async def contents(engine: AsyncEngine, identifier: UUID, size: int) -> AsyncIterator[bytes]:
    """The chunks of a file of `size` bytes; no connection is held between them.

    Raises LookupError when the file is deleted meanwhile, ApiError 503 when the database is away.
    """
    for number in range(-(-size // CHUNK_BYTES)):
        query = select(file_chunk.c.data).where(file_chunk.c.file_id == identifier, file_chunk.c.number == number)
        async with reachable(), engine.connect() as conn:
            data: bytes | None = (await conn.execute(query)).scalar_one_or_none()
        if data is None:
            raise LookupError(f"the file {identifier} was deleted while it was read")
        yield data


_COLUMNS = (file.c.id, file.c.purpose, file.c.filename, file.c.bytes, file.c.created_at, file.c.expires_at)

_SPAN = text(
    "SELECT substring(data FROM CAST(greatest(:start - starts, 0) + 1 AS integer) "
    "FOR CAST(least(:start + :length - greatest(:start, starts), :chunk) AS integer)) "
    "FROM (SELECT number, data, CAST(number AS bigint) * :chunk AS starts FROM file_chunk WHERE file_id = :id "
    "AND number BETWEEN :start / :chunk AND (:start + :length - 1) / :chunk) AS chunk ORDER BY number"
).bindparams(
    bindparam("start", type_=BigInteger), bindparam("length", type_=BigInteger), bindparam("chunk", type_=BigInteger)
)


def _seen_by(org_id: UUID) -> tuple[ColumnElement[bool], ...]:
    return file.c.org_id == org_id, file.c.bytes.is_not(None), file.c.expires_at > func.now()
