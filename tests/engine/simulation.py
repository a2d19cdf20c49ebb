"""A scheduler on a machine whose steps take a known time: what each request waits for is exact, and repeats."""

import heapq
import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass, field

from engine.block_manager import BlockManager
from engine.scheduler import Scheduler
from engine.sequence import Sequence

STEP, ROW = 0.010, 0.0006
"""Seconds a step and a token: a small model on a few cores."""


@dataclass
class Load:
    """What one tenant asks for: `clients` of them, each again `pause` seconds after its answer, new text each time."""

    tenant: bytes
    clients: int
    prompt: int
    output: int
    pause: float = 0.0
    priority: int = 0
    start: float = 0.0
    reserves_all: bool = True


@dataclass
class Simulation:
    """Runs loads until `end`; `served` are the finished sequences by tenant."""

    blocks: int = 1000
    budget: int = 512
    floor: float = 0.0
    served: dict[bytes, list[Sequence]] = field(default_factory=dict)

    def run(self, loads: list[Load], end: float) -> Scheduler:
        scheduler = Scheduler(BlockManager(self.blocks, tenant_floor=self.floor), self.budget, 4096)
        texts = random.Random(1)
        numbers = itertools.count()
        due = [(load.start, next(numbers), load) for load in loads for _ in range(load.clients)]
        heapq.heapify(due)
        loads_of: dict[Sequence, Load] = {}
        now = 0.0
        while now < end:
            while due and due[0][0] <= now:
                arrived, _, load = heapq.heappop(due)
                sequence = self._request(load, arrived, texts)
                loads_of[sequence] = load
                scheduler.add(sequence)
            if not scheduler.has_work:
                now = due[0][0]
                continue
            for sequence in self._step(scheduler, now):
                load = loads_of.pop(sequence)
                self.served.setdefault(load.tenant, []).append(sequence)
                heapq.heappush(due, (self.now + load.pause, next(numbers), load))
            now = self.now
        return scheduler

    def _step(self, scheduler: Scheduler, now: float) -> Iterator[Sequence]:
        chunks = scheduler.schedule(now)
        self.now = now + STEP + ROW * sum(chunk.end - chunk.start for chunk in chunks)
        sampling = [chunk.sequence for chunk in chunks if chunk.samples]
        scheduler.commit(chunks)
        for sequence in sampling:
            sequence.sampled(self.now)
            sequence.tokens.append(7)
            if len(sequence.tokens) == sequence.max_len:
                scheduler.remove(sequence, self.now)
                yield sequence

    def _request(self, load: Load, arrived: float, texts: random.Random) -> Sequence:
        prompt = texts.choices(range(50_000), k=load.prompt)
        return Sequence(
            "", load.tenant, prompt, load.prompt, load.prompt + load.output, arrived,
            priority=load.priority, reserves_all=load.reserves_all,
        )  # fmt: skip

    def first_token(self, tenant: bytes, quantile: float) -> float:
        """Seconds from arrival to first token that this part of a tenant's requests stayed within."""
        waits = sorted(sequence.first_token - sequence.arrived for sequence in self.served[tenant])
        return waits[min(len(waits) - 1, int(quantile * len(waits)))]

    def tokens(self, tenant: bytes) -> int:
        return sum(sequence.prompt_len + sequence.generated for sequence in self.served.get(tenant, []))
