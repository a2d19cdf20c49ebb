"""An upstream's 200 while it is read: a whole reply, or the frames of a stream, piece by piece as they come."""

import asyncio
import itertools
from collections.abc import Iterable, Iterator

from gateway.upstreams.frames import Decoder, Frame, MalformedError
from gateway.upstreams.sse import BOM, EventReader
from gateway.upstreams.transport import Reply

EMPTY = "what it sent has no answer in it"


class ReportedError(Exception):
    """The upstream's own words for what went wrong, under a good status."""


class Answer:
    """Its headers are here. `begin` it, then take its `frame`, or its pieces."""

    __slots__ = ("_begun", "_reader", "decoder", "dropped", "frame", "reply")

    def __init__(self, reply: Reply, decoder: Decoder, dropped: tuple[str, ...] = ()) -> None:
        self.reply = reply
        self.decoder = decoder
        self.dropped = dropped
        """Parameters that were left out of the upstream's request because the route allows it."""
        self.frame: Frame | None = None
        """A whole reply, once it was read."""
        self._reader: EventReader | None = None
        self._begun: Iterable[Frame] | None = None

    async def read(self) -> None:
        """Read a whole reply. Raises BrokenError, MalformedError, or ReportedError where it is an error."""
        body = await self.reply.read()
        frame = self.frame = self.decoder.whole(body.removeprefix(BOM))
        if not frame.has_choices:
            raise MalformedError(EMPTY) if frame.error is None else ReportedError(frame.error)

    async def begin(self, seconds: float) -> None:
        """Wait for a stream's first frame, but no longer than that: it may take its time.

        Raises EventTooLargeError, and as `read` does where the stream ends without a frame or begins with an error.
        """
        first: Frame | None = None
        if self.reply.at_hand:  # most often it came with the headers, and needs no clock
            first = self._keep(await self.reply.chunk())
        if first is None:
            try:
                async with asyncio.timeout(seconds):
                    first = await self._first()
            except TimeoutError:
                return
        if first is None:
            raise MalformedError(EMPTY)
        if first.error is not None and not first.has_choices:
            raise ReportedError(first.error)

    async def piece(self) -> Iterable[Frame] | None:
        """The frames of what came next of a stream, to be decoded one by one; None at its end.

        Raises BrokenError; the frames raise EventTooLargeError and MalformedError.
        """
        if self._begun is not None:
            begun, self._begun = self._begun, None
            return begun
        chunk = await self.reply.chunk()
        return self._frames(chunk) if chunk else None

    async def _first(self) -> Frame | None:
        while not self.decoder.ended and (chunk := await self.reply.chunk()):
            if (first := self._keep(chunk)) is not None:
                return first
        return None

    def _keep(self, chunk: bytes) -> Frame | None:
        frames = self._frames(chunk)
        first = next(frames, None)
        if first is not None:
            self._begun = itertools.chain((first,), frames)
        return first

    def _frames(self, chunk: bytes) -> Iterator[Frame]:
        reader = self._reader = self._reader or EventReader()
        for name, data in reader.feed(chunk):
            yield from self.decoder.event(name, data)
