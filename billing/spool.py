"""Finished operations on local disk, durable before anyone is told, until the ledger has them.

A folder holds numbered append-only segments. One of them is written; `oldest` seals it when the ledger asks for more,
and `discard` deletes it once its records are committed. Concurrent appends share one fsync (group commit), on a thread
of the spool's own; a lone one is written at once where the disk is quick. A crash can leave an unfinished last line,
which nobody was told of; whatever else cannot be read is set aside in `unreadable.jsonl` and reported. What was written
last is also kept in memory: a ledger that keeps up need not read it again. Streams that a process before left open (see
`billing.in_flight`) get their rows when the folder is opened, after all that were finished: of two rows with one id the
first counts.

The folder also names its owner: `place`, made once with the folder, and a new `run` each time it is opened. One process
at a time may open it.
"""

import asyncio
import errno
import fcntl
import os
import re
import shutil
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple, NoReturn, TypeVar
from uuid import uuid4

import msgspec
import structlog

from billing.frames import Contents, count_lines, encode, read, written
from billing.in_flight import InFlight, Slot
from billing.records import OperationRecord
from billing.worker import Worker

SEGMENT_BYTES = 4 * 1024 * 1024
"""A segment that has reached this size is sealed."""

FREE_SECONDS = 1.0
"""How long a look at the room on the disk is good."""

PAUSE_SECONDS = 0.001
MOST_PAUSES = 5
"""From the begin of one fsync to the next at least a pause for each operation that it was for, up to so many: under
load more operations share one, and a lone one does not wait."""

LONE_SECONDS = 0.005
QUICK_SECONDS = 0.001
"""A record after so long without one is written by the event loop itself, if the latest fsync was so quick: to change
threads twice takes about as long as such a disk. Nothing else is served meanwhile, at most a sixth of the time."""

MOST_KEPT = 2
"""Sealed segments whose records stay in memory."""

UNREADABLE = "unreadable.jsonl"
_SEGMENT = re.compile(r"[0-9]{12,}\.segment")
_PLACE = re.compile(b"[0-9a-f]{32}")
_FULL = (errno.ENOSPC, errno.EDQUOT)

T = TypeVar("T")

log = structlog.get_logger(__name__)


class SpoolError(Exception):
    """The spool cannot be used; the message says why and what to do."""


class SpoolFullError(SpoolError):
    """The disk (or quota) under the spool is full. Nothing that was acknowledged is lost."""


Done = Callable[[Exception | None], None]


class _Waiting(NamedTuple):
    """A record that is not yet on disk."""

    line: bytes
    record: OperationRecord
    """As it will be read from the line."""
    slot: Slot | None
    done: Done


