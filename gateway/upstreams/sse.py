"""Server-sent events, as far as upstreams use them: the name and the payload of each."""

from collections.abc import Iterator
from typing import NamedTuple

MAX_EVENT_BYTES = 16 * 1024 * 1024
BOM = b"\xef\xbb\xbf"
"""A byte order mark, which may stand at the very start and is no part of the first line."""


class EventTooLargeError(Exception):
    """One event of an upstream's stream is larger than MAX_EVENT_BYTES."""

    def __init__(self) -> None:
        super().__init__("it sent an event that is too large")


class Event(NamedTuple):
    name: bytes | None
    data: bytes


class EventReader:
    """Cuts a stream into events, however its bytes come; comments, ids and retry lines are left out.

    Works on bytes and cuts only at line ends, so a character that was split between chunks is never decoded in halves.
    An event that the stream's end cuts off is dropped.
    """

    def __init__(self) -> None:
        self._start: bytes | None = b""
        """What came so far, while that may be the first bytes of a BOM."""
        self._pending = bytearray()
        self._name: bytes | None = None
        self._data: list[bytes] = []
        self._size = 0

    def feed(self, chunk: bytes) -> Iterator[Event]:
        """Events that this chunk completes. Raises EventTooLargeError."""
        if self._start is not None:
            chunk = self._start + chunk
            if len(chunk) < len(BOM) and BOM.startswith(chunk):
                self._start = chunk
                return
            self._start = None
            chunk = chunk.removeprefix(BOM)
        if not self._pending and not self._data and chunk.endswith(b"\n\n") and b"\r" not in chunk:
            lines = chunk[:-1].split(b"\n")  # the usual case: whole events, and nothing to keep
        else:
            self._pending += chunk
            if b"\n" not in chunk:
                if len(self._pending) > MAX_EVENT_BYTES:
                    raise EventTooLargeError
                return
            *lines, rest = bytes(self._pending).split(b"\n")
            self._pending = bytearray(rest)
        for raw in lines:
            line = raw.removesuffix(b"\r")
            if not line:
                if self._data:
                    yield Event(self._name, self._data[0] if len(self._data) == 1 else b"\n".join(self._data))
                    self._data, self._size = [], 0
                self._name = None
            elif line.startswith(b"data:"):
                self._size += len(line)
                if self._size > MAX_EVENT_BYTES:
                    raise EventTooLargeError
                self._data.append(line[5:].removeprefix(b" "))
            elif line.startswith(b"event:"):
                self._name = line[6:].removeprefix(b" ")
