"""Asking a second upstream when the first is slow to begin: the first answer counts, the other is called back."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

from gateway.attempts import Asking, Opened, Started
from gateway.failures import NoAnswerError
from gateway.upstreams.frames import MalformedError
from gateway.upstreams.sse import EventTooLargeError
from gateway.upstreams.target import Target
from gateway.upstreams.transport import BrokenError

ACCOUNT_SECONDS = 3.0
"""How long an aborted engine's account of the slower attempt is awaited."""
LOST = "another upstream answered first"

_called_back: set[asyncio.Task[None]] = set()
"""Tasks that nobody awaits, kept from being collected while they run."""


class Racer:
    """One of two requests that run at the same time."""

    def __init__(self, asking: Asking, target: Target) -> None:
        self.started: Started = asking.start(target)
        self.task: asyncio.Task[Opened] = asyncio.create_task(self._run(asking))
        self._begun = False

    async def _run(self, asking: Asking) -> Opened:
        self._begun = True
        return await asking.finish(self.started)

    def cancel(self, asking: Asking) -> None:
        self.task.cancel()
        if not self._begun:  # then it never will, and gives nothing back
            asking.abandon(self.started)

    @property
    def failure(self) -> BaseException | None:
        return self.task.exception() if self.task.done() and not self.task.cancelled() else None


async def first_answer(
    asking: Asking, target: Target, after: float, other: Callable[[], Awaitable[Target | None]]
) -> Opened:
    """`target`'s answer, or that of `other()` when it begins earlier; `other` is asked after so many seconds.

    Raises NoAnswerError when neither answers.
    """
    racers = [Racer(asking, target)]
    try:
        await asyncio.wait({racers[0].task}, timeout=after)
        if not racers[0].task.done() and (second := await other()) is not None:
            with contextlib.suppress(NoAnswerError):  # it cannot honour this request
                racers.append(Racer(asking, second))
        winner = await _first(racers)
    except BaseException:
        for racer in racers:
            _drop(racer, asking)
        raise
    for racer in racers:
        if racer is not winner and racer.failure is None:
            racer.started.attempt.billable = False
            racer.started.attempt.end("client_closed", LOST)
            _in_background(_call_back(racer, asking.is_stream))
    operation = asking.operation
    operation.attempts.remove(winner.started.attempt)
    operation.attempts.append(winner.started.attempt)
    operation.flight = winner.started.flight
    return winner.task.result()


async def _first(racers: Sequence[Racer]) -> Racer:
    """Who answers first. Raises NoAnswerError at once when one says that the request itself is wrong."""
    pending = {racer.task for racer in racers}
    while pending:
        _, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
        for racer in racers:
            if racer.task.done() and racer.failure is None:
                return racer
            if isinstance(racer.failure, NoAnswerError) and not racer.failure.falls_back:
                raise racer.failure
    raise racers[-1].failure or AssertionError("no task is left")


def _drop(racer: Racer, asking: Asking) -> None:
    """Nobody waits for an answer any more. What becomes of the last attempt is said by who knows why."""
    attempt, last = racer.started.attempt, asking.operation.attempts[-1:]
    if not racer.task.done():
        racer.cancel(asking)
    elif racer.failure is None and not racer.task.cancelled():
        _in_background(_give_back(racer.task.result()))
    if attempt not in last:  # the caller pays for one at most
        attempt.billable = False
        if attempt.ended is None:
            attempt.end("client_closed")


def _in_background(work: Coroutine[Any, Any, None]) -> None:
    task = asyncio.create_task(work)
    _called_back.add(task)
    task.add_done_callback(_called_back.discard)


async def _call_back(racer: Racer, stream: bool) -> None:
    """End the slower request. An engine is asked to, and says what it has computed; elsewhere the connection ends."""
    flight = racer.started.flight
    if not (flight.upstream.is_engine and await flight.abort()):
        racer.task.cancel()
    with contextlib.suppress(NoAnswerError, asyncio.CancelledError, TimeoutError):
        opened = await asyncio.wait_for(racer.task, ACCOUNT_SECONDS)
        try:
            if stream:
                with contextlib.suppress(BrokenError, MalformedError, EventTooLargeError):
                    async with asyncio.timeout(ACCOUNT_SECONDS):
                        await _read_account(opened)
        finally:
            await _give_back(opened)


async def _read_account(opened: Opened) -> None:
    while (piece := await opened.answer.piece()) is not None:
        for frame in piece:
            opened.attempt.saw(frame)


async def _give_back(opened: Opened) -> None:
    opened.flight.target.leave()
    await opened.answer.reply.close()
