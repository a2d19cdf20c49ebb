"""How far a number format moves a model's next-token distributions from float32's, on the same text."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from engine import runner
from engine.batch import BLOCK_TOKENS, FlatBatch
from engine.native.runner import NativeRunner

Runner = runner.ModelRunner | NativeRunner
WINDOW = 1024
CHUNK = 256


@dataclass(frozen=True)
class Divergence:
    perplexity: float
    """exp of the mean negative log-likelihood of each token after the first of its window."""
    reference: float
    """The same in float32."""
    kl: float
    """Mean Kullback-Leibler divergence from float32's next-token distribution, in nats."""
    same_best: float
    """Share of places where both would choose the same token."""


def load(path: Path, dtype: str) -> Runner:
    """`dtype` as --dtype of `benchmarks.quality` names it: int8+kv8 is int8 with the KV cache in int8."""
    weights, _, kv = dtype.partition("+")
    loaded = runner.load(path, cast(runner.DType, weights), kv="int8" if kv else None)
    loaded.allocate(WINDOW // BLOCK_TOKENS)
    return loaded


def diverge(reference: Runner, other: Runner, tokens: Sequence[int]) -> Divergence:
    """Compare two models on `tokens`, in windows that do not see each other."""
    losses, base_losses, kl, same, places = 0.0, 0.0, 0.0, 0, 0
    for start in range(0, len(tokens), WINDOW):
        window = tokens[start : start + WINDOW]
        chunks = zip(log_probabilities(reference, window), log_probabilities(other, window), strict=True)
        for (begin, base), (_, scores) in chunks:
            following = torch.tensor(window[begin + 1 : begin + len(base) + 1])
            base, scores = base[: len(following)], scores[: len(following)]
            base_losses -= float(base.gather(1, following[:, None]).sum())
            losses -= float(scores.gather(1, following[:, None]).sum())
            kl += float((base.exp() * (base - scores)).sum())
            same += int((base.argmax(-1) == scores.argmax(-1)).sum())
            places += len(following)
    return Divergence(math.exp(losses / places), math.exp(base_losses / places), kl / places, same / places)


def log_probabilities(model: Runner, window: Sequence[int]) -> Iterator[tuple[int, Tensor]]:
    """(first place, [places, vocab] float32 log-probabilities of what follows each), chunk after chunk."""
    blocks = -(-len(window) // BLOCK_TOKENS)
    for start in range(0, len(window), CHUNK):
        end = min(start + CHUNK, len(window))
        places = torch.arange(start, end)
        batch = FlatBatch(
            token_ids=torch.tensor(window[start:end]),
            positions=places,
            slot_mapping=places,
            query_starts=(0, end - start),
            context_lens=(end,),
            block_tables=torch.arange(blocks, dtype=torch.int32)[None],
            logits_rows=torch.arange(end - start),
        )
        yield start, model.forward(batch).log_softmax(-1)
