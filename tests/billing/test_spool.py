"""The spool on a real disk: nothing acknowledged is lost, whatever happens at whichever byte."""

import asyncio
import errno
import os
import random
import signal
import subprocess
import sys
import time
import zlib
from decimal import Decimal
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

import billing.spool
from billing import frames
from billing.records import OperationRecord, TokenClasses
from billing.spool import UNREADABLE, Spool, SpoolError, SpoolFullError
from tests.billing.samples import an_attempt, an_operation

ROOT = Path(__file__).parents[2]


async def everything(spool: Spool) -> list[OperationRecord]:
    """All records, with their segments discarded."""
    records = []
    while (segment := await spool.oldest()) is not None:
        contents = await spool.read(segment)
        records += contents.records
        await spool.discard(segment, contents, [])
    return records


async def test_records_come_back_in_order_over_a_restart_and_then_are_gone(tmp_path: Path) -> None:
    records = [an_operation() for _ in range(5)]
    spool = Spool(tmp_path / "deep" / "spool")
    for record in records[:3]:
        await spool.append(record)
    first = spool.replica
    await spool.close()
    spool = Spool(tmp_path / "deep" / "spool")
    assert spool.depth == 3
    for record in records[3:]:
        await spool.append(record)
    assert spool.depth == 5
    assert await everything(spool) == records
    assert spool.depth == 0
    assert list(spool.folder.glob("*.segment")) == []
    assert spool.replica != first
    assert spool.replica.partition(".")[0] == first.partition(".")[0]
    await spool.close()


