"""Ending a running answer from outside: first the generation is called back, so that its account still comes."""

import asyncio
import time

from gateway.operation import Operation
from gateway.rounds import Rounds

ABORT_RETRY_SECONDS = 0.05
LOOK_SECONDS = 0.1
"""Between two looks at the answers that take too long."""


class Recall:
    """Of a request that a task serves. Nothing happens before `start`, or `watch` when it takes too long.

    An engine is asked to end the generation; the task goes on reading its account, for at most `seconds`. Where nothing
    can be called back, or the account does not come, the task is cancelled: `cancelled` tells its handler by whom.
    """

    def __init__(self, operation: Operation, seconds: float, rounds: Rounds["Recall"]) -> None:
        assert operation.serving is not None
        self._serving = operation.serving
        self._operation = operation
        self._seconds = seconds
        self._rounds = rounds
        self._running: asyncio.Task[None] | None = None
        self.cancelled = False

    def start(self) -> None:
        """The caller has left."""
        if self._running is None:
            self._running = asyncio.create_task(self._run())

    def watch(self) -> None:
        """Call back a whole answer of an engine that takes longer than it may: its connection, closed by a timeout,
        would take the account along."""
        self._rounds.add(self)

    def close(self) -> None:
        """The answer is over: nothing is ended any more."""
        if self._running is not None:
            self._running.cancel()
        self._rounds.discard(self)

    def uncancel(self) -> None:
        """The task goes on, after it was cancelled from here."""
        self._serving.uncancel()

    def look(self, now: float) -> None:
        flight = self._operation.flight
        if flight is not None and flight.upstream.is_engine and self._operation.attempts:
            attempt = self._operation.attempts[-1]
            if now >= attempt.started + flight.upstream.settings.first_byte_seconds:
                attempt.overdue = True
                self._rounds.discard(self)
                self.start()

    async def _run(self) -> None:
        deadline = time.monotonic() + self._seconds
        while (flight := self._operation.flight) is not None and time.monotonic() < deadline:
            if await flight.abort():
                await asyncio.sleep(deadline - time.monotonic())
            elif flight.upstream.is_engine and not self._operation.attempts[-1].overdue:
                await asyncio.sleep(ABORT_RETRY_SECONDS)  # it may not have read the request yet
            else:
                break
        self.cancelled = True
        self._serving.cancel()
