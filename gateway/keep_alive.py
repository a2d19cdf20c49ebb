"""Comments to callers whose upstream is silent, so that nothing between them and us takes the stream for dead."""

import asyncio
import contextlib
import time
from collections.abc import Iterator
from typing import NoReturn

import structlog

from gateway.exchange import Exchange

COMMENT = b": keep-alive\n\n"
"""Without `id:`: a browser's EventSource would send an id back and ask for the rest."""
LOOKS = 4
"""Looks at the open streams within the silence that is allowed."""

log = structlog.get_logger()


class KeepAlive:
    """One task for all open streams. `seconds`: the longest silence."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._open: set[Exchange] = set()
        self._sending: set[asyncio.Task[None]] = set()

    @contextlib.contextmanager
    def watching(self, exchange: Exchange) -> Iterator[None]:
        """While in this block a started stream gets its comments."""
        self._open.add(exchange)
        try:
            yield
        finally:
            self._open.discard(exchange)

    async def run(self) -> NoReturn:
        while True:
            await asyncio.sleep(self._seconds / LOOKS)
            silent_since = time.monotonic() - self._seconds * (LOOKS - 1) / LOOKS
            for exchange in tuple(self._open):
                if exchange.idle_since(silent_since):
                    self._send(exchange)

    def _send(self, exchange: Exchange) -> None:
        """In a task of its own: a caller that does not read holds up nobody else's comment."""
        task = asyncio.create_task(_comment(exchange))
        self._sending.add(task)
        task.add_done_callback(self._sent)

    def _sent(self, task: asyncio.Task[None]) -> None:
        self._sending.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.debug("keep-alive not sent", reason=repr(error))


async def _comment(exchange: Exchange) -> None:
    if not exchange.complete:
        await exchange.write(COMMENT)
