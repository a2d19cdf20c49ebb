"""Flat batches by hand: several sequences over a paged pool, without a scheduler."""

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from engine.batch import BLOCK_TOKENS, FlatBatch
from engine.runner import ModelRunner


@dataclass
class Paged:
    """A sequence's tokens, its blocks and how many tokens are already in them."""

    tokens: list[int]
    blocks: list[int]
    done: int = 0


def flat_batch(steps: list[tuple[Paged, int]], *, all_rows: bool = False) -> FlatBatch:
    """Advance each sequence by its count of tokens in one step; logits of each one's last row, or of all rows."""
    ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    starts = [0]
    for sequence, count in steps:
        new = range(sequence.done, sequence.done + count)
        ids += [sequence.tokens[i] for i in new]
        positions += new
        slots += [sequence.blocks[i // BLOCK_TOKENS] * BLOCK_TOKENS + i % BLOCK_TOKENS for i in new]
        starts.append(len(ids))
        sequence.done += count
    width = max(len(sequence.blocks) for sequence, _ in steps)
    tables = [sequence.blocks + [0] * (width - len(sequence.blocks)) for sequence, _ in steps]
    return FlatBatch(
        token_ids=torch.tensor(ids),
        positions=torch.tensor(positions),
        slot_mapping=torch.tensor(slots),
        query_starts=tuple(starts),
        context_lens=tuple(sequence.done for sequence, _ in steps),
        block_tables=torch.tensor(tables, dtype=torch.int32),
        logits_rows=torch.arange(len(ids)) if all_rows else torch.tensor([end - 1 for _, end in pairwise(starts)]),
    )


def all_logits(runner: ModelRunner, tokens: list[int], blocks: list[int], chunk: int | None = None) -> Tensor:
    """[len(tokens), vocab] of one sequence, computed in chunks."""
    sequence = Paged(tokens, blocks)
    parts = []
    while sequence.done < len(tokens):
        count = min(chunk or len(tokens), len(tokens) - sequence.done)
        parts.append(runner.forward(flat_batch([(sequence, count)], all_rows=True)))
    return torch.cat(parts)


def greedy(runner: ModelRunner, sequences: list[Paged], count: int) -> list[list[int]]:
    """Decode all sequences together, `count` tokens each, after what is left of their prompts in one step each."""
    for sequence in sequences:
        sequence.tokens = list(sequence.tokens)
    prompts = [len(sequence.tokens) for sequence in sequences]
    for _ in range(count):
        steps = [(sequence, len(sequence.tokens) - sequence.done) for sequence in sequences]
        chosen = runner.forward(flat_batch(steps)).argmax(-1).tolist()
        for sequence, token in zip(sequences, chosen, strict=True):
            sequence.tokens.append(token)
    return [sequence.tokens[prompt:] for sequence, prompt in zip(sequences, prompts, strict=True)]


def relative_error(got: Tensor, wanted: Tensor) -> float:
    """Largest difference over the largest wanted magnitude."""
    return ((got - wanted).abs().max() / wanted.abs().max()).item()
