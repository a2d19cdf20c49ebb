"""Norms and rotary embedding of queries and keys, and the KV write, in one pass over what the projection gave."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.backends.base import HeadNorms
from engine.batch import BLOCK_TOKENS


@triton.jit
def rotate_and_store_kernel(
    mixed, query_norm, key_norm, rotations, pool, slots, heads, kv_heads, size, eps,
    NORMED: tl.constexpr, BLOCK_TOKENS: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """Grid (T): a program turns the heads of one token. HEADS and HALF are powers of two, no less than heads and pairs.

    mixed is [T, heads + 2 * kv_heads, size] contiguous: queries, keys, values; rotations [T, size / 2, 2] float32,
    cosine and sine; pool [blocks, 2 * kv_heads, BLOCK_TOKENS, size]; slots [T] int64. Queries are turned in place. With
    NORMED, the norms are [size] float32.
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
    is_query, is_key = (head < heads) & inside, (head >= heads) & (head < heads + kv_heads) & inside
    if NORMED:
        inverse = 1 / tl.sqrt(tl.sum(a * a + b * b, axis=1) / size + eps)[:, None]
        for_query, for_key = query_norm + 2 * pair + 0 * head, key_norm + 2 * pair + 0 * head
        weight_a = tl.load(for_query, mask=is_query, other=0.0) + tl.load(for_key, mask=is_key, other=0.0)
        weight_b = tl.load(for_query + 1, mask=is_query, other=0.0) + tl.load(for_key + 1, mask=is_key, other=0.0)
        a = tl.where(is_query | is_key, a * inverse * weight_a, a)
        b = tl.where(is_query | is_key, b * inverse * weight_b, b)
    angle = rotations + token * size + 2 * pair
    cosine = tl.load(angle + 0 * head, mask=is_query | is_key, other=1.0)
    sine = tl.load(angle + 0 * head + 1, mask=is_query | is_key, other=0.0)
    first, second = a * cosine - b * sine, a * sine + b * cosine

    tl.store(even, first.to(mixed.dtype.element_ty), mask=is_query)
    tl.store(even + 1, second.to(mixed.dtype.element_ty), mask=is_query)
    slot = tl.load(slots + token)
    row = (slot // BLOCK_TOKENS * 2 * kv_heads + head - heads) * BLOCK_TOKENS + slot % BLOCK_TOKENS
    stored = (head >= heads) & inside
    tl.store(pool + row * size + 2 * pair, first.to(pool.dtype.element_ty), mask=stored)
    tl.store(pool + row * size + 2 * pair + 1, second.to(pool.dtype.element_ty), mask=stored)


def rotate_and_store(
    mixed: Tensor, heads: int, norms: HeadNorms | None, rotations: Tensor, pool: Tensor, slots: Tensor
) -> None:
    """Turn the queries of [T, heads + 2 * kv heads, D] in place; turned keys, and values, go to the pool's `slots` [T].

    `rotations` [T, 1, D / 2] complex64 turn neighbouring pairs; `pool` is [blocks, 2 * kv heads, 16, D].
    """
    tokens, all_heads, size = mixed.shape
    rotate_and_store_kernel[(tokens,)](
        mixed, norms.query if norms else mixed, norms.key if norms else mixed, torch.view_as_real(rotations), pool,
        slots, heads, (all_heads - heads) // 2, size, norms.eps if norms else 0.0, NORMED=norms is not None,
        BLOCK_TOKENS=BLOCK_TOKENS, **launch_constants(all_heads, size),
    )  # fmt: skip


def launch_constants(all_heads: int, size: int) -> dict[str, int]:
    """Of rotate_and_store_kernel."""
    heads, half = triton.next_power_of_2(all_heads), triton.next_power_of_2(size // 2)
    return {"HEADS": heads, "HALF": half, "num_warps": min(max(heads * half // 512, 1), 16)}