class Spool:
    """The spool in `folder`, made when it is not there. Blocking, so open it before serving.

    Raises SpoolError when the folder cannot be written or another process has it.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                os.close(self._lock)
                raise SpoolError(f"another process uses the spool {folder}; stop it or give each its own") from error
            self.replica = f"{_place(folder)}.{uuid4().hex}"
            self._sealed = _segments(folder)
            self._next = 1 + max((int(path.stem) for path in self._sealed), default=0)
            self._in_flight = InFlight(folder)
            self._finish_streams()
            self.depth = sum(count_lines(path.read_bytes()) for path in self._sealed)
            """Records that the ledger does not have yet."""
        except OSError as error:
            _raise(error, folder)
        self._segment: Path | None = None
        self._file = -1
        self._size = 0
        self._records: list[OperationRecord] = []
        """Those of the segment that is written."""
        self._kept: dict[Path, list[OperationRecord]] = {}
        """Sealed segments, with all that is in them: the first that the ledger will ask for."""
        self._waiting: list[_Waiting] = []
        self._is_writing = False
        self._idle: asyncio.Future[None] | None = None
        self._next_write = 0.0
        self._lone_from = 0.0
        """When the next record counts as a lone one. Both on the monotonic clock."""
        self._took = 0.0
        """Seconds, of the latest write and its fsync."""
        self._closed = False
        self._free = 0
        self._free_until = 0.0
        self._worker = Worker("spool")

    def free_bytes(self) -> int:
        """What is left on the disk under the spool, as of the last second."""
        now = time.monotonic()
        if now >= self._free_until:
            self._free = shutil.disk_usage(self.folder).free
            self._free_until = now + FREE_SECONDS
        return self._free

    def begin(self, record: OperationRecord) -> Slot:
        """Before a stream's first byte goes out: its row, should this process die before the stream's own is written.

        Raises SpoolError when there is no room.
        """
        try:
            return self._in_flight.begin(record)
        except OSError as error:
            _raise(error, self.folder)

    def write(self, record: OperationRecord, done: Done, slot: Slot | None = None) -> None:
        """Write `record`. `done` is called in the event loop, perhaps before this returns, whoever waits for it: with
        None once it is on disk, with SpoolFullError when the disk is full, SpoolError on any other failure of it; the
        record is then lost. Raises SpoolError after `close`.

        `slot`: of the stream whose row it is; it ends then.
        """
        if self._closed:
            raise SpoolError(f"the spool {self.folder} is closed: the process ends")
        self._waiting.append(_Waiting(*written(record), slot, done))
        if not self._is_writing:
            self._is_writing = True
            self._write_soon()

    def append(self, record: OperationRecord, slot: Slot | None = None) -> asyncio.Future[None]:
        """`write` as something to wait for. Who is cancelled while it waits leaves the record to be written."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.write(record, partial(_settle, future), slot)
        return future

    async def oldest(self) -> Path | None:
        """The segment to copy next, sealed: nothing is appended to it any more. None when all is copied."""
        return await self._on_thread(self._oldest)

    async def read(self, segment: Path) -> Contents:
        """What a sealed segment holds. Not on the spool's thread: appends need not wait for it."""
        if (records := self._kept.get(segment)) is not None:
            return Contents(len(records), records, [], 0)
        try:
            return await asyncio.to_thread(lambda: read(segment.read_bytes()))
        except OSError as error:
            _raise(error, self.folder)

    async def discard(self, segment: Path, contents: Contents, refused: list[tuple[str, bytes]]) -> None:
        """Delete a segment whose records are committed, once its unreadable lines and `refused` ones are set aside.

        `refused` is what the ledger could not store: (reason, line).
        """
        await self._on_thread(lambda: self._discard(segment, contents, refused))

    async def close(self) -> None:
        """Finish what waits, then let go of the folder."""
        self._closed = True
        if self._is_writing:
            self._idle = asyncio.get_running_loop().create_future()
            await self._idle
        await self._on_thread(self._seal)
        self._worker.close()
        self._in_flight.close()
        os.close(self._lock)

    def _write_soon(self) -> None:
        """Group commit: whatever came while the last batch was being written is the next batch."""
        pause = self._next_write - time.monotonic()
        if pause > 0:
            asyncio.get_running_loop().call_later(pause, self._write_waiting)
        else:
            self._write_waiting()

    def _write_waiting(self) -> None:
        batch, self._waiting = self._waiting, []
        now = time.monotonic()
        lone = now >= self._lone_from and len(batch) == 1 and self._took <= QUICK_SECONDS and self._worker.is_idle
        self._next_write = now + PAUSE_SECONDS * min(len(batch), MOST_PAUSES)
        if lone:
            failure: Exception | None = None
            try:
                self._write(batch)
            except Exception as error:
                failure = error
            self._wrote(batch, failure)
        else:
            self._worker.do(partial(self._write, batch), partial(self._wrote, batch))
            time.sleep(0)  # without the interpreter's lock: the disk begins now, not when this turn of the loop is over

    def _wrote(self, batch: list[_Waiting], failure: Exception | None) -> None:
        self._lone_from = time.monotonic() + LONE_SECONDS
        if isinstance(failure, OSError):
            failure = _named(failure, self.folder)
        for waiting in batch:
            if failure is None and waiting.slot is not None:
                waiting.slot.end()
            waiting.done(failure)
        if self._waiting:
            self._write_soon()
            return
        self._is_writing = False
        if self._idle is not None and not self._idle.done():
            self._idle.set_result(None)

    async def _on_thread(self, job: Callable[[], T]) -> T:
        try:
            return await self._worker.run(job)
        except OSError as error:
            _raise(error, self.folder)

    def _finish_streams(self) -> None:
        """Make a segment of the rows of streams that the process before left open."""
        if left := self._in_flight.left():
            path = self.folder / f"{self._next:012d}.segment"
            with path.open("xb") as file:
                file.write(b"".join(map(encode, left)))
                file.flush()
                os.fsync(file.fileno())
            _sync_folder(self.folder)
            self._sealed.append(path)
            self._next += 1
            log.warning("streams_of_a_killed_process", streams=len(left))
        self._in_flight.clear()

    # The rest runs on the spool's one thread, or while it is idle: one at a time touches the segments.

    def _write(self, batch: list[_Waiting]) -> None:
        began = time.monotonic()
        try:
            self._append(b"".join([waiting.line for waiting in batch]))
        finally:
            self._took = time.monotonic() - began
        self.depth += len(batch)
        self._records += [waiting.record for waiting in batch]
        if self._size >= SEGMENT_BYTES:
            self._seal()

    def _append(self, data: bytes) -> None:
        if self._segment is None:
            self._open()
        rest = memoryview(data)
        try:
            while rest:
                rest = rest[os.write(self._file, rest) :]
            os.fdatasync(self._file)
        except OSError:
            # Cut the half-written rest off and go on in a new segment: after a failed fsync the kernel may report
            # success for pages that it dropped. Where even this fails, a reader takes the rest for a torn tail.
            try:
                os.ftruncate(self._file, self._size)
            finally:
                self._seal()
            raise
        self._size += len(data)

    def _open(self) -> None:
        path = self.folder / f"{self._next:012d}.segment"
        self._next += 1  # also where there is a file of this name, which nobody here has made
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._segment, self._size = path, 0
        _sync_folder(self.folder)

    def _seal(self) -> None:
        if self._segment is not None:
            os.close(self._file)
            if self._size:
                self._sealed.append(self._segment)
                if len(self._kept) < MOST_KEPT:
                    self._kept[self._segment] = self._records
            else:  # a full disk would else leave one empty file for each failed append
                self._segment.unlink()
            self._segment = None
            self._records = []

    def _oldest(self) -> Path | None:
        if not self._sealed:
            self._seal()
        return self._sealed[0] if self._sealed else None

    def _discard(self, segment: Path, contents: Contents, refused: list[tuple[str, bytes]]) -> None:
        if contents.torn:
            log.warning("spool_torn_tail", segment=segment.name, bytes=contents.torn)
        if aside := contents.unreadable + refused:
            with (self.folder / UNREADABLE).open("ab") as file:
                for reason, line in aside:
                    log.error("spool_record_set_aside", segment=segment.name, reason=reason, file=UNREADABLE)
                    text = line.decode("utf-8", "backslashreplace")
                    file.write(msgspec.json.encode({"segment": segment.name, "reason": reason, "line": text}) + b"\n")
                file.flush()
                os.fsync(file.fileno())
        self._kept.pop(segment, None)
        segment.unlink()
        if aside:  # else a power cut may bring the segment back: it is copied again, and every row is there already
            _sync_folder(self.folder)
        self._sealed.remove(segment)
        self.depth -= contents.lines


