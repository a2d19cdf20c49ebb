"""Who works on what: gateway processes share batches line by line, through claims that run out unless renewed.

A claim is a process's name and a time. A line's result is written only by the process that holds its claim, in one
transaction with the batch's counts, so no line counts twice. A process that dies leaves claims that run out; then
another one takes them over, and a line whose answer had not been written runs again. A process that could not reach the
database itself for a while waits before it takes claims over (`grace`): the others may have been cut off with it, and
renew theirs first.
"""

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import timedelta
from uuid import UUID

from sqlalchemy import Double, Interval, Update, bindparam, func, text, tuple_, update
from sqlalchemy.ext.asyncio import AsyncConnection

from billing.tables import BATCH_IS_OPEN, batch, batch_line

LONGEST_PAUSE = 60
"""Seconds between two tries of a batch whose lines are put off each time, if nobody asks for more."""


@dataclass(frozen=True, slots=True)
class Claimant:
    """A gateway process. `grace`: how long a claim must have run out before this one takes it over."""

    id: UUID
    lasts: timedelta
    grace: timedelta


@dataclass(frozen=True, slots=True)
class Step:
    """A batch to validate (status `validating`) or to close (any other)."""

    id: UUID
    status: str
    org_id: UUID
    key_id: UUID
    endpoint: str
    input_file_id: UUID
    output_seconds: int


@dataclass(frozen=True, slots=True)
class ClaimedLine:
    """A line to run. `tries`: how often it has been taken, this time included."""

    batch_id: UUID
    key_id: UUID
    endpoint: str
    input_file_id: UUID
    number: int
    custom_id: str
    position: int
    length: int
    prompt_tokens: int
    tries: int


@dataclass(frozen=True, slots=True)
class Result:
    line: ClaimedLine
    output: bytes
    """Its line of the output file, or where it `failed` of the error file."""
    failed: bool
    usage: Mapping[str, int]
    """Tokens, by column of `batch`."""


async def claim_step(conn: AsyncConnection, me: Claimant) -> Step | None:
    """Take a batch that waits for its validation, or whose lines have all ended, one way or another."""
    return next((Step(*row) for row in await conn.execute(_CLAIM_STEP, _of(me))), None)


