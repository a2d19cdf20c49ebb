"""Streams of a process that is killed: each leaves its row, once, whatever it was doing."""

import asyncio
import os
import signal
import subprocess
import sys
from decimal import Decimal
from pathlib import Path
from typing import Any

import msgspec
import pytest
from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncEngine

import billing.in_flight
from billing.in_flight import FILE, InFlight
from billing.ledger import Ledger
from billing.records import OperationRecord, TokenClasses
from billing.spool import Spool, SpoolFullError
from billing.tables import attempt, operation
from tests.billing.samples import an_attempt, an_operation

ROOT = Path(__file__).parents[2]


def a_stream(**changes: Any) -> OperationRecord:
    last = an_attempt(2, status="upstream_error", tokens=TokenClasses(input_fresh=7), billed=Decimal(0), cost=None)
    fields: dict[str, Any] = {"status": "upstream_error", "billed": Decimal(0), "cost": None}
    return an_operation(**{"attempts": [an_attempt(1), last], **fields} | changes)


async def rows(engine: AsyncEngine) -> list[Any]:
    async with engine.connect() as conn:
        return list(await conn.execute(select(operation).order_by(operation.c.id)))


async def test_who_does_not_wait_for_the_row_leaves_no_slot_behind(tmp_path: Path) -> None:
    """As the gateway does when it ends a stream whose caller has left, just while its row is written."""
    spool = Spool(tmp_path)
    for waits in (True, False):
        record = a_stream()
        slot = spool.begin(record)
        appending = spool.append(record, slot)
        await asyncio.sleep(0)
        if waits:
            await appending
        else:
            appending.cancel()
    await spool.close()
    again = Spool(tmp_path)
    assert again.depth == 2, "a slot that was left would make a row of its own"
    await again.close()


async def test_a_stream_left_open_is_a_row_and_one_that_ended_is_its_own(engine: AsyncEngine, tmp_path: Path) -> None:
    spool = Spool(tmp_path)
    left, ended, both = (a_stream() for _ in range(3))
    spool.begin(left).sent(401)
    slot = spool.begin(ended)
    slot.sent(5)
    await spool.append(msgspec.structs.replace(ended, status="ok"))
    slot.end()
    spool.begin(both).sent(9)
    await spool.append(msgspec.structs.replace(both, status="ok"))  # killed before its slot was freed
    await spool.close()

    for _ in range(2):  # the second finds nothing left
        spool = Spool(tmp_path)
        await Ledger(engine, spool).recover()
        await spool.close()
        found = {row.id: row.status for row in await rows(engine)}
        assert found == {left.id: "upstream_error", ended.id: "ok", both.id: "ok"}
    async with engine.connect() as conn:
        last = (
            await conn.execute(select(attempt).where(attempt.c.operation_id == left.id, attempt.c.number == 2))
        ).one()
    assert (last.input_fresh, last.output_text, last.status, last.billed) == (7, 101, "upstream_error", 0)
    (row,) = (row for row in await rows(engine) if row.id == left.id)
    assert 0 <= row.total_seconds < 60
    assert row.tags == left.tags


def test_a_row_that_is_too_long_for_its_slot_takes_nothing_of_the_next(tmp_path: Path) -> None:
    """Thirty attempts, each with what its upstream said."""
    open_streams = InFlight(tmp_path)
    attempts = [an_attempt(n, status="upstream_error", error="x" * 256) for n in range(1, 31)]
    streams = [a_stream(attempts=attempts), a_stream(attempts=attempts, tags={"of": "y" * 20_000}), a_stream()]
    for each in streams:
        open_streams.begin(each)
    found = {each.id: each for each in open_streams.left()}
    assert found.keys() == {each.id for each in streams}
    assert [each.number for each in found[streams[1].id].attempts] == [30]
    open_streams.close()


async def test_more_streams_than_there_are_slots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(billing.in_flight, "SLOTS", 2)
    open_streams = InFlight(tmp_path)
    streams = [a_stream() for _ in range(9)]
    slots = [open_streams.begin(each) for each in streams]
    for slot in slots[::2]:
        slot.end()
    open_streams.close()
    again = InFlight(tmp_path)
    assert {each.id for each in again.left()} == {each.id for each in streams[1::2]}
    again.clear()
    assert again.left() == []
    again.close()


def test_a_record_too_large_for_its_slot_goes_without_its_tags(tmp_path: Path) -> None:
    open_streams = InFlight(tmp_path)
    open_streams.begin(large := a_stream(tags={"user": "x" * 100_000}))
    (found,) = open_streams.left()
    assert (found.id, found.tags, found.billed) == (large.id, {}, large.billed)
    open_streams.close()


def test_a_slot_that_was_not_whole_is_no_row(tmp_path: Path) -> None:
    """At whichever byte the process was killed: nothing had been sent yet."""
    open_streams = InFlight(tmp_path)
    open_streams.begin(a_stream())
    whole = bytes(open_streams.map)
    end = 24 + int.from_bytes(whole[:4], "little")
    for at in range(0, end, 41):
        open_streams.map[:] = whole[:at] + bytes(len(whole) - at)
        assert open_streams.left() == []
    open_streams.map[:] = whole
    assert len(open_streams.left()) == 1
    open_streams.close()


async def test_without_room_no_stream_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(billing.in_flight, "SLOTS", 1)
    spool = Spool(tmp_path)
    first = spool.begin(a_stream())

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(SpoolFullError, match="is full; free some space"):
        spool.begin(a_stream())
    first.end()
    spool.begin(a_stream()).end()
    await spool.close()
    assert (tmp_path / FILE).stat().st_size == billing.in_flight.SLOT_BYTES


async def test_kill_9_leaves_what_was_written(tmp_path: Path) -> None:
    program = (
        "import sys, time; from pathlib import Path; from billing.spool import Spool\n"
        "from tests.billing.test_in_flight import a_stream\n"
        "spool = Spool(Path(sys.argv[1]))\n"
        "for n in range(300): spool.begin(stream := a_stream()).sent(n); print(stream.id, flush=True)\n"
        "time.sleep(60)"
    )
    process = subprocess.Popen(  # noqa: ASYNC220 - it only starts here
        [sys.executable, "-c", program, tmp_path], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    begun = [(await asyncio.to_thread(process.stdout.readline)).strip() for _ in range(300)]
    process.send_signal(signal.SIGKILL)
    await asyncio.to_thread(process.wait)
    process.stdout.close()
    spool = Spool(tmp_path)
    assert spool.depth == 300
    segment = await spool.oldest()
    assert segment is not None
    found = (await spool.read(segment)).records
    assert {str(each.id): each.attempts[-1].tokens.output_text for each in found} == {
        identifier: -(-n // 4) for n, identifier in enumerate(begun)
    }
    await spool.close()
