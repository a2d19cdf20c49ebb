"""Choosing the next token: temperature, top-k, top-p and min-p over a batch of logits, reproducible per request."""

import hashlib
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from engine.sampling_params import SamplingParams

CANDIDATES = 1024
"""How many of the best tokens are looked at first. Where a filter may keep more, the row is sorted as a whole."""

SMALLEST_TEMPERATURE = 1e-6
"""Below it two logits one float apart already differ by a factor of the largest float, and division overflows."""

SMALLEST_TOP_P = 1e-9
"""Any smaller sum keeps only the best token too."""


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) that depends on nothing but the request's seed and the token's position in its sequence."""
    key = (seed % 2**64).to_bytes(8, "little") + position.to_bytes(8, "little")
    return (int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little") >> 11) / 2**53


def choice_seed(seed: int, index: int) -> int:
    """The seed of a request's choice number `index`; the first one has the request's own."""
    if index == 0:
        return seed
    key = (seed % 2**64).to_bytes(8, "little") + index.to_bytes(8, "little")
    return int.from_bytes(hashlib.blake2b(key, digest_size=8, person=b"choice").digest(), "little")


def sample(
    logits: Tensor, params: Sequence[SamplingParams], seeds: Sequence[int], positions: Sequence[int]
) -> list[int]:
    """One token per row.

    `logits` [L, V] float32; `params`, `seeds` and `positions` have L entries: the request's own seed (draw a random
    one once when it has none) and the place that the new token takes in its sequence. A row's token depends on its own
    logits and entries only, not on its neighbours. Filters apply in the order temperature, top_k, top_p, min_p.
    """
    best = _argmax(logits)
    drawn = [row for row, param in enumerate(params) if param.temperature > 0]
    if not drawn:
        return best
    device = logits.device
    rows = logits if len(drawn) == len(params) else logits[torch.tensor(drawn, device=device)]
    temperature = _column([max(params[row].temperature, SMALLEST_TEMPERATURE) for row in drawn], device)
    probabilities = ((rows - rows.amax(dim=-1, keepdim=True)) / temperature).softmax(dim=-1)
    threshold = _column([uniform(seeds[row], positions[row]) for row in drawn], device)

    filtered = [i for i, row in enumerate(drawn) if _filters(params[row])]
    plain = [i for i, row in enumerate(drawn) if not _filters(params[row])]
    if plain:
        chosen = _invert(probabilities[plain], threshold[plain]).tolist()
        for i, token in zip(plain, chosen, strict=True):
            best[drawn[i]] = token
    if filtered:
        chosen = _sample_filtered(probabilities[filtered], [params[drawn[i]] for i in filtered], threshold[filtered])
        for i, token in zip(filtered, chosen, strict=True):
            best[drawn[i]] = token
    return best


def _argmax(logits: Tensor) -> list[int]:
    """Best token of each row [L, V]. On the CPU through numpy, whose argmax is a hundred times faster than torch's."""
    best: list[int] = (logits.numpy() if logits.device.type == "cpu" else logits).argmax(-1).tolist()
    return best


def _filters(params: SamplingParams) -> bool:
    return params.top_k > 0 or params.top_p < 1 or params.min_p > 0


def _column(values: Sequence[float], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.float32, device=device).unsqueeze(1)


def _invert(weights: Tensor, threshold: Tensor) -> Tensor:
    """[N] column of each row of `weights` [N, C] whose running sum first passes `threshold` [N, 1] of the row's sum."""
    running = weights.cumsum(dim=-1)
    # The largest float below the sum: then the column found always has a weight above 0.
    total = running[:, -1:]
    goal = torch.minimum(threshold * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(running, goal, right=True).squeeze(1)


def _sample_filtered(probabilities: Tensor, params: Sequence[SamplingParams], threshold: Tensor) -> list[int]:
    """One token per row of `probabilities` [N, V] among those its row's filters keep."""
    vocabulary = probabilities.shape[1]
    size = min(CANDIDATES, vocabulary)
    top_k = _column([param.top_k if param.top_k > 0 else vocabulary for param in params], probabilities.device)
    # 1 must not cut the tail off where the running sum rounds to 1, nor a tiny number round to 0 and cut everything.
    top_p = _column([max(p.top_p, SMALLEST_TOP_P) if p.top_p < 1 else math.inf for p in params], probabilities.device)
    min_p = _column([param.min_p for param in params], probabilities.device)
    values, tokens = probabilities.topk(size, dim=-1)
    chosen = _choose(values, tokens, top_k, top_p, min_p, threshold)
    # Are all kept tokens among the candidates? Each row decides by itself, so its neighbours don't change its result.
    reached = (values.sum(dim=-1, keepdim=True) >= top_p) | (values[:, -1:] < min_p * values[:, :1])
    settled = (top_k <= size) | ((top_k == vocabulary) & reached)
    late = (~settled).squeeze(1).nonzero().squeeze(1)
    if len(late):
        values, tokens = probabilities[late].sort(dim=-1, descending=True, stable=True)
        chosen[late] = _choose(values, tokens, top_k[late], top_p[late], min_p[late], threshold[late])
    result: list[int] = chosen.tolist()
    return result


def _choose(values: Tensor, tokens: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, threshold: Tensor) -> Tensor:
    """[N] tokens, drawn from the descending probabilities `values` [N, C] of `tokens` [N, C] after all filters."""
    rank = torch.arange(values.shape[1], device=values.device)
    kept = values.masked_fill(rank >= top_k, 0)
    before = kept.cumsum(dim=-1) - kept
    kept = kept.masked_fill(before >= top_p * _total(kept, values, top_k), 0)
    kept = kept.masked_fill(values < min_p * values[:, :1], 0)
    return tokens.gather(1, _invert(kept, threshold).unsqueeze(1)).squeeze(1)


def _total(kept: Tensor, values: Tensor, top_k: Tensor) -> Tensor:
    """Sum that top_p is a part of: of the tokens top_k kept, or 1 where it kept all (candidates may be fewer)."""
    limited = top_k <= values.shape[1]
    return torch.where(limited, kept.sum(dim=-1, keepdim=True), 1.0)
