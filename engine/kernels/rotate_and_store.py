"""Rotary embedding of queries and keys, and the KV write, in one pass over what the projection gave."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.batch import BLOCK_TOKENS


@triton.jit
def rotate_and_store_kernel(
    mixed, rotations, pool, slots, heads, kv_heads, size, BLOCK_TOKENS: tl.constexpr, HALF: tl.constexpr
):  # fmt: skip
    """Grid (T, heads + 2 * kv_heads): a program turns one head of one token.

    mixed is [T, heads + 2 * kv_heads, size] contiguous: queries, keys, values; rotations [T, size / 2, 2] float32,
    cosine and sine; pool [blocks, 2 * kv_heads, BLOCK_TOKENS, size]; slots [T] int64. Queries are turned in place.
    Bytes: mixed read once, queries and the pool's new tokens written, T * size * 4 of rotations.
    """
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    pair = tl.arange(0, HALF)
    inside = pair < size // 2
    # A thread loads both elements of the pairs that it stores, so turning in place needs no barrier.
    even = mixed + (token * (heads + 2 * kv_heads) + head) * size + 2 * pair
    a = tl.load(even, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(even + 1, mask=inside, other=0.0).to(tl.float32)
    if head < heads + kv_heads:
        angle = rotations + token * size + 2 * pair
        cosine = tl.load(angle, mask=inside, other=0.0)
        sine = tl.load(angle + 1, mask=inside, other=0.0)
        turned = a * cosine - b * sine
        b = a * sine + b * cosine
        a = turned
    if head < heads:
        tl.store(even, a.to(mixed.dtype.element_ty), mask=inside)
        tl.store(even + 1, b.to(mixed.dtype.element_ty), mask=inside)
    else:
        slot = tl.load(slots + token)
        row = (slot // BLOCK_TOKENS * 2 * kv_heads + head - heads) * BLOCK_TOKENS + slot % BLOCK_TOKENS
        place = pool + row * size + 2 * pair
        tl.store(place, a.to(pool.dtype.element_ty), mask=inside)
        tl.store(place + 1, b.to(pool.dtype.element_ty), mask=inside)


def rotate_and_store(mixed: Tensor, heads: int, rotations: Tensor, pool: Tensor, slots: Tensor) -> None:
    """Turn the queries of [T, heads + 2 * kv heads, D] in place; turned keys, and values, go to the pool's `slots` [T].

    `rotations` [T, 1, D / 2] complex64 turn neighbouring pairs; `pool` is [blocks, 2 * kv heads, 16, D].
    """
    tokens, all_heads, size = mixed.shape
    rotate_and_store_kernel[(tokens, all_heads)](
        mixed, torch.view_as_real(rotations), pool, slots, heads, (all_heads - heads) // 2, size,
        BLOCK_TOKENS=BLOCK_TOKENS, HALF=triton.next_power_of_2(size // 2), num_warps=1,
    )  # fmt: skip
