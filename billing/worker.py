"""One thread that does jobs in their order, and tells the event loop of each when it is done.

A `ThreadPoolExecutor` does the same and costs three times as much: two futures and two locks for each job.
"""

import asyncio
import contextlib
import threading
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from typing import TypeVar

T = TypeVar("T")


class Worker:
    """`do` and `run` are for an event loop; jobs that it has are done also when nobody waits for them any more."""

    def __init__(self, name: str) -> None:
        self._unfinished = 0
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    def do(self, job: Callable[[], T], done: Callable[[T | Exception], None]) -> None:
        """Run `job` on the thread, then `done` in the event loop with what it returned or raised."""
        self._unfinished += 1
        self._jobs.put(partial(_do, job, partial(self._finish, done), asyncio.get_running_loop()))

    @property
    def is_idle(self) -> bool:
        """Whether the thread has nothing to do: a job that is done at once, without it, is done in its order."""
        return not self._unfinished

    async def run(self, job: Callable[[], T]) -> T:
        """What `job` returns, or raises, on the thread."""
        found: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self.do(job, partial(_settle, found))
        return await found

    def close(self) -> None:
        """Return when all jobs are done; blocking."""
        self._jobs.put(None)
        self._thread.join()

    def _finish(self, done: Callable[[T | Exception], None], found: T | Exception) -> None:
        self._unfinished -= 1
        done(found)

    def _serve(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()


def _do(job: Callable[[], T], done: Callable[[T | Exception], None], loop: asyncio.AbstractEventLoop) -> None:
    found: T | Exception
    try:
        found = job()
    except Exception as error:
        found = error
    with contextlib.suppress(RuntimeError):  # the loop has ended
        loop.call_soon_threadsafe(done, found)


def _settle(future: "asyncio.Future[T]", found: T | Exception) -> None:
    if future.done():  # cancelled
        return
    if isinstance(found, Exception):
        future.set_exception(found)
    else:
        future.set_result(found)
