"""Rotary embedding of queries and keys, and the KV write, in one pass over what the projection gave."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.batch import BLOCK_TOKENS


@triton.jit
def rotate_and_store_kernel(
    mixed, rotations, pool, slots, heads, kv_heads, size,
    BLOCK_TOKENS: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """Grid (T): a program turns the heads of one token. HEADS and HALF are powers of two, no less than heads and pairs.

    mixed is [T, heads + 2 * kv_heads, size] contiguous: queries, keys, values; rotations [T, size / 2, 2] float32,
    cosine and sine; pool [blocks, 2 * kv_heads, BLOCK_TOKENS, size]; slots [T] int64. Queries are turned in place.
    Bytes: mixed read once, queries and the pool's new tokens written, T * size * 4 of rotations.
    """
    token = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, HEADS)[:, None]
    pair = tl.arange(0, HALF)[None, :]
    inside = (head < heads + 2 * kv_heads) & (pair < size // 2)
    # A thread loads both elements of the pairs that it stores, so turning in place needs no barrier.
    even = mixed + (token * (heads + 2 * kv_heads) + head) * size + 2 * pair
    a = tl.load(even, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(even + 1, mask=inside, other=0.0).to(tl.float32)
    angle = rotations + token * size + 2 * pair
    turning = (head < heads + kv_heads) & inside
    cosine = tl.load(angle + 0 * head, mask=turning, other=1.0)
    sine = tl.load(angle + 0 * head + 1, mask=turning, other=0.0)
    first, second = a * cosine - b * sine, a * sine + b * cosine

    query = (head < heads) & inside
    tl.store(even, first.to(mixed.dtype.element_ty), mask=query)
    tl.store(even + 1, second.to(mixed.dtype.element_ty), mask=query)
    slot = tl.load(slots + token)
    row = (slot // BLOCK_TOKENS * 2 * kv_heads + head - heads) * BLOCK_TOKENS + slot % BLOCK_TOKENS
    stored = (head >= heads) & inside
    tl.store(pool + row * size + 2 * pair, first.to(pool.dtype.element_ty), mask=stored)
    tl.store(pool + row * size + 2 * pair + 1, second.to(pool.dtype.element_ty), mask=stored)


def rotate_and_store(mixed: Tensor, heads: int, rotations: Tensor, pool: Tensor, slots: Tensor) -> None:
    """Turn the queries of [T, heads + 2 * kv heads, D] in place; turned keys, and values, go to the pool's `slots` [T].

    `rotations` [T, 1, D / 2] complex64 turn neighbouring pairs; `pool` is [blocks, 2 * kv heads, 16, D].
    """
    tokens, all_heads, size = mixed.shape
    rotate_and_store_kernel[(tokens,)](
        mixed, torch.view_as_real(rotations), pool, slots, heads, (all_heads - heads) // 2, size,
        BLOCK_TOKENS=BLOCK_TOKENS, **launch_constants(all_heads, size),
    )  # fmt: skip


def launch_constants(all_heads: int, size: int) -> dict[str, int]:
    """Of rotate_and_store_kernel."""
    heads, half = triton.next_power_of_2(all_heads), triton.next_power_of_2(size // 2)
    return {"HEADS": heads, "HALF": half, "num_warps": min(max(heads * half // 512, 1), 16)}
