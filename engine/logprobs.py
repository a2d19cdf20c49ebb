"""Log-probabilities of tokens under the model's own distribution: before penalties, temperature and filters."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

ROWS = 16
"""Rows looked at together, so that memory is bounded whatever the batch."""

LEAST = -9999.0
"""Stands for minus infinity, which JSON cannot say; OpenAI's own value for "very unlikely"."""


class TokenScore(NamedTuple):
    """A token where it stands: its log-probability, its rank from 1, and the best tokens in its place."""

    token: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


def score(logits: Tensor, tokens: Sequence[int], tops: Sequence[int]) -> list[TokenScore]:
    """Scores of one token per row of `logits` [N, V], with the row's `tops` best tokens.

    A row's numbers are the same bit for bit whatever the other rows are.
    """
    scores: list[TokenScore] = []
    for start in range(0, len(tokens), ROWS):
        part = slice(start, start + ROWS)
        scores += _score(logits[part], tokens[part], tops[part])
    return scores


def _score(logits: Tensor, tokens: Sequence[int], tops: Sequence[int]) -> list[TokenScore]:
    logprobs = logits.log_softmax(dim=-1)
    chosen = logprobs.gather(1, torch.tensor(tokens, device=logits.device).unsqueeze(1))
    ranks = (logprobs > chosen).sum(dim=-1) + 1
    count = min(max(tops), logits.shape[1])
    values, ids = logprobs.topk(count, dim=-1) if count else (logprobs[:, :0], logprobs[:, :0])
    rows = zip(tokens, chosen[:, 0].tolist(), ranks.tolist(), ids.tolist(), values.tolist(), tops, strict=True)
    return [
        TokenScore(
            token,
            max(logprob, LEAST),
            rank,
            tuple((id, max(value, LEAST)) for id, value in zip(ids[:top], values[:top], strict=True)),
        )
        for token, logprob, rank, ids, values, top in rows
    ]
