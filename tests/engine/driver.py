"""The step loop in small, over a runner whose text shows every mistake in scheduling."""

import random

from engine.block_manager import BlockManager, block_digest
from engine.layout import Chunk
from engine.scheduler import Scheduler
from engine.sequence import Sequence
from tests.engine.fake_runner import FakeRunner, reference


class Driver:
    """The step loop in small: schedule, run, commit, sample greedily, finish at max_len; checks the pool each time."""

    def __init__(
        self, num_blocks: int, budget: int, digest=block_digest, max_context: int = 512, floor: float = 0.0
    ) -> None:
        self.runner = FakeRunner(max_context)
        self.runner.allocate(num_blocks)
        self.scheduler = Scheduler(BlockManager(num_blocks, digest, floor), budget, max_context)
        self.now = 0.0
        self.finished: list[Sequence] = []

    def add(self, prompt: list[int], output: int, salt: bytes = b"", **options) -> Sequence:
        self.now += 1.0
        sequence = Sequence(f"r{self.now}", salt, list(prompt), len(prompt), len(prompt) + output, self.now, **options)
        self.scheduler.add(sequence)
        return sequence

    def step(self) -> list[Chunk]:
        self.now += 1.0
        chunks = self.scheduler.schedule(self.now)
        assert chunks, "there is work, but nothing was scheduled"
        assert sum(chunk.end - chunk.start for chunk in chunks) <= self.scheduler.max_batch_tokens
        logits = self.runner.forward(self.scheduler.batch(chunks))
        sampling = [chunk.sequence for chunk in chunks if chunk.samples]
        self.scheduler.commit(chunks)
        for sequence, token in zip(sampling, logits.argmax(-1).tolist(), strict=True):
            sequence.tokens.append(token)
            if len(sequence.tokens) == sequence.max_len:
                self.scheduler.remove(sequence, self.now)
                self.finished.append(sequence)
        self.scheduler.check()
        return chunks

    def abort(self, sequence: Sequence) -> None:
        self.scheduler.remove(sequence, self.now)
        self.scheduler.check()

    def run(self) -> None:
        while self.scheduler.has_work:
            self.step()


def outputs_are_right(sequences: list[Sequence]) -> None:
    for sequence in sequences:
        prompt = sequence.tokens[: sequence.prompt_len]
        assert sequence.tokens[sequence.prompt_len :] == reference(prompt, sequence.generated)


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(97), k=length)
