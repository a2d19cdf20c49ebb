"""Choosing the next token: temperature, top-k, top-p and min-p over a batch of logits, reproducible per request."""

import hashlib
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from engine.sampling_params import SamplingParams

CANDIDATES = (256, 2048)
"""How many of the best tokens are looked at first, and second. Where a filter may keep more, it is all of them."""

BLOCK = 32
"""Tokens whose best one, or whose sum, is found first."""

SMALLEST_TEMPERATURE = 1e-6
"""Below it two logits one float apart already differ by a factor of the largest float, and division overflows."""

SMALLEST_TOP_P = 1e-9
"""Any smaller sum keeps only the best token too."""


@contextmanager
def one_thread() -> Iterator[None]:
    """Keep torch from sharing out what follows: waiting for the other cores costs more than a step's sampling takes,
    and far more when other processes have them."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


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


class Choose(Protocol):
    """What `choose` below does, or a backend's own way to do it."""

    def __call__(
        self, logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, uniform: Tensor
    ) -> Tensor: ...


def choose(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, uniform: Tensor) -> Tensor:
    """[L] int64 tokens for `logits` [L, V] float32; the others are [L], float32 but for `top_k`, int64, V for all.

    Temperature 0 takes the best token. Otherwise filters apply in the order temperature, top_k, top_p (relative to what
    top_k kept), min_p, and the token is the first in order of ids at which the running sum of the kept probabilities
    passes `uniform` of their sum. A row whose logits are all minus infinity gives token 0.
    """
    chosen = _argmax(logits)
    rows = (temperature > 0).nonzero().squeeze(1)
    if not len(rows):
        return chosen
    filtered = (top_k < logits.shape[1]) | (top_p < 1)
    for part, pick in ((rows[~filtered[rows]], _from_all), (rows[filtered[rows]], _from_best)):
        if len(part):
            own = logits if len(part) == len(logits) else logits[part]
            heat = temperature[part].clamp(min=SMALLEST_TEMPERATURE)
            tokens = pick(own, heat, top_k[part], top_p[part], min_p[part], uniform[part])
            chosen[part] = torch.where(own.gather(1, chosen[part].unsqueeze(1)).squeeze(1) > -math.inf, tokens, 0)
    return chosen


def sample(
    logits: Tensor,
    params: Sequence[SamplingParams],
    seeds: Sequence[int],
    positions: Sequence[int],
    pick: Choose = choose,
) -> list[int]:
    """One token per row, by `choose` or a backend's own way to do it.

    `logits` [L, V] float32; `params`, `seeds` and `positions` have L entries: the request's own seed (draw a random
    one once when it has none) and the place that the new token takes in its sequence. A row's token depends on its own
    logits and entries only, not on its neighbours.
    """
    if all(param.temperature == 0 for param in params):
        return _argmax(logits).tolist()
    size, device = logits.shape[1], logits.device
    tokens: list[int] = pick(
        logits,
        torch.tensor([param.temperature for param in params], dtype=torch.float32, device=device),
        torch.tensor([min(param.top_k, size) if param.top_k > 0 else size for param in params], device=device),
        torch.tensor([param.top_p for param in params], dtype=torch.float32, device=device),
        torch.tensor([param.min_p for param in params], dtype=torch.float32, device=device),
        torch.tensor(
            [
                uniform(*key) if param.temperature > 0 else 0.0
                for *key, param in zip(seeds, positions, params, strict=True)
            ],
            dtype=torch.float32,
            device=device,
        ),
    ).tolist()
    return tokens


def _argmax(logits: Tensor) -> Tensor:
    """[L] best tokens. On the CPU through numpy, whose argmax is many times faster than torch's."""
    return torch.from_numpy(logits.numpy().argmax(-1)) if logits.device.type == "cpu" else logits.argmax(-1)


