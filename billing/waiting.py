"""Calls that wait until the database has been asked."""

import asyncio
import time
from collections.abc import Callable
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Waiting(Generic[T]):
    """A call that waits until `attempt` has an answer (None: not yet). What it raises is the answer too."""

    __slots__ = ("attempt", "deadline", "future", "since")

    def __init__(self, attempt: "Callable[[Waiting[T]], T | None]") -> None:
        self.attempt = attempt
        self.future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self.since = time.monotonic()
        self.deadline: float | None = None
        """Until then other replicas are waited for; None: nobody was asked."""


class Waiters:
    """All that wait, and the one who serves them, who sleeps until there is something to do."""

    def __init__(self) -> None:
        self._all: list[Waiting[Any]] = []
        self.woken = asyncio.Event()

    def __len__(self) -> int:
        return len(self._all)

    @property
    def hurried(self) -> bool:
        """Whether one of them waits for nothing but the next round."""
        return any(waiting.deadline is None for waiting in self._all)

    def add(self, attempt: "Callable[[Waiting[T]], T | None]") -> "asyncio.Future[T]":
        waiting = Waiting(attempt)
        self._all.append(waiting)
        self.woken.set()
        return waiting.future

    def wake(self) -> None:
        """Something was given back: whoever waits may have it."""
        if self._all:
            self.woken.set()

    def serve(self) -> None:
        """Try for everybody who waits, in the order that they came."""
        for waiting in self._all:
            if waiting.future.done():
                continue
            try:
                found = waiting.attempt(waiting)
            except Exception as error:
                waiting.future.set_exception(error)
            else:
                if found is not None:
                    waiting.future.set_result(found)
        self._all = [waiting for waiting in self._all if not waiting.future.done()]

    def fail(self, error: Exception) -> None:
        """None of them gets anything but this error."""
        for waiting in self._all:
            if not waiting.future.done():
                waiting.future.set_exception(error)
        self._all = []

    def cancel(self) -> None:
        for waiting in self._all:
            waiting.future.cancel()
