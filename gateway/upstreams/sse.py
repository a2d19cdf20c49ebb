"""Server-sent events, as far as upstreams use them: the name and the payload of each."""

from collections.abc import Iterable, Iterator

MAX_EVENT_BYTES = 16 * 1024 * 1024
BOM = b"\xef\xbb\xbf"
"""A byte order mark, which may stand at the very start and is no part of the first line."""


class EventTooLargeError(Exception):
    """One event of an upstream's stream is larger than MAX_EVENT_BYTES."""

    def __init__(self) -> None:
        super().__init__("it sent an event that is too large")


Event = tuple[bytes | None, bytes]
"""Its name, where it has one, and its payload in one line: JSON has line breaks between its values only, so that a
space stands for one as well."""


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

    def feed(self, chunk: bytes) -> Iterable[Event]:
        """Events that this chunk completes; take them before the next. Both raise EventTooLargeError."""
        if self._start is not None:
            chunk = self._start + chunk
            if len(chunk) < len(BOM) and BOM.startswith(chunk):
                self._start = chunk
                return ()
            self._start = None
            chunk = chunk.removeprefix(BOM)
        if not (self._pending or self._data or self._name) and (payloads := _payloads(chunk)):
            return [(None, payload) for payload in payloads]
        self._pending += chunk
        if b"\n" not in chunk:
            if len(self._pending) > MAX_EVENT_BYTES:
                raise EventTooLargeError
            return ()
        *lines, rest = bytes(self._pending).split(b"\n")
        self._pending = bytearray(rest)
        return self._events(lines)

    def _events(self, lines: list[bytes]) -> Iterator[Event]:
        for raw in lines:
            line = raw.removesuffix(b"\r")
            if not line:
                if self._data:
                    yield self._name, b" ".join(self._data).replace(b"\r", b" ")
                    self._data, self._size = [], 0
                self._name = None
            elif line.startswith(b"data:"):
                self._size += len(line)
                if self._size > MAX_EVENT_BYTES:
                    raise EventTooLargeError
                self._data.append(line[5:].removeprefix(b" "))
            elif line.startswith(b"event:"):
                self._name = line[6:].removeprefix(b" ")


def _payloads(chunk: bytes) -> list[bytes] | None:
    """Of a chunk that has nothing but whole events of one line each, as most have: a model's token, or some."""
    if not (chunk.startswith(b"data: ") and chunk.endswith(b"\n\n")) or b"\r" in chunk or len(chunk) > MAX_EVENT_BYTES:
        return None
    payloads = chunk[6:-2].split(b"\n\ndata: ")
    return payloads if chunk.count(b"\n") == 2 * len(payloads) else None
