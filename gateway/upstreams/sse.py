"""Server-sent events, as far as chat streams use them: the payloads of `data:` lines."""

from collections.abc import AsyncIterator

MAX_EVENT_BYTES = 16 * 1024 * 1024


class EventTooLargeError(Exception):
    """One event of an upstream's stream is larger than MAX_EVENT_BYTES."""


async def events(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Payload of each event, whole, however the bytes were cut; comments, ids and retry lines are left out.

    Works on bytes and cuts only at line ends, so a character that was split between chunks is never decoded in halves.
    An event that the stream's end cuts off is dropped.
    """
    pending = bytearray()
    data: list[bytes] = []
    size = 0
    async for chunk in chunks:
        pending += chunk
        if b"\n" not in chunk:
            if len(pending) > MAX_EVENT_BYTES:
                raise EventTooLargeError
            continue
        *lines, rest = bytes(pending).split(b"\n")
        pending = bytearray(rest)
        for raw in lines:
            line = raw.removesuffix(b"\r")
            if line.startswith(b"data:"):
                size += len(line)
                if size > MAX_EVENT_BYTES:
                    raise EventTooLargeError
                data.append(line[5:].removeprefix(b" "))
            elif not line and data:
                yield b"\n".join(data)
                data, size = [], 0
