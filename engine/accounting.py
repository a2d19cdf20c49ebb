"""Who used the device, and for how long.

Every step's wall time is shared out over the tokens it computed, by their weights (`cost`). What is not a step is idle
time, so the two always add up to the wall clock.
"""

import threading
import uuid
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.cost import CostModel
from engine.layout import Chunk
from engine.protocol import DeviceAccount


@dataclass(slots=True)
class DeviceTime:
    """Seconds and tokens of one model since start."""

    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    steps: int = 0

    def share(self, seconds: float, chunks: Sequence[Chunk], cost: CostModel) -> None:
        """Charge a step's time to its chunks by weight; positions past the prompt are decode."""
        weights: list[tuple[float, float]] = []
        for sequence, start, end in chunks:
            # A chunk crosses the border only when it recomputes after a preemption.
            border = min(max(start, sequence.prompt_len), end)
            weights.append((cost.prefill(start, border), cost.decode(border, end)))
            self.prefill_tokens += border - start
            self.decode_tokens += end - border
        rate = seconds / sum(prefill + decode for prefill, decode in weights)
        for chunk, (prefill, decode) in zip(chunks, weights, strict=True):
            chunk.sequence.prefill_seconds += prefill * rate
            chunk.sequence.decode_seconds += decode * rate
            self.prefill_seconds += prefill * rate
            self.decode_seconds += decode * rate
        self.steps += 1


class Intervals:
    """A histogram of seconds between two tokens of one answer."""

    BOUNDS = (0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)

    def __init__(self) -> None:
        self.counts = [0] * (len(self.BOUNDS) + 1)
        """By the first bound that is not exceeded; the last one counts what is above all."""
        self.total = 0.0

    def add(self, seconds: float) -> None:
        self.counts[bisect_left(self.BOUNDS, seconds)] += 1
        self.total += seconds


@dataclass(slots=True)
class Clock:
    """Splits wall time between `start` and `mark` into steps and idle. Seconds of one monotonic clock.

    Written by the step loop, read by /metrics: take `lock` to read several fields that must agree.
    """

    start: float
    instance: str = field(default_factory=lambda: uuid.uuid4().hex)
    """Names this count: that of another process is another one."""
    mark: float = field(init=False)
    busy_seconds: float = 0.0
    idle_seconds: float = 0.0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.mark = self.start

    def account(self) -> DeviceAccount:
        with self.lock:
            wall, idle = self.mark - self.start, self.idle_seconds
        return DeviceAccount(instance=self.instance, wall_seconds=wall, idle_seconds=idle)

    def idle_until(self, now: float) -> None:
        """Count the time since the last mark as idle."""
        with self.lock:
            self.idle_seconds += now - self.mark
            self.mark = now

    def busy_until(self, now: float) -> float:
        """Count the time since the last mark as one step; returns its seconds."""
        with self.lock:
            spent = now - self.mark
            self.busy_seconds += spent
            self.mark = now
        return spent
