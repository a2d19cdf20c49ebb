"""Ending a running answer from outside: first the generation is called back, so that its account still comes."""

import asyncio
import time

from gateway.operation import Operation

ABORT_RETRY_SECONDS = 0.05
LOOK_SECONDS = 0.25


class Recall:
    """Of the request that the current task serves. Nothing happens before `start`, or `watch` when it takes too long.

    An engine is asked to end the generation; the task goes on reading its account, for at most `seconds`. Where nothing
    can be called back, or the account does not come, the task is cancelled: `cancelled` tells its handler by whom.
    """

    def __init__(self, operation: Operation, seconds: float) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._serving = task
        self._operation = operation
        self._seconds = seconds
        self._running: asyncio.Task[None] | None = None
        self._look_again: asyncio.TimerHandle | None = None
        self.cancelled = False

    def start(self) -> None:
        """The caller has left."""
        if self._running is None:
            self._running = asyncio.create_task(self._run())

    def watch(self) -> None:
        """Call back a whole answer of an engine that takes longer than it may: its connection, closed by a timeout,
        would take the account along."""
        self._look_again = asyncio.get_running_loop().call_later(LOOK_SECONDS, self._look)

    def close(self) -> None:
        """The answer is over: nothing is ended any more."""
        if self._running is not None:
            self._running.cancel()
        if self._look_again is not None:
            self._look_again.cancel()

    def uncancel(self) -> None:
        """The task goes on, after it was cancelled from here."""
        self._serving.uncancel()

    def _look(self) -> None:
        flight, left = self._operation.flight, LOOK_SECONDS
        if flight is not None and flight.upstream.is_engine and self._operation.attempts:
            attempt = self._operation.attempts[-1]
            left = attempt.started + flight.upstream.settings.first_byte_seconds - time.monotonic()
            if left <= 0:
                attempt.overdue = True
                self.start()
                return
        self._look_again = asyncio.get_running_loop().call_later(max(left, ABORT_RETRY_SECONDS), self._look)

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
