"""Keeps the parts running: starts them in order, restarts what dies, stops all of them in reverse order."""

import contextlib
import signal
import time
from collections.abc import Callable, Iterator
from types import FrameType

from gateway.postgres import PostgresFailedError
from gateway.processes import STOP_SIGNALS, Child

LONGEST_DELAY = 30.0
STEADY_SECONDS = 60.0
"""A part that ran this long before it died is restarted at once; one that keeps dying waits longer each time."""


class StopRequested(BaseException):
    """Somebody pressed Ctrl-C or sent SIGTERM."""


class PartDiedError(RuntimeError):
    """A part stopped before it was ready; the message ends with the tail of its log."""


class Supervisor:
    """Owns the children of one `farthing up`. Use it from the main thread (see `die_with_parent`)."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._children: list[Child] = []
        self._stopping = False
        self._hurry = False

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Inside, a stop signal raises StopRequested; on the way out, however, every child is stopped.

        While they stop, a second signal kills what is still there.
        """
        before = {number: signal.signal(number, self._on_signal) for number in STOP_SIGNALS}
        try:
            yield
        finally:
            self._stopping = True
            if self._children:
                self._say("stopping: answers in progress may finish; a second Ctrl-C ends them")
            for child in reversed(self._children):
                child.stop(lambda: self._hurry)
            for number, handler in before.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._stopping:
            self._hurry = True
            return
        self._stopping = True
        raise StopRequested

    def _still_wanted(self) -> None:
        """Raises StopRequested again where it was lost: what is raised while an object is finalised goes nowhere."""
        if self._stopping:
            raise StopRequested

    def start(self, child: Child) -> None:
        self._children.append(child)
        child.start()

    def wait_until(self, ready: Callable[[], bool]) -> None:
        """Return once `ready()` is true. Raises PartDiedError when any child stops before that."""
        while not ready():
            self._still_wanted()
            for child in self._children:
                code = child.exit_code()
                if code is not None:
                    raise PartDiedError(
                        f"{child.name} stopped while starting ({ending(code)}). The end of its log, {child.log}:\n"
                        f"{child.last_lines()}"
                    )
            time.sleep(0.1)

    def watch(self) -> None:
        """Restart whatever dies, for ever (a stop signal ends this)."""
        started = dict.fromkeys(self._children, time.monotonic())
        failures = dict.fromkeys(self._children, 0)
        retry_at: dict[Child, float] = {}
        while True:
            self._still_wanted()
            for child in self._children:
                code = child.exit_code()
                if code is None:
                    continue
                now = time.monotonic()
                if child not in retry_at:
                    failures[child] = 0 if now - started[child] > STEADY_SECONDS else failures[child] + 1
                    delay = restart_delay(failures[child])
                    self._say(
                        f"{child.name} stopped ({ending(code)}); starting it again in {delay:g} s, log: {child.log}"
                    )
                    retry_at[child] = now + delay
                if now >= retry_at[child]:
                    del retry_at[child]
                    started[child] = now
                    with contextlib.suppress(PostgresFailedError):  # in its log; exit_code() brings us back here
                        child.start()
            time.sleep(0.1)


def restart_delay(failures: int) -> float:
    """Seconds to wait before restart number `failures` in a row: 0, 0.5, 1, 2, … and no more than LONGEST_DELAY."""
    return min(LONGEST_DELAY, 0.25 * 2**failures) if failures else 0.0


def ending(code: int) -> str:
    """An exit code in words."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"
