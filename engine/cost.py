"""What a token costs, measured on the loaded model when it starts: the weights by which steps are shared out.

A step of a flat batch takes a fixed time (reading the weights, launching), a time for each row of its matrix products,
and a time for each pair of a row and a token in its context (attention). Five short steps tell these apart, for prefill
and for decode, whose attention runs differently. The fixed time goes to all rows in proportion.
"""

import time
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from engine.batch import BLOCK_TOKENS, FlatBatch, ModelConfig

CHUNK = 64
"""Rows of the prefill steps."""
BATCH = 16
"""Sequences of the larger decode steps."""
CONTEXT = 512
"""Tokens of context of the later steps."""
REPEATS = 3
PATIENCE = 1.5
"""Seconds after which no step is repeated: the fastest of the runs so far counts."""
LEAST_SHARE = 0.1
"""Of a prefill step's time that goes to its rows whatever the other steps say."""


class Runner(Protocol):
    """What is measured."""

    @property
    def config(self) -> ModelConfig: ...
    def forward(self, batch: FlatBatch) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class CostModel:
    """Seconds: of each step, of each row, and of each row for each token in its context."""

    step: float
    prefill_row: float
    prefill_context: float
    decode_row: float
    decode_context: float

    def prefill(self, start: int, end: int) -> float:
        """Weight of the prompt tokens at positions `start:end` together."""
        return _weight(self.prefill_row, self.prefill_context, start, end)

    def decode(self, start: int, end: int) -> float:
        """Weight of the answer's tokens at positions `start:end` together."""
        return _weight(self.decode_row, self.decode_context, start, end)

    @property
    def decode_weight(self) -> float:
        """What a decode token weighs, in tokens of prefill, both with a usual context."""
        ratio = self.decode(CONTEXT, CONTEXT + 1) / self.prefill(CONTEXT, CONTEXT + 1)
        return min(max(ratio, 1.0), 8.0)

    def __str__(self) -> str:
        return (
            f"{_short(1e3 * self.step)} ms a step, {_short(1e3 * self.prefill_row)} ms a prefill token and "
            f"{_short(1e3 * self.decode_row)} ms a decode token, {_short(1e6 * self.prefill_context)} and "
            f"{_short(1e6 * self.decode_context)} us for each token in its context"
        )


def _short(number: float) -> str:
    """Two digits, without an exponent for what is large."""
    return f"{number:.0f}" if number >= 99.5 else f"{number:.2g}"


def _weight(row: float, context: float, start: int, end: int) -> float:
    count = end - start
    return count * (row + context * (start + 1 + end) / 2) if count > 0 else 0.0


def measure(runner: Runner, num_blocks: int, max_batch_tokens: int) -> CostModel:
    """Run a few steps over the first blocks of an allocated pool in which nothing is held, and time them."""
    room = min(runner.config.max_context, num_blocks * BLOCK_TOKENS)
    rows = max(1, min(CHUNK, max_batch_tokens, room // 2))
    batch = max(2, min(BATCH, max_batch_tokens))
    late = max(1, min(CONTEXT, room - rows))
    started = time.perf_counter()
    steps = (
        _step(1, 0, rows),
        _step(1, late, rows),
        _step(batch, 0, 1),
        _step(batch, late, 1),
        _step(1, 0, 1),
    )
    seconds = [float("inf")] * len(steps)
    for repeat in range(REPEATS):
        for i, step in enumerate(steps):
            if repeat == 0 or time.perf_counter() - started < PATIENCE:
                before = time.perf_counter()
                runner.forward(step)
                seconds[i] = min(seconds[i], time.perf_counter() - before)
    prompt, prompt_late, decode, decode_late, single = seconds
    prefill_context = max(0.0, prompt_late - prompt) / (rows * late)
    decode_context = max(0.0, decode_late - decode) / (batch * late)
    row = max(0.0, decode - single) / (batch - 1)
    # Another process can hold up any one of the steps: no difference of two may make a row cost next to nothing.
    fixed = min(max(0.0, single - row), (1 - LEAST_SHARE) * prompt)
    prefill_row = max(LEAST_SHARE * prompt / rows, (prompt - fixed) / rows - prefill_context * (rows + 1) / 2)
    # Where both are in one batch they are rows of the same matrix products, however little one more decode costs alone.
    return CostModel(fixed, prefill_row, prefill_context, max(row, prefill_row), decode_context)


def _step(sequences: int, start: int, rows: int) -> FlatBatch:
    """Rows `start:start + rows` of several sequences, who all use the first blocks of the pool."""
    end = start + rows
    positions = torch.arange(start, end).repeat(sequences)
    blocks = torch.arange(-(-end // BLOCK_TOKENS), dtype=torch.int32)
    return FlatBatch(
        token_ids=torch.zeros(sequences * rows, dtype=torch.int64),
        positions=positions,
        slot_mapping=positions.clone(),
        query_starts=tuple(range(0, sequences * rows + 1, rows)),
        context_lens=(end,) * sequences,
        block_tables=blocks.repeat(sequences, 1),
        logits_rows=torch.arange(rows - 1, sequences * rows, rows),
    )
