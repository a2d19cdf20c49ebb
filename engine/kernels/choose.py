"""The next token of each row: temperature, top-k, top-p, min-p and the draw, without sorting.

What top-k and top-p keep is a prefix of the tokens in descending order, so it is told by its last logit, and by how
many tokens with exactly that logit it has (the first ones, in order of ids). That logit is found by bisection over the
bits of a float: about 20 passes over a row, which the cache holds, and 32 at most.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096
WARPS = 16


@triton.jit
def ordered(x):
    """float32 to int32 that compare alike."""
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)  # there are two zeros
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def best_token(row, size, BLOCK: tl.constexpr):
    """The largest of `size` logits, and the first place that has it."""
    highest = tl.full([BLOCK], float("-inf"), tl.float32)
    place = tl.zeros([BLOCK], tl.int32)
    for start in range(0, size, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        logit = tl.load(row + columns, mask=columns < size, other=float("-inf"))
        better = logit > highest
        highest = tl.where(better, logit, highest)
        place = tl.where(better, columns, place)
    best = tl.max(highest, axis=0)
    return best, tl.min(tl.where(highest == best, place, size), axis=0)


@triton.jit
def at_least(row, size, key, best, heat, BLOCK: tl.constexpr):
    """How many tokens have at least this key, and the sum of their weights."""
    count = tl.zeros([BLOCK], tl.int32)
    mass = tl.zeros([BLOCK], tl.float32)
    for start in range(0, size, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        logit = tl.load(row + columns, mask=columns < size, other=float("-inf"))
        counted = (columns < size) & (ordered(logit) >= key)
        count += counted.to(tl.int32)
        mass += tl.where(counted, tl.exp((logit - best) / heat), 0.0)
    return tl.sum(count, axis=0), tl.sum(mass, axis=0)


@triton.jit
def last_key(row, size, low, goal, best, heat, MASS: tl.constexpr, BLOCK: tl.constexpr):
    """The largest key, `low` or above, such that the tokens with at least it have `goal` in number or weight.

    Gives it with the number and weight of the tokens above it; or, where a single token turned out to lie between two
    keys, a key just below that token, whose tokens above are all that is wanted.
    """
    low, high = low.to(tl.int64), ordered(best).to(tl.int64) + 1
    low_count, low_mass = size, goal.to(tl.float32)
    high_count, high_mass = 0, 0.0
    while (high - low > 1) & (low_count - high_count > 1):
        middle = low + (high - low) // 2
        count, mass = at_least(row, size, middle, best, heat, BLOCK)
        reached = mass >= goal if MASS else count >= goal
        low, high = tl.where(reached, middle, low), tl.where(reached, high, middle)
        low_count, high_count = tl.where(reached, count, low_count), tl.where(reached, high_count, count)
        low_mass, high_mass = tl.where(reached, mass, low_mass), tl.where(reached, high_mass, mass)
    alone = high - low > 1
    last = tl.where(alone, low - 1, low).to(tl.int32)
    return last, tl.where(alone, low_count, high_count), tl.where(alone, low_mass, high_mass)


@triton.jit
def kept_weights(row, size, start, last, ties, ties_before, min_p, best, heat, BLOCK: tl.constexpr):
    """Weights of a block's tokens, 0 where a filter drops them, and how many of `last` come before the next block."""
    columns = start + tl.arange(0, BLOCK)
    logit = tl.load(row + columns, mask=columns < size, other=float("-inf"))
    key = ordered(logit)
    tie = ((key == last) & (columns < size)).to(tl.int32)
    kept = (key > last) | ((tie > 0) & (ties_before + tl.cumsum(tie, axis=0) <= ties))
    weight = tl.exp((logit - best) / heat)
    return tl.where(kept & (weight >= min_p), weight, 0.0), ties_before + tl.sum(tie, axis=0)


@triton.jit
def choose_kernel(logits, temperature, top_k, top_p, min_p, uniform, out, stride, size, BLOCK: tl.constexpr):
    """Grid (L): a program draws one row's token.

    logits [L, size] float32 have `stride` elements between rows; the others are [L].
    Bytes: the row from memory once, 4 * size; then from the cache about 20 times for each of top-k and top-p, and twice
    for the draw. With temperature 0, once in all.
    """
    index = tl.program_id(0)
    row = logits + index.to(tl.int64) * stride
    heat = tl.load(temperature + index)
    best, token = best_token(row, size, BLOCK)
    if (heat > 0) & (best > float("-inf")):
        heat = tl.maximum(heat, 1e-6)
        last = tl.full([], -0x80000000, tl.int32)  # below the key of every float
        ties = tl.full([], 0, tl.int32)
        limit = tl.load(top_k + index)
        if limit < size:
            last, count, _ = last_key(row, size, last, limit, best, heat, False, BLOCK)
            ties = limit.to(tl.int32) - count
        share = tl.load(top_p + index)
        if share < 1:
            _, mass = at_least(row, size, last.to(tl.int64) + 1, best, heat, BLOCK)
            goal = tl.maximum(share, 1e-9) * (mass + ties * weight_of(last, best, heat))
            limited, limited_ties = last, ties
            low = tl.where(ties > 0, last, last + 1)
            last, _, mass = last_key(row, size, low, goal, best, heat, True, BLOCK)
            needed = tl.ceil(tl.maximum(goal - mass, 0.0) / tl.maximum(weight_of(last, best, heat), 1e-38))
            ties = tl.minimum(needed, size * 1.0).to(tl.int32)
            ties = tl.where(last == limited, tl.minimum(ties, limited_ties), ties)

        floor = tl.load(min_p + index)
        total = 0.0
        before = 0
        for start in range(0, size, BLOCK):
            weight, before = kept_weights(row, size, start, last, ties, before, floor, best, heat, BLOCK)
            total += tl.sum(weight, axis=0)
        goal = tl.load(uniform + index) * total
        running = 0.0
        before = 0
        token = size
        latest = 0
        for start in range(0, size, BLOCK):
            weight, before = kept_weights(row, size, start, last, ties, before, floor, best, heat, BLOCK)
            columns = start + tl.arange(0, BLOCK)
            passed = (running + tl.cumsum(weight, axis=0) > goal) & (weight > 0)
            token = tl.minimum(token, tl.min(tl.where(passed, columns, size), axis=0))
            latest = tl.maximum(latest, tl.max(tl.where(weight > 0, columns, 0), axis=0))
            running += tl.sum(weight, axis=0)
        token = tl.minimum(token, latest)  # where rounding let the running sum stop short of the goal
    tl.store(out + index, token.to(tl.int64))


@triton.jit
def weight_of(key, best, heat):
    """The weight of a token with this key."""
    bits = tl.where(key < 0, key ^ 0x7FFFFFFF, key)
    logit = bits.to(tl.float32, bitcast=True)
    return tl.where(logit > float("-inf"), tl.exp((logit - best) / heat), 0.0)


def choose(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, uniform: Tensor) -> Tensor:
    """[L] int64 tokens for `logits` [L, V] float32: what engine.sampling.choose gives, on any device."""
    out = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    choose_kernel[(len(logits),)](
        logits,
        temperature,
        top_k,
        top_p,
        min_p,
        uniform,
        out,
        logits.stride(0),
        logits.shape[1],
        BLOCK=BLOCK,
        num_warps=WARPS,
    )
    return out
