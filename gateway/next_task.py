"""A task made beforehand, while nobody waits for it: to make one takes longer than to wake it."""

import asyncio
import contextvars
from collections.abc import Callable, Coroutine
from typing import Any

Work = Callable[[], Coroutine[Any, Any, None]]


class NextTask:
    """The task of a connection's next request. It runs in the context in which this is made, whoever prepares it."""

    __slots__ = ("_context", "_is_over", "_task", "_work")

    def __init__(self) -> None:
        self._context = contextvars.copy_context()
        self._is_over = False
        self._task: asyncio.Task[None] | None = None
        self._work: asyncio.Future[Work] | None = None

    def prepare(self) -> None:
        """Make it once what has to be done now is done."""
        if self._task is None:
            asyncio.get_running_loop().call_soon(self._make, context=self._context)

    def begin(self, work: Work) -> asyncio.Task[None]:
        """The task, which does `work` from now on."""
        if self._task is None:
            self._context.run(self._make)
        task, coming = self._task, self._work
        self._task = self._work = None  # what is done knows the connection, which knows us
        assert task is not None and coming is not None
        coming.set_result(work)
        return task

    def cancel(self) -> None:
        """Nothing comes any more."""
        self._is_over = True
        if self._task is not None:
            self._task.cancel()
        self._task = self._work = None

    def _make(self) -> None:
        if self._task is None and not self._is_over:
            loop = asyncio.get_running_loop()
            self._work = loop.create_future()
            self._task = loop.create_task(_do(self._work))


async def _do(coming: asyncio.Future[Work]) -> None:
    work = await coming
    await work()
