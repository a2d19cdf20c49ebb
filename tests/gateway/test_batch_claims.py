"""Gateway processes share the lines of batches through the database: none runs twice while its claim holds."""

import asyncio
import random
from collections import Counter
from dataclasses import replace
from datetime import timedelta
from uuid import UUID

import pytest
from sqlalchemy import func, insert, select, text, update
from sqlalchemy.ext.asyncio import AsyncEngine

from billing.ids import new_id
from billing.tables import batch, batch_line
from gateway.batches import claims
from gateway.batches.claims import Claimant, ClaimedLine, Result
from gateway.batches.store import cancel_batch, create_batch, find_batch
from tests.gateway.running import People, make_people

NO_GRACE = timedelta()


@pytest.fixture
async def people(engine: AsyncEngine) -> People:
    return await make_people(engine)


def somebody(lasts: float = 60, grace: float = 0) -> Claimant:
    return Claimant(new_id(), timedelta(seconds=lasts), timedelta(seconds=grace))


async def make_batch(engine: AsyncEngine, people: People, count: int) -> UUID:
    """A batch in progress, with so many lines; the longest prompts first."""
    async with engine.begin() as conn:
        made = await create_batch(
            conn,
            org_id=people.org,
            key_id=people.key,
            endpoint="/v1/chat/completions",
            input_file_id=new_id(),
            metadata=None,
            output_seconds=3600,
        )
        await conn.execute(update(batch).where(batch.c.id == made.id).values(status="in_progress", total=count))
        line = {"batch_id": made.id, "position": 0, "length": 1}
        rows = [line | {"number": n, "custom_id": str(n), "prompt_tokens": 1000 - n} for n in range(1, count + 1)]
        await conn.execute(insert(batch_line), rows)
    return made.id


async def take(
    engine: AsyncEngine, me: Claimant, free: int = 1, running: Counter[UUID] | None = None
) -> list[ClaimedLine]:
    async with engine.begin() as conn:
        return await claims.claim_lines(conn, me, running or Counter(), free)


async def finish(engine: AsyncEngine, me: Claimant, line: ClaimedLine, failed: bool = False) -> bool:
    async with engine.begin() as conn:
        return bool(await claims.finish_lines(conn, me, [Result(line, b"{}\n", failed, {"input_tokens": 3})]))


async def step(engine: AsyncEngine, me: Claimant) -> claims.Step | None:
    async with engine.begin() as conn:
        return await claims.claim_step(conn, me)


