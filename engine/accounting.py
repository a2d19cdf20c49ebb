"""Who used the device, and for how long.

Every step's wall time is shared out over the tokens it computed. A token's weight is its arithmetic in units of one
token's matrix products: 1 for those, plus the share that attention over its context adds. One rule for prefill and
decode, because in a flat batch both are rows of the same matrix products. What is not a step is idle time, so the two
always add up to the wall clock.
"""

import threading
from dataclasses import dataclass, field

from engine.batch import ModelConfig


@dataclass(frozen=True, slots=True)
class CostModel:
    """weight(token at position p) = 1 + slope * (p + 1)."""

    slope: float

    @classmethod
    def of(cls, config: ModelConfig) -> "CostModel":
        """Counts multiply-adds per layer: attention does 2 * heads * head_dim per key (scores and values)."""
        queries = config.num_heads * config.head_dim
        keys = config.num_kv_heads * config.head_dim
        products = config.hidden_size * (2 * queries + 2 * keys + 3 * config.intermediate_size)
        return cls(2 * queries / products)

    def weight(self, start: int, end: int) -> float:
        """Weight of the tokens at positions `start:end` together."""
        count = end - start
        return count + self.slope * (count * (start + 1 + end) / 2) if count > 0 else 0.0


@dataclass(slots=True)
class DeviceTime:
    """Seconds and tokens of one model since start."""

    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    steps: int = 0


@dataclass(slots=True)
class Clock:
    """Splits wall time between `start` and `mark` into steps and idle. Seconds of one monotonic clock.

    Written by the step loop, read by /metrics: take `lock` to read several fields that must agree.
    """

    start: float
    mark: float = field(init=False)
    busy_seconds: float = 0.0
    idle_seconds: float = 0.0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.mark = self.start

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
