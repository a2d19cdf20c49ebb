"""Streams that have begun and have no row yet, in a mapped file: what a process writes there outlives its kill -9.

Before its first byte goes out a stream gets a slot with the row that it would have if the process died now; how much
the caller was sent is counted there. Its end frees the slot, once the row itself is on disk. Whoever opens the folder
next finds the slots that were not freed. Nothing here waits for the disk: the pages are the kernel's, so they survive
the process, though not a power cut.
"""

import mmap
import os
import struct
import time
import zlib
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import structlog

from billing.records import AttemptRecord, OperationRecord

FILE = "in_flight"
SLOT_BYTES = 16 * 1024
SLOTS = 256
"""To begin with; they double when all are taken."""
CHARACTERS_PER_TOKEN = 4

_HEAD = struct.Struct("<II")
"""Length of the record, 0 in a free slot; its CRC-32."""
_SENT = struct.Struct("<Qd")
"""Characters that the caller was sent; when, in seconds since 1970."""
_START = _HEAD.size + _SENT.size
_DECODER = msgspec.json.Decoder(OperationRecord)

log = structlog.get_logger(__name__)


class Slot:
    """One stream's place. Its methods take less than a microsecond."""

    __slots__ = ("_at", "_owner")

    def __init__(self, owner: "InFlight", at: int) -> None:
        self._owner = owner
        self._at = at

    def sent(self, characters: int) -> None:
        """The caller has been sent so many, or is about to be."""
        _SENT.pack_into(self._owner.map, self._at + _HEAD.size, characters, time.time())

    def end(self) -> None:
        """Its row is on disk."""
        self._owner.free(self._at)


class InFlight:
    """The slots in `folder`. Open it under the spool's lock. Raises OSError when the disk is full or cannot be used."""

    def __init__(self, folder: Path) -> None:
        self._file = os.open(folder / FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        size = max(os.fstat(self._file).st_size // SLOT_BYTES, SLOTS) * SLOT_BYTES
        # A page that has no room on the disk would end the process when it is written.
        os.posix_fallocate(self._file, 0, size)
        self.map = mmap.mmap(self._file, size)
        self._free = list(range(0, size, SLOT_BYTES))

    def left(self) -> list[OperationRecord]:
        """The rows of streams that a process before has left open."""
        found = []
        for at in range(0, len(self.map), SLOT_BYTES):
            length, checksum = _HEAD.unpack_from(self.map, at)
            if length:
                data = self.map[at + _START : at + _START + length]
                if zlib.crc32(data) == checksum:
                    found.append(_killed(_DECODER.decode(data), *_SENT.unpack_from(self.map, at + _HEAD.size)))
                else:  # killed before the slot was whole, so before a byte was sent
                    log.warning("torn_stream_slot", slot=at // SLOT_BYTES)
        return found

    def clear(self) -> None:
        """Free all slots."""
        for at in range(0, len(self.map), SLOT_BYTES):
            _HEAD.pack_into(self.map, at, 0, 0)

    def begin(self, record: OperationRecord) -> Slot:
        """A slot for a stream; `record` is its row if the process died now, its last attempt the one that answers.

        Raises OSError when there is no room for more slots.
        """
        data = _fitting(record)
        if not self._free:
            self._grow()
        at = self._free.pop()
        _SENT.pack_into(self.map, at + _HEAD.size, 0, time.time())
        self.map[at + _START : at + _START + len(data)] = data
        _HEAD.pack_into(self.map, at, len(data), zlib.crc32(data))
        return Slot(self, at)

    def free(self, at: int) -> None:
        _HEAD.pack_into(self.map, at, 0, 0)
        self._free.append(at)

    def close(self) -> None:
        self.map.close()
        os.close(self._file)

    def _grow(self) -> None:
        size = len(self.map)
        os.posix_fallocate(self._file, size, size)
        self.map.resize(2 * size)
        self._free = list(range(size, 2 * size, SLOT_BYTES))


def _fitting(record: OperationRecord) -> bytes:
    """The record as a slot holds it, without what makes it too long. It is charged nothing: budgets need not know."""
    data = msgspec.json.encode(record)
    for less in ({"tags": {}, "route_reasons": [], "requested_model": ""}, {"attempts": record.attempts[-1:]}):
        if len(data) > SLOT_BYTES - _START:
            record = msgspec.structs.replace(record, charges=[], **less)
            data = msgspec.json.encode(record)
    return data


def _killed(record: OperationRecord, characters: int, at: float) -> OperationRecord:
    """The row of a stream as its slot tells it: what was sent is estimated, and nobody pays for it."""
    *earlier, last = record.attempts
    seconds = max((datetime.fromtimestamp(at, UTC) - record.started_at).total_seconds(), 0.0)
    began = max((last.started_at - record.started_at).total_seconds(), 0.0)
    return msgspec.structs.replace(
        record, total_seconds=seconds, attempts=[*earlier, _cut(last, characters, max(seconds - began, 0.0))]
    )


def _cut(attempt: AttemptRecord, characters: int, seconds: float) -> AttemptRecord:
    output = -(-characters // CHARACTERS_PER_TOKEN)
    tokens = msgspec.structs.replace(attempt.tokens, output_text=output)
    return msgspec.structs.replace(attempt, tokens=tokens, total_seconds=seconds)
