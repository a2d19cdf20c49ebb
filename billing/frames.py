"""How a record lies in the spool: one line, `CRC32 LENGTH JSON`, checksum and length of the JSON's bytes."""

import zlib
from typing import Any, NamedTuple

import msgspec

from billing.records import OperationRecord

_ENCODER = msgspec.json.Encoder()
_DECODER = msgspec.json.Decoder(OperationRecord)


class FrameError(ValueError):
    """A line is not what was written; the message says in which way."""


class Contents(NamedTuple):
    """What a segment file holds."""

    lines: int
    """How many lines, whatever is in them (see `count_lines`)."""
    records: list[OperationRecord]
    unreadable: list[tuple[str, bytes]]
    """(reason, line) of whole lines that cannot be read."""
    torn: int
    """Bytes of an unfinished last line, cut off by a crash before anyone was told that it was written."""


def encode(record: OperationRecord) -> bytes:
    """The record as a line. JSON escapes line breaks, so a line break always ends a frame.

    PostgreSQL stores neither NUL nor lone surrogates in text: each becomes U+FFFD here, so that no text loses a row.
    """
    return written(record)[0]


def written(record: OperationRecord) -> tuple[bytes, OperationRecord]:
    """The line of `encode`, and the record as it will be read from it."""
    try:
        payload = _ENCODER.encode(record)
    except UnicodeEncodeError:
        payload = b""
    if not payload or (b"\\" in payload and b"\\u0000" in payload):  # most have not even a backslash
        payload = msgspec.json.encode(_storable(msgspec.to_builtins(record)))
        record = _DECODER.decode(payload)
    return b"%08x %d %b\n" % (zlib.crc32(payload), len(payload), payload), record


def decode(line: bytes) -> OperationRecord:
    """The record of one line, without its line break. Raises FrameError."""
    head, _, rest = line.partition(b" ")
    length, _, payload = rest.partition(b" ")
    if length != b"%d" % len(payload):
        raise FrameError("the length differs")
    if head != b"%08x" % zlib.crc32(payload):
        raise FrameError("the checksum differs")
    try:
        return _DECODER.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise FrameError(f"not an operation: {error}") from error


def count_lines(data: bytes) -> int:
    """Lines in a segment's bytes, an unfinished last one included."""
    return data.count(b"\n") + (not data.endswith(b"\n") and data != b"")


def read(data: bytes) -> Contents:
    """Everything readable in a segment's bytes, in order; a bad line never hides the rest."""
    records: list[OperationRecord] = []
    unreadable: list[tuple[str, bytes]] = []
    *lines, tail = data.split(b"\n")
    for line in lines:
        try:
            records.append(decode(line))
        except FrameError as error:
            unreadable.append((str(error), line))
    try:  # only the line break may be missing
        if tail:
            records.append(decode(tail))
            tail = b""
    except FrameError:
        pass
    return Contents(count_lines(data), records, unreadable, len(tail))


def _storable(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode().replace("\x00", "\ufffd")
    if isinstance(value, list):
        return [_storable(item) for item in value]
    if isinstance(value, dict):
        return {_storable(key): _storable(item) for key, item in value.items()}
    return value
