"""Choosing the next token: temperature, top-k, top-p and min-p over a batch of logits, reproducible per request."""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 1024

CANDIDATES = 1024
"""How many of the best tokens are looked at first. Where a filter may keep more, the row is sorted as a whole."""

SMALLEST_TEMPERATURE = 1e-6
"""Below it two logits one float apart already differ by a factor of the largest float, and division overflows."""

SMALLEST_TOP_P = 1e-9
"""Any smaller sum keeps only the best token too."""


class ParameterError(ValueError):
    """A sampling parameter has a value out of its range. `param` is its name, the message says what is allowed."""

    def __init__(self, param: str, message: str) -> None:
        super().__init__(message)
        self.param = param


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """What one request asks of sampling. The defaults are the API's: the model's own distribution, until it ends."""

    temperature: float = 1.0
    """Logits are divided by it; 0 takes the best token always."""
    top_p: float = 1.0
    """Keep the smallest set of best tokens whose probabilities (after top_k) reach this sum; 1 keeps all."""
    top_k: int = 0
    """Keep this many best tokens; 0 and -1 keep all."""
    min_p: float = 0.0
    """Keep tokens at least this fraction as likely as the best one."""
    seed: int | None = None
    """The same seed, prompt and parameters give the same tokens. None: different every time."""
    stop: tuple[str, ...] = ()
    """The text ends before the first of these."""
    max_tokens: int | None = None
    """At most this many tokens; None: until the context is full."""
    ignore_eos: bool = False
    """Go on after the model ends its text."""

    def validate(self) -> None:
        """Raise ParameterError for the first parameter out of its range."""
        _check_float("temperature", self.temperature, 0, 2)
        _check_float("top_p", self.top_p, 0, 1, above=True)
        _check_float("min_p", self.min_p, 0, 1)
        if not _is_int(self.top_k) or self.top_k < -1:
            raise ParameterError("top_k", f"top_k must be a whole number from 1 up, or 0 or -1 for all: {self.top_k}")
        if self.seed is not None and not (_is_int(self.seed) and -(2**63) <= self.seed < 2**64):
            raise ParameterError("seed", f"seed must be a whole number of at most 64 bits, or null: {self.seed}")
        if self.max_tokens is not None and (not _is_int(self.max_tokens) or self.max_tokens < 1):
            raise ParameterError("max_tokens", f"max_tokens must be a whole number of at least 1: {self.max_tokens}")
        if len(self.stop) > MAX_STOP_STRINGS:
            raise ParameterError("stop", f"stop takes at most {MAX_STOP_STRINGS} strings, here are {len(self.stop)}")
        if not all(isinstance(text, str) and 1 <= len(text) <= MAX_STOP_LENGTH for text in self.stop):
            raise ParameterError("stop", f"each stop string must have 1 to {MAX_STOP_LENGTH} characters")


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _check_float(name: str, value: float, low: float, high: float, *, above: bool = False) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not number or not low <= value <= high or (above and value == low):
        allowed = f"above {low} and at most {high}" if above else f"from {low} to {high}"
        raise ParameterError(name, f"{name} must be a number {allowed}: {value}")


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) that depends on nothing but the request's seed and the token's position in its sequence."""
    key = (seed % 2**64).to_bytes(8, "little") + position.to_bytes(8, "little")
    return (int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little") >> 11) / 2**53


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