async def test_concurrent_appends_share_an_fsync(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    syncs = 0
    fdatasync = os.fdatasync

    def counted(handle: int) -> None:
        nonlocal syncs
        syncs += 1
        fdatasync(handle)

    monkeypatch.setattr(os, "fdatasync", counted)
    spool = Spool(tmp_path)
    records = [an_operation() for _ in range(200)]
    await asyncio.gather(*(spool.append(record) for record in records))
    assert syncs <= 4
    assert await everything(spool) == records
    await spool.close()


async def test_a_lone_record_on_a_quick_disk_is_there_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(billing.spool, "QUICK_SECONDS", 5.0)
    spool = Spool(tmp_path)
    for _ in range(2):
        assert spool.append(an_operation()).done()
        near = spool.append(an_operation())
        assert not near.done(), "with another so near it may be the first of many, which share an fsync"
        await near
        await asyncio.sleep(billing.spool.LONE_SECONDS)
    assert spool.depth == 4
    await spool.close()


@pytest.mark.parametrize("how", ["fdatasync", "fsync"])
async def test_a_slow_disk_holds_up_nobody_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    """Be it slow in writing records, or in making a new segment's name last."""
    spool = Spool(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(os, how, lambda _: time.sleep(0.2))
        await spool.append(an_operation())  # it shows that it is slow
        await everything(spool)
        await asyncio.sleep(billing.spool.LONE_SECONDS)
        began = time.monotonic()
        waiting = spool.append(an_operation())
        await asyncio.sleep(0)
        assert time.monotonic() - began < 0.1
        await waiting
        assert time.monotonic() - began > 0.15
    monkeypatch.setattr(billing.spool, "QUICK_SECONDS", 0.1)
    await spool.append(an_operation())  # it shows that it is quick again
    await asyncio.sleep(billing.spool.LONE_SECONDS)
    assert spool.append(an_operation()).done()
    await spool.close()


async def test_a_disk_that_fails_slowly_holds_up_nobody_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(_: int) -> None:
        time.sleep(0.2)
        raise OSError(errno.EIO, "input/output error")

    spool = Spool(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fdatasync", failing)
        for number in range(3):
            began = time.monotonic()
            waiting = spool.append(an_operation())
            assert number == 0 or time.monotonic() - began < 0.1
            with pytest.raises(SpoolError, match="cannot be used"):
                await waiting
            await asyncio.sleep(billing.spool.LONE_SECONDS)
    await spool.append(kept := an_operation())
    assert await everything(spool) == [kept]
    await spool.close()


async def test_a_closed_spool_takes_nothing_more(tmp_path: Path) -> None:
    spool = Spool(tmp_path)
    await spool.append(kept := an_operation())
    await spool.close()
    with pytest.raises(SpoolError, match="is closed"):
        spool.append(an_operation())
    spool = Spool(tmp_path)
    assert await everything(spool) == [kept]
    await spool.close()


async def test_a_lone_record_waits_for_what_the_thread_is_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(billing.spool, "QUICK_SECONDS", 5.0)
    monkeypatch.setattr(billing.spool, "LONE_SECONDS", 0.0)
    spool = Spool(tmp_path)
    records = []
    for _ in range(20):
        sealing = asyncio.create_task(spool.oldest())
        await asyncio.sleep(0)
        records.append(an_operation())
        await spool.append(records[-1])
        assert (await sealing is None) == (len(records) == 1)
    assert await everything(spool) == records
    await spool.close()


async def test_segments_are_sealed_by_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(billing.spool, "SEGMENT_BYTES", 3000)
    spool = Spool(tmp_path)
    records = [an_operation() for _ in range(10)]
    for record in records:
        await spool.append(record)
    assert sum(name.endswith(".segment") for name in await asyncio.to_thread(os.listdir, tmp_path)) > 3
    assert await everything(spool) == records
    await spool.close()


async def test_a_cancelled_append_is_still_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(billing.spool, "QUICK_SECONDS", -1.0)  # on the thread
    spool = Spool(tmp_path)
    task = spool.append(record := an_operation())
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await spool.append(other := an_operation())
    assert await everything(spool) == [record, other]
    await spool.close()


def test_a_tail_cut_at_any_byte_costs_only_itself() -> None:
    kept, last = an_operation(), an_operation()
    whole = frames.encode(kept)
    data = whole + frames.encode(last)
    assert b"\n" not in data[:-1].replace(whole, b"")
    for end in range(len(whole), len(data) + 1):
        contents = frames.read(data[:end])
        assert contents.unreadable == []
        if end >= len(data) - 1:  # the line break alone may be missing
            assert (contents.records, contents.torn) == ([kept, last], 0)
        else:
            assert (contents.records, contents.torn) == ([kept], end - len(whole))


@given(st.integers(0, 2**32), st.binary(min_size=1, max_size=20))
def test_damage_in_the_middle_costs_only_what_it_touches(seed: int, junk: bytes) -> None:
    records = [an_operation(error=str(n)) for n in range(5)]
    lines = [frames.encode(record) for record in records]
    data = bytearray(b"".join(lines))
    start = len(lines[0]) + len(lines[1])
    at = start + random.Random(seed).randrange(len(lines[2]) - len(junk) - 1)
    data[at : at + len(junk)] = junk
    contents = frames.read(bytes(data))
    kept = [record for record in records if record in contents.records]
    assert contents.records == kept
    assert {record.error for record in kept} >= {"0", "1", "3", "4"}
    if bytes(data) != b"".join(lines):
        assert "".join(line.decode("latin-1") for _, line in contents.unreadable)
        assert len(kept) == 4


async def test_unreadable_lines_are_set_aside_and_the_rest_goes_on(tmp_path: Path) -> None:
    one, two = an_operation(), an_operation()
    wrong = b'{"not": "an operation"}'
    checked = b"%08x %d %b" % (zlib.crc32(wrong), len(wrong), wrong)
    segment = tmp_path / f"{7:012d}.segment"
    segment.write_bytes(frames.encode(one) + b"rubbish \xff\n\n" + checked + b"\n" + frames.encode(two) + b"torn")
    spool = Spool(tmp_path)
    assert await everything(spool) == [one, two]
    aside = [msgspec.json.decode(line) for line in (tmp_path / UNREADABLE).read_bytes().splitlines()]
    assert [entry["line"] for entry in aside] == [
        "rubbish \\xff",
        "",
        wrong.join([checked[: -len(wrong)], b""]).decode(),
    ]
    assert "missing required field" in aside[2]["reason"]
    assert spool.depth == 0
    await spool.append(one)
    assert (tmp_path / f"{8:012d}.segment").exists()  # numbers go on
    await spool.close()


async def test_text_that_postgresql_cannot_store_is_kept_without_it(tmp_path: Path) -> None:
    spool = Spool(tmp_path)
    bad = an_operation(error="a\x00b\ud800", tags={"k\x00": "v"}, requested_model="\\u0000")
    await spool.append(bad)
    (kept,) = await everything(spool)
    assert (kept.error, kept.tags) == ("a\ufffdb?", {"k\ufffd": "v"})
    assert kept.requested_model == "\\u0000"
    assert (kept.billed, kept.attempts, kept.started_at) == (bad.billed, bad.attempts, bad.started_at)
    await spool.close()


async def test_a_full_disk_is_said_so_and_costs_nothing_acknowledged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spool = Spool(tmp_path)
    await spool.append(before := an_operation())
    real = os.write

    def half_then_full(handle: int, data: bytes) -> int:
        if len(memoryview(data)) < 300:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(handle, memoryview(data)[:-200])

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", half_then_full)
        for _ in range(3):
            with pytest.raises(SpoolFullError, match="is full; free some space"):
                await spool.append(an_operation())
    assert spool.depth == 1
    assert len([name for name in await asyncio.to_thread(os.listdir, tmp_path) if name.endswith(".segment")]) == 1
    await spool.append(after := an_operation())
    assert await everything(spool) == [before, after]
    assert not (tmp_path / UNREADABLE).exists()
    await spool.close()


async def test_one_process_at_a_time(tmp_path: Path) -> None:
    spool = Spool(tmp_path)
    with pytest.raises(SpoolError, match="another process uses the spool"):
        Spool(tmp_path)
    await spool.close()
    await Spool(tmp_path).close()


def test_a_folder_that_cannot_be_used_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SpoolError, match="cannot be used: Not a directory"):
        Spool(tmp_path / "file" / "spool")


async def test_a_foreign_file_is_left_alone(tmp_path: Path) -> None:
    foreign = [tmp_path / name for name in ("foo.segment", "7.segment", ".segment")]
    for path in foreign:
        path.write_bytes(b"not ours")
    with capture_logs() as said:
        spool = Spool(tmp_path)
    assert [(entry["log_level"], sorted(entry["files"])) for entry in said] == [
        ("warning", [".segment", "7.segment", "foo.segment"])
    ]
    await spool.append(record := an_operation())
    assert await everything(spool) == [record]
    assert [path.read_bytes() for path in foreign] == [b"not ours"] * 3
    await spool.close()


@pytest.mark.parametrize("damage", [b"", b"\xff\xfe", b"has.a.dot", b"\0" * 32])
async def test_a_place_that_cannot_be_read_is_replaced_for_good(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: bytes
) -> None:
    (tmp_path / "place").write_bytes(damage)
    synced: list[Path] = []
    fsync = os.fsync

    def noted(handle: int) -> None:
        synced.append(Path(f"/proc/self/fd/{handle}").readlink())
        fsync(handle)

    monkeypatch.setattr(os, "fsync", noted)
    with capture_logs() as said:
        spool = Spool(tmp_path)
    place = spool.replica.partition(".")[0]
    assert synced == [tmp_path / "place.new", tmp_path]
    assert [(entry["event"], entry["new"]) for entry in said] == [("spool_place_replaced", place)]
    assert "not freed" in said[0]["consequence"]
    await spool.close()
    with capture_logs() as said:
        spool = Spool(tmp_path)
    assert spool.replica.partition(".")[0] == place and said == []
    await spool.close()


@pytest.mark.parametrize("seed", range(3))
async def test_a_killed_writer_loses_nothing_it_acknowledged(tmp_path: Path, seed: int) -> None:
    writer = subprocess.Popen(  # noqa: ASYNC220 - it only starts here
        [sys.executable, "-m", "tests.billing.spool_writer", tmp_path], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert writer.stdout is not None
    acknowledged = [await asyncio.to_thread(writer.stdout.readline)]
    await asyncio.sleep(random.Random(seed).uniform(0.02, 0.3))
    writer.send_signal(signal.SIGKILL)
    rest, _ = await asyncio.to_thread(writer.communicate)
    acknowledged += rest.splitlines()
    spool = Spool(tmp_path)
    written = {str(record.id) for record in await everything(spool)}
    assert {line.strip() for line in acknowledged if len(line.strip()) == 36} <= written
    assert len(written) >= len(acknowledged) > 1
    await spool.close()


def test_a_record_never_gives_a_credit() -> None:
    for bad in (Decimal("-0.01"), Decimal("NaN")):
        with pytest.raises(ValueError, match="billed is"):
            an_operation(billed=bad)
        with pytest.raises(ValueError, match="cost is"):
            an_attempt(cost=bad)
    with pytest.raises(ValueError, match="input_cached is -1"):
        TokenClasses(input_cached=-1)
    with pytest.raises(ValueError, match="same number"):
        an_operation(attempts=[an_attempt(1), an_attempt(1)])


async def test_what_was_just_written_is_what_its_segment_says(tmp_path: Path) -> None:
    """The ledger gets it from memory while it keeps up, with what no database can store mended as on disk."""
    spool = Spool(tmp_path)
    for text in ("plain", "nul\0nul", "half \ud83d"):
        await spool.append(msgspec.structs.replace(an_operation(), requested_model=text, tags={"user": text}))
    segment = await spool.oldest()
    assert segment is not None
    assert await spool.read(segment) == frames.read(segment.read_bytes())
    assert (await spool.read(segment)).lines == spool.depth == 3
    await spool.close()


async def test_a_segment_with_a_failed_write_is_read_from_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spool = Spool(tmp_path)
    await spool.append(kept := an_operation())

    def fails(handle: int) -> None:
        raise OSError(errno.EIO, "broken")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fdatasync", fails)
        patch.setattr(os, "ftruncate", lambda handle, size: fails(handle))
        with pytest.raises(SpoolError):
            await spool.append(an_operation())
    await spool.append(later := an_operation())
    found = await everything(spool)
    assert found[0] == kept and found[-1] == later
    await spool.close()