async def claim_lines(conn: AsyncConnection, me: Claimant, running: Mapping[UUID, int], free: int) -> list[ClaimedLine]:
    """Take up to `free` lines of the batch that has the fewest `running` here, shortest prompts first.

    Where other batches wait too, it gets only its part of them.
    """
    waiting = list((await conn.execute(_WAITING, {"grace": me.grace})).scalars())
    if not waiting:
        return []
    chosen = min(waiting, key=lambda identifier: running.get(identifier, 0))
    parameters = {**_of(me), "batch": chosen, "most": -(-free // len(waiting))}
    rows = await conn.execute(_CLAIM_LINES, parameters)
    return sorted((ClaimedLine(*row) for row in rows), key=lambda line: (line.prompt_tokens, line.number))


async def renew(conn: AsyncConnection, me: Claimant, lines: Collection[ClaimedLine], step: Step | None) -> None:
    until = func.now() + me.lasts
    keys = [(line.batch_id, line.number) for line in lines]
    if keys:
        mine = tuple_(batch_line.c.batch_id, batch_line.c.number).in_(keys)
        await conn.execute(update(batch_line).where(mine, batch_line.c.claimed_by == me.id).values(claimed_until=until))
    if step is not None:
        await conn.execute(
            update(batch).where(batch.c.id == step.id, batch.c.claimed_by == me.id).values(claimed_until=until)
        )


async def give_back_step(conn: AsyncConnection, me: Claimant, step: Step) -> None:
    mine = update(batch).where(batch.c.id == step.id, batch.c.claimed_by == me.id)
    await conn.execute(mine.values(claimed_by=None))


async def finish_lines(conn: AsyncConnection, me: Claimant, results: Collection[Result]) -> list[Result]:
    """Write the results of lines and count them; return those written.

    The others are nobody's loss: another process has the line, or has closed its batch.
    """
    written: list[Result] = []
    # In order, so that two processes never wait for each other.
    for identifier in sorted({result.line.batch_id for result in results}):
        async with conn.begin_nested() as savepoint:
            those = [result for result in results if result.line.batch_id == identifier]
            held = [result for result in those if await _write(conn, me, result)]
            if await _count(conn, identifier, held):
                written += held
            else:
                await savepoint.rollback()
    return written


async def _write(conn: AsyncConnection, me: Claimant, result: Result) -> bool:
    values = _held(me, result.line).values(output=result.output, failed=result.failed)
    return (await conn.execute(values)).rowcount == 1


async def _count(conn: AsyncConnection, identifier: UUID, results: Collection[Result]) -> bool:
    """False when the batch is closed."""
    sums = Counter({"failed": sum(result.failed for result in results)})
    sums["completed"] = len(results) - sums["failed"]
    for result in results:
        sums.update(result.usage)
    values = {batch.c.pauses: 0} | {batch.c[name]: batch.c[name] + count for name, count in sums.items()}
    is_open = update(batch).where(batch.c.id == identifier, batch.c.finalizing_at.is_(None))
    return (await conn.execute(is_open.values(values))).rowcount == 1


async def put_off_line(
    conn: AsyncConnection, me: Claimant, line: ClaimedLine, seconds: float | None, counts: bool
) -> None:
    """Give a line back, to be run again. `counts`: whether this was one of its tries.

    `seconds`: how long no line of its batch starts, longer each time until one of them finishes; None: not at all.
    """
    tries = batch_line.c.tries - (0 if counts else 1)
    await conn.execute(_held(me, line).values(claimed_by=None, tries=tries))
    if seconds is not None:
        await conn.execute(_PAUSE, {"batch": line.batch_id, "seconds": seconds, "most": LONGEST_PAUSE})


def _held(me: Claimant, line: ClaimedLine) -> Update:
    columns = batch_line.c
    return update(batch_line).where(
        columns.batch_id == line.batch_id,
        columns.number == line.number,
        columns.claimed_by == me.id,
        columns.tries == line.tries,
        columns.output.is_(None),
    )


def _of(me: Claimant) -> dict[str, object]:
    return {"me": me.id, "lasts": me.lasts, "grace": me.grace}


_INTERVALS = (bindparam("lasts", type_=Interval), bindparam("grace", type_=Interval))

_CLAIM_STEP = text(
    f"""
    UPDATE batch SET
        claimed_by = :me,
        claimed_until = now() + :lasts,
        status = CASE WHEN status = 'in_progress' THEN 'finalizing' ELSE status END,
        finalizing_at = CASE WHEN status = 'validating' THEN NULL ELSE coalesce(finalizing_at, now()) END
    WHERE id = (
        SELECT id FROM batch WHERE {BATCH_IS_OPEN} AND (claimed_by IS NULL OR claimed_until <= now() - :grace) AND (
            status IN ('validating', 'finalizing')
            OR (status = 'cancelling' OR expires_at <= now() OR completed + failed = total)
            AND NOT EXISTS (
                SELECT FROM batch_line AS line
                WHERE line.batch_id = batch.id AND line.output IS NULL
                AND line.claimed_by IS NOT NULL AND line.claimed_until > now() - :grace
            )
        )
        ORDER BY id LIMIT 1 FOR UPDATE SKIP LOCKED
    )
    RETURNING id, status, org_id, key_id, endpoint, input_file_id, output_seconds
    """  # noqa: S608 - a constant
).bindparams(*_INTERVALS)

_WAITING = text(
    f"""
    SELECT id FROM batch
    WHERE {BATCH_IS_OPEN} AND status = 'in_progress' AND paused_until <= now() AND expires_at > now() AND EXISTS (
        SELECT FROM batch_line AS line
        WHERE line.batch_id = batch.id AND line.output IS NULL
        AND (line.claimed_by IS NULL OR line.claimed_until <= now() - :grace)
    )
    ORDER BY id
    """  # noqa: S608 - a constant
).bindparams(_INTERVALS[1])

# The share lock keeps the batch from being cancelled or closed between the look at it and the claim.
_CLAIM_LINES = text(
    """
    WITH chosen AS (SELECT * FROM batch WHERE id = :batch AND status = 'in_progress' FOR SHARE),
    next AS (
        SELECT batch_id, number FROM batch_line
        WHERE batch_id = (SELECT id FROM chosen) AND output IS NULL
        AND (claimed_by IS NULL OR claimed_until <= now() - :grace)
        ORDER BY prompt_tokens, number LIMIT :most FOR UPDATE SKIP LOCKED
    )
    UPDATE batch_line AS line SET claimed_by = :me, claimed_until = now() + :lasts, tries = tries + 1
    FROM next, chosen WHERE line.batch_id = next.batch_id AND line.number = next.number
    RETURNING line.batch_id, chosen.key_id, chosen.endpoint, chosen.input_file_id,
        line.number, line.custom_id, line.position, line.length, line.prompt_tokens, line.tries
    """
).bindparams(*_INTERVALS)

# Lines that were under way together are put off together: the first of them sets the pause.
_PAUSE = text(
    """
    UPDATE batch SET
        pauses = pauses + 1,
        paused_until = now() + greatest(:seconds, least(power(2, least(pauses, 30)), :most)) * interval '1 second'
    WHERE id = :batch AND paused_until <= now()
    """
).bindparams(bindparam("seconds", type_=Double), bindparam("most", type_=Double))