def _settle(future: asyncio.Future[None], failure: Exception | None) -> None:
    if future.done():  # who waited has gone
        return
    if failure is None:
        future.set_result(None)
    else:
        future.set_exception(failure)


def _place(folder: Path) -> str:
    """The folder's own name among all spools, made once; one that cannot be read is made anew."""
    path = folder / "place"
    found = path.read_bytes().strip() if path.exists() else None
    if found is not None and _PLACE.fullmatch(found):
        return found.decode()
    place = uuid4().hex
    draft = folder / "place.new"
    with draft.open("wb") as file:
        file.write(place.encode())
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)
    _sync_folder(folder)
    if found is not None:
        log.error(
            "spool_place_replaced",
            found=found[:64].decode("utf-8", "backslashreplace"),
            new=place,
            consequence="what earlier processes on this spool had leased is not freed by itself; rows of the table"
            " `lease` with another replica than a running one's are theirs",
        )
    return place


def _segments(folder: Path) -> list[Path]:
    """Our segments, oldest first. A file that only ends like one is somebody else's and stays as it is."""
    found = sorted(folder.glob("*.segment"))
    ours = [path for path in found if _SEGMENT.fullmatch(path.name)]
    if len(ours) < len(found):
        foreign = [path.name for path in found if path not in ours]
        log.warning("spool_foreign_files", folder=str(folder), files=foreign, what="left alone and not copied")
    return ours


def _sync_folder(folder: Path) -> None:
    """Make a new or deleted name in the folder survive a power cut."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _named(error: OSError, folder: Path) -> SpoolError:
    if error.errno in _FULL:
        return SpoolFullError(f"the disk under the spool {folder} is full; free some space")
    return SpoolError(f"the spool {folder} cannot be used: {error.strerror}; make it writable or choose another")


def _raise(error: OSError, folder: Path) -> NoReturn:
    raise _named(error, folder) from error
