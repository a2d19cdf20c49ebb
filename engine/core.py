"""The step loop: one thread that serves every model on the device, in turn.

The front talks to it through a queue of commands, and hears from it one message a step, however many requests the step
served.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TypeVar

import torch

from engine.accounting import Clock
from engine.generation import Event, Generation
from engine.hosted import HostedModel
from engine.sequence import FinishReason

T = TypeVar("T")
log = logging.getLogger("engine")

IDLE_TICK = 1.0
"""Seconds after which an idle loop brings its idle account up to date."""


class EngineCore:
    """`deliver(events)` is called on the loop's thread after each step that has news; it must not block."""

    def __init__(self, models: Sequence[HostedModel], deliver: Callable[[list[Event]], None]) -> None:
        self.models = {model.name: model for model in models}
        self.clock = Clock(time.monotonic())
        self._deliver = deliver
        self._commands: deque[Callable[[], list[Event]]] = deque()
        self._wake = threading.Event()
        self._lock = threading.Lock()  # no command may be added once the last ones have been taken
        self._stopping = self._ended = False
        self._thread = threading.Thread(target=self._run, name="engine-steps", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def submit(self, model: HostedModel, generation: Generation) -> None:
        """Start a generation: events follow until one has `finish` set. Raises RuntimeError when the loop is over."""

        def start() -> list[Event]:
            model.start(generation)
            return []

        if not self._command(start):
            raise RuntimeError("the step loop has ended")

    def abort(self, model: HostedModel, generation: Generation) -> None:
        """End a generation before the next step; its last event says `abort`, unless it ended first."""
        self._command(lambda: model.abort(generation))

    def ask(self, question: Callable[[], T]) -> "Future[T]":
        """The answer to a question about a model, computed on the loop's thread between two steps.

        Raises RuntimeError when the loop is over.
        """
        answer: Future[T] = Future()

        def reply() -> list[Event]:
            try:
                answer.set_result(question())
            except Exception as error:
                answer.set_exception(error)
            return []

        if not self._command(reply):
            raise RuntimeError("the step loop has ended")
        return answer

    def stop(self) -> None:
        """End the loop after the step in progress; what still runs is aborted, with events."""
        self._stopping = True
        self._wake.set()
        self._thread.join()

    def _command(self, command: Callable[[], list[Event]]) -> bool:
        with self._lock:
            if self._ended:
                return False
            self._commands.append(command)
        self._wake.set()
        return True

    def _run(self) -> None:
        try:
            with torch.inference_mode():
                self._loop()
            reason: FinishReason = "abort"
        except Exception:
            # A defect outside any one request's step: nothing here can be trusted any more.
            log.exception("The step loop failed; the engine must be restarted")
            reason = "error"
        with self._lock:
            self._ended = True
        events = self._obey()
        for model in self.models.values():
            events += model.end_all(reason)
        if events:
            self._deliver(events)

    def _obey(self) -> list[Event]:
        events: list[Event] = []
        while self._commands:
            events += self._commands.popleft()()
        return events

    def _loop(self) -> None:
        turn = deque(self.models.values())
        while not self._stopping:
            events = self._obey()
            model = next((model for model in turn if model.has_work), None)
            if model is not None:
                events += model.step(self.clock)
                turn.remove(model)
                turn.append(model)
            if events:
                self._deliver(events)
            if model is None:
                self._wake.wait(IDLE_TICK)
                self._wake.clear()
                self.clock.idle_until(time.monotonic())
