"""What is done to a batch as a whole: its input is read before the first line runs, its files are written at the end.

Each is one transaction that ends in a change of the batch's status by who still holds the claim: a process that dies,
or that was too slow, leaves nothing behind.
"""

from typing import Any
from uuid import UUID

from sqlalchemy import delete, func, insert, select, update
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from billing.tables import batch, batch_line, file
from gateway.batches.claims import Claimant, Step
from gateway.batches.files import ChunkWriter, add_chunk, begin_file, contents, finish_file
from gateway.batches.input import Input, read_input
from gateway.batches.lines import Line, LineError, unanswered
from gateway.batches.names import batch_name

INSERTED_AT_ONCE = 1000
READ_AT_ONCE = 8
"""Few: a result can have megabytes."""
_UNFINISHED = {
    "cancelled": ("batch_cancelled", "The batch was cancelled before this request ran."),
    "expired": ("batch_expired", "The completion window ended before this request could be run."),
}


async def validate(engine: AsyncEngine, me: Claimant, step: Step, line_bytes: int) -> bool:
    """Read the input file; from then on the batch is in progress, or has failed and says why.

    False when it was cancelled meanwhile, or taken over; so says `close`.
    """
    query = select(file.c.bytes).where(file.c.id == step.input_file_id)
    async with engine.connect() as conn:
        size: int | None = (await conn.execute(query)).scalar_one_or_none()
    found = Input()
    if size is None:  # it expired in the second between the batch's making and its claim
        found.refuse(LineError("file_not_found", "The input file is gone."), None)
    else:
        found = await read_input(contents(engine, step.input_file_id, size), step.endpoint, line_bytes)
    async with engine.begin() as conn:
        if found.errors:
            return await _conclude(conn, me, step, status="failed", failed_at=func.now(), errors=found.errors)
        await _insert(conn, step.id, found.lines)
        counted = {"total": len(found.lines), "model": found.model}
        return await _conclude(conn, me, step, status="in_progress", in_progress_at=func.now(), **counted)


async def close(engine: AsyncEngine, me: Claimant, step: Step) -> bool:
    """Write the output file and the error file, in the order of the input; the batch has ended."""
    async with engine.begin() as conn:
        unfinished = select(func.count()).where(batch_line.c.batch_id == step.id, batch_line.c.output.is_(None))
        missing: int = (await conn.execute(unfinished)).scalar_one()
        end = "cancelled" if step.status == "cancelling" else "expired" if missing else "completed"
        output, errors = _File(conn, step, "output"), _File(conn, step, "error")
        await _write(conn, step, end, output, errors)
        values: dict[str, Any] = {
            "status": end,
            f"{end}_at": func.now(),
            "failed": batch.c.failed + missing,
            "output_file_id": await output.finish(),
            "error_file_id": await errors.finish(),
        }
        await conn.execute(delete(batch_line).where(batch_line.c.batch_id == step.id))
        return await _conclude(conn, me, step, **values)


async def _insert(conn: AsyncConnection, identifier: UUID, lines: list[Line]) -> None:
    for start in range(0, len(lines), INSERTED_AT_ONCE):
        rows = [
            {
                "batch_id": identifier,
                "number": line.number,
                "custom_id": line.custom_id,
                "position": line.position,
                "length": line.length,
                "prompt_tokens": line.prompt_tokens,
            }
            for line in lines[start : start + INSERTED_AT_ONCE]
        ]
        await conn.execute(insert(batch_line), rows)


async def _conclude(conn: AsyncConnection, me: Claimant, step: Step, **values: Any) -> bool:
    held = update(batch).where(batch.c.id == step.id, batch.c.claimed_by == me.id, batch.c.status == step.status)
    done = (await conn.execute(held.values(claimed_by=None, **values))).rowcount == 1
    if not done:
        await conn.rollback()
    return done


async def _write(conn: AsyncConnection, step: Step, end: str, output: "_File", errors: "_File") -> None:
    columns = batch_line.c
    last = 0
    while True:
        page = select(columns.number, columns.custom_id, columns.output, columns.failed)
        page = page.where(columns.batch_id == step.id, columns.number > last).order_by(columns.number)
        rows = (await conn.execute(page.limit(READ_AT_ONCE))).all()
        for number, custom_id, line, failed in rows:
            if line is None:
                await errors.write(unanswered(custom_id, *_UNFINISHED[end]))
            else:
                await (errors if failed else output).write(line)
            last = number
        if not rows:
            return


class _File:
    """A file that is made when its first line is written."""

    def __init__(self, conn: AsyncConnection, step: Step, kind: str) -> None:
        self._conn = conn
        self._step = step
        self._name = f"{batch_name(step.id)}_{kind}.jsonl"
        self._id: UUID | None = None
        self._writer = ChunkWriter(self._store)

    async def write(self, line: bytes) -> None:
        if self._id is None:
            step = self._step
            self._id = await begin_file(self._conn, step.org_id, step.key_id, "batch_output", self._name)
        await self._writer.write(line)

    async def finish(self) -> UUID | None:
        if self._id is not None:
            await finish_file(self._conn, self._id, await self._writer.close(), self._step.output_seconds)
        return self._id

    async def _store(self, number: int, data: bytes) -> None:
        assert self._id is not None
        await add_chunk(self._conn, self._id, number, data)