def _from_all(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, uniform: Tensor
) -> Tensor:
    """[N] tokens from the whole rows of `logits` [N, V], where no filter but min_p applies.

    Row by row, because one row's numbers stay in the cache from one operation to the next and all rows' do not.
    """
    count, size = logits.shape
    weights = logits.new_zeros(count, -(-size // BLOCK), BLOCK)
    sums = logits.new_empty(weights.shape[:2])
    for row, least in enumerate(min_p.tolist()):
        own = weights[row].view(-1)[:size]
        torch.softmax(logits[row] * (1 / temperature[row]), dim=-1, out=own)
        if least > 0:
            # of the vectorised operations the one that comes nearest: it keeps what is above, not what is equal
            bound = np.nextafter(np.float32(least) * np.float32(own.max().item()), np.float32(0))
            torch.nn.functional.threshold(own, float(bound), 0, inplace=True)
        torch.sum(weights[row], dim=-1, out=sums[row])
    block, rest = _invert(sums, uniform)
    inside = weights[torch.arange(count, device=logits.device), block]
    place, _ = _invert(inside, rest / inside.sum(dim=-1))
    return block * BLOCK + place


def _invert(weights: Tensor, threshold: Tensor) -> tuple[Tensor, Tensor]:
    """[N] columns where the running sum of each row of `weights` [N, C] first passes `threshold` [N] of the row's sum.

    Also the part of the column's own weight below that point. The column found always has a weight above 0.
    """
    running = weights.cumsum(dim=-1)
    total = running[:, -1:]
    goal = torch.minimum(threshold.unsqueeze(1) * total, torch.nextafter(total, torch.zeros_like(total)))
    column = torch.searchsorted(running, goal, right=True).clamp(max=weights.shape[1] - 1)
    own = weights.gather(1, column)
    rest = (goal - (running.gather(1, column) - own)).clamp(min=0)
    return column.squeeze(1), torch.minimum(rest, own).squeeze(1)


def _from_best(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, uniform: Tensor
) -> Tensor:
    """[N] tokens from the best ones of each row of `logits` [N, V]: more of them for the rows whose filters need it."""
    count, vocabulary = logits.shape
    # 1 must not cut the tail off where the running sum rounds to 1, nor a tiny number round to 0 and cut everything.
    top_p = torch.where(top_p < 1, top_p.clamp(min=SMALLEST_TOP_P), math.inf)
    chosen = torch.zeros(count, dtype=torch.int64, device=logits.device)
    late = torch.arange(count, device=logits.device)
    for size in (size for size in CANDIDATES if size < vocabulary):
        own = logits if len(late) == count else logits[late]
        tokens, settled = _from_candidates(
            own, size, temperature[late], top_k[late], top_p[late], min_p[late], uniform[late]
        )
        chosen[late] = tokens
        late = late[~settled]
        if not len(late):
            return chosen
    for index in late.tolist():  # one by one: sorting takes memory
        row = slice(index, index + 1)
        chosen[row], _ = _from_candidates(
            logits[row], vocabulary, temperature[row], top_k[row], top_p[row], min_p[row], uniform[row]
        )
    return chosen


def _from_candidates(
    logits: Tensor, size: int, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, uniform: Tensor
) -> tuple[Tensor, Tensor]:
    """[N] tokens drawn from each row's `size` best, and whether these are sure to be all that the filters keep."""
    vocabulary = logits.shape[1]
    values, tokens = _best(logits, size)
    weights = ((values - values[:, :1]) / temperature.unsqueeze(1)).exp_()
    kept = weights.masked_fill(torch.arange(size, device=logits.device) >= top_k.unsqueeze(1), 0)
    running = kept.cumsum(dim=-1)
    goal = top_p * running[:, -1]
    for row in (top_k >= vocabulary).nonzero().squeeze(1).tolist() if size < vocabulary else ():
        # In units of the best token's probability, what all tokens sum to is its inverse.
        goal[row] = top_p[row] / (logits[row] * (1 / temperature[row])).softmax(dim=-1).max()
    settled = (running[:, -1] >= goal) | (weights[:, -1] < min_p)
    settled = (top_k <= size) | ((top_k >= vocabulary) & settled)
    kept.masked_fill_(running - kept >= goal.unsqueeze(1), 0)
    kept.masked_fill_(weights < min_p.unsqueeze(1), 0)
    if size == vocabulary:
        return _invert(torch.empty_like(kept).scatter_(1, tokens, kept), uniform)[0], settled
    tokens, order = tokens.sort(dim=-1)
    place, _ = _invert(kept.gather(1, order), uniform)
    return tokens.gather(1, place.unsqueeze(1)).squeeze(1), settled


def _best(logits: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Values and tokens of each row's `size` best, in descending order.

    They lie in the `size` blocks with the best maxima: each of those blocks has one at least as good as any outside.
    """
    count, vocabulary = logits.shape
    if size == vocabulary:
        return logits.sort(dim=-1, descending=True, stable=True)
    if vocabulary % BLOCK or 2 * size * BLOCK > vocabulary:
        return logits.topk(size, dim=-1)
    blocks = logits.reshape(-1, BLOCK)
    _, found = blocks.amax(dim=-1).view(count, -1).topk(size, dim=-1, sorted=False)
    first = torch.arange(count, device=logits.device).unsqueeze(1) * (vocabulary // BLOCK)
    some = blocks.index_select(0, (found + first).view(-1)).view(count, -1)
    values, place = some.topk(size, dim=-1)
    return values, found.gather(1, place // BLOCK) * BLOCK + place % BLOCK