async def test_many_processes_run_every_line_once(engine: AsyncEngine, people: People) -> None:
    identifiers = [await make_batch(engine, people, count) for count in (150, 10, 40)]
    ran: Counter[tuple[UUID, int]] = Counter()
    chance = random.Random(7)

    async def process() -> None:
        me = somebody()
        while lines := await take(engine, me, 3):
            for line in lines:
                ran[line.batch_id, line.number] += 1
                await asyncio.sleep(chance.random() / 200)
                if chance.random() < 0.1:  # put off, and taken again by whoever comes
                    ran[line.batch_id, line.number] -= 1
                    async with engine.begin() as conn:
                        await claims.put_off_line(conn, me, line, None, counts=False)
                else:
                    assert await finish(engine, me, line, failed=line.number % 5 == 0)

    await asyncio.gather(*(process() for _ in range(6)))
    assert len(ran) == 200 and set(ran.values()) == {1}
    async with engine.connect() as conn:
        for identifier, count in zip(identifiers, (150, 10, 40), strict=True):
            found = await find_batch(conn, people.org, identifier)
            assert found is not None
            assert (found.completed, found.failed, found.input_tokens) == (count - count // 5, count // 5, 3 * count)


async def test_lines_of_one_length_together_and_batches_in_turn(engine: AsyncEngine, people: People) -> None:
    first, second = await make_batch(engine, people, 10), await make_batch(engine, people, 10)
    me = somebody()
    lines = await take(engine, me, 4)
    assert [(line.batch_id, line.number) for line in lines] == [(first, 10), (first, 9)], "half: another one waits"
    lines = await take(engine, me, 4, Counter({first: 2}))
    assert [(line.batch_id, line.number) for line in lines] == [(second, 10), (second, 9)]


async def test_a_dead_process_is_taken_over(engine: AsyncEngine, people: People) -> None:
    await make_batch(engine, people, 1)
    dead, other = somebody(lasts=1.5), somebody()
    (line,) = await take(engine, dead)
    assert await take(engine, other) == []
    await asyncio.sleep(1.6)
    assert await take(engine, replace(other, grace=timedelta(seconds=30))) == [], "it was cut off itself: it waits"
    (again,) = await take(engine, other)
    assert (again.number, line.tries, again.tries) == (line.number, 1, 2)
    assert not await finish(engine, dead, line), "it is alive after all, and too late"
    assert await finish(engine, other, again)
    assert not await finish(engine, other, again), "once"


async def test_a_claim_that_is_renewed_lasts(engine: AsyncEngine, people: People) -> None:
    await make_batch(engine, people, 1)
    me, other = somebody(lasts=1.5), somebody()
    lines = await take(engine, me)
    for _ in range(4):
        await asyncio.sleep(0.5)
        async with engine.begin() as conn:
            await claims.renew(conn, me, lines, None)
        assert await take(engine, other) == []
    assert await finish(engine, me, lines[0])


async def test_a_batch_is_closed_when_its_last_line_has_ended(engine: AsyncEngine, people: People) -> None:
    identifier = await make_batch(engine, people, 2)
    me, other = somebody(), somebody()
    first, second = await take(engine, me, 2)
    assert await step(engine, other) is None
    assert await finish(engine, me, first)
    assert await step(engine, other) is None
    assert await finish(engine, me, second, failed=True)
    closing = await step(engine, other)
    assert closing is not None and (closing.id, closing.status) == (identifier, "finalizing")
    assert await step(engine, me) is None, "one closes it"


async def test_a_cancelled_batch_waits_for_what_is_under_way(engine: AsyncEngine, people: People) -> None:
    identifier = await make_batch(engine, people, 3)
    me = somebody()
    (line,) = await take(engine, me)
    async with engine.begin() as conn:
        await cancel_batch(conn, people.org, identifier)
    assert await take(engine, me) == [] and await step(engine, me) is None
    assert await finish(engine, me, line)
    closing = await step(engine, me)
    assert closing is not None and closing.status == "cancelling"


async def test_results_of_several_batches_at_once(engine: AsyncEngine, people: People) -> None:
    """One batch is closed, one line is somebody else's: the others are written."""
    closed, first, second = [await make_batch(engine, people, 2) for _ in range(3)]
    me = somebody(lasts=0.2)
    lines = [line for _ in range(3) for line in await take(engine, me, 6)]
    assert len(lines) == 6
    async with engine.begin() as conn:
        await conn.execute(update(batch).where(batch.c.id == closed).values(finalizing_at=func.now()))
        taken = batch_line.c.batch_id == second, batch_line.c.number == 1
        await conn.execute(update(batch_line).where(*taken).values(claimed_by=new_id()))
    results = [Result(line, b"{}\n", line.number == 2, {"output_tokens": 5}) for line in lines]
    async with engine.begin() as conn:
        written = await claims.finish_lines(conn, me, results)
    assert {(r.line.batch_id, r.line.number) for r in written} == {(first, 1), (first, 2), (second, 2)}
    async with engine.connect() as conn:
        counts = {
            identifier: (found.completed, found.failed, found.output_tokens)
            for identifier in (closed, first, second)
            if (found := await find_batch(conn, people.org, identifier)) is not None
        }
        left = (await conn.execute(select(func.count()).where(batch_line.c.output.is_not(None)))).scalar_one()
    assert counts == {closed: (0, 0, 0), first: (1, 1, 10), second: (0, 1, 5)} and left == 3


async def test_no_result_comes_after_the_closing(engine: AsyncEngine, people: People) -> None:
    """Its claim had run out when the batch was closed: counts and files agree, whoever comes late."""
    identifier = await make_batch(engine, people, 1)
    slow = somebody(lasts=0.1)
    (line,) = await take(engine, slow)
    async with engine.begin() as conn:
        await conn.execute(text("UPDATE batch SET expires_at = now()"))
    await asyncio.sleep(0.2)
    assert await step(engine, somebody()) is not None
    assert not await finish(engine, slow, line)
    async with engine.connect() as conn:
        found = await find_batch(conn, people.org, identifier)
        written = (await conn.execute(select(func.count()).where(batch_line.c.output.is_not(None)))).scalar_one()
    assert found is not None and found.completed == 0 and written == 0


async def test_pauses_grow_until_a_line_finishes(engine: AsyncEngine, people: People) -> None:
    await make_batch(engine, people, 3)
    me = somebody()

    async def pause() -> float:
        """How long the batch is put off by a line that is; then as if that time were over."""
        (line,) = await take(engine, me)
        async with engine.begin() as conn:
            await claims.put_off_line(conn, me, line, 1.5, counts=False)
            await claims.put_off_line(conn, me, line, 1.5, counts=False)
            until = select(func.extract("epoch", batch.c.paused_until - func.now()))
            seconds = float((await conn.execute(until)).scalar_one())
        assert await take(engine, me) == []
        async with engine.begin() as conn:
            await conn.execute(text("UPDATE batch SET paused_until = now()"))
        return seconds

    assert [round(await pause(), 1) for _ in range(8)] == [1.5, 2, 4, 8, 16, 32, 60, 60]
    (line,) = await take(engine, me)
    assert line.tries == 1, "being put off is no try"
    assert await finish(engine, me, line)
    assert round(await pause(), 1) == 1.5
