"""Paged attention over the flat batch: one kernel for decoding rows and prefill chunks, its softmax computed online.

A tile is a few neighbouring rows of one sequence, with all query heads that share a key head: its keys and values are
read once for all of them. Where there are too few tiles to fill the device, the keys of each are split among several
programs, and a second kernel joins their results (Dao et al., 2023, "Flash-Decoding").
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.batch import BLOCK_TOKENS
from engine.kernels import INTERPRETED

LOG2_E = 1.4426950408889634

NO_WINDOW = 2**30
"""More tokens than any context has."""


@triton.jit(do_not_specialize=["table_stride"])
def paged_attention_kernel(
    queries, pool, out, lse, tile_sequences, tile_rows, query_starts, context_lens, block_tables,
    query_stride, table_stride, kv_heads, shared, size, scale, window, softcap,
    SOFTCAP: tl.constexpr, SPLITS: tl.constexpr, BLOCK_TOKENS: tl.constexpr, DOT: tl.constexpr,
    ROWS: tl.constexpr, GROUP: tl.constexpr, KEYS: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """Grid (tiles, kv_heads, SPLITS): ROWS rows x GROUP heads of queries against KEYS keys at a time.

    queries [T, kv_heads * shared, size] with `query_stride` elements between tokens; pool [blocks, 2 * kv_heads,
    BLOCK_TOKENS, size]; out [T, heads, SPLITS, size]; lse [T, heads, SPLITS] float32, base-2 logarithms of the sums
    (unused with one split). Tile i is rows tile_rows[i] onwards of sequence tile_sequences[i]. GROUP and DIM are shared
    and size, rounded up to powers of two; DOT is the type that products are taken in. Scores are
    of base 2: `scale` has the factor for it, but where a soft cap comes between.

    Bytes: each tile reads 2 * kv_heads * size elements per key it sees, so a decoding step reads the context of every
    sequence once; queries and out are small beside that. FLOPs: 4 * heads * size per row and key.
    """
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    sequence = tl.load(tile_sequences + tl.program_id(0))
    first_row = tl.load(tile_rows + tl.program_id(0))
    end_row = tl.load(query_starts + sequence + 1)
    context = tl.load(context_lens + sequence)

    member = tl.arange(0, ROWS * GROUP)
    row = first_row + member // GROUP
    head = kv_head * shared + member % GROUP
    valid = (row < end_row) & (member % GROUP < shared)
    position = context - end_row + row
    dims = tl.arange(0, DIM)
    inside = dims < size
    query_place = queries + row.to(tl.int64)[:, None] * query_stride + head[:, None] * size + dims[None, :]
    query = tl.load(query_place, mask=valid[:, None] & inside[None, :], other=0.0).to(DOT)

    first_position = context - end_row + first_row
    key_end = tl.minimum(first_position + ROWS, context)
    key_start = tl.maximum(first_position - window + 1, 0) // KEYS * KEYS
    if SPLITS > 1:
        span = tl.cdiv(tl.cdiv(key_end - key_start, SPLITS), KEYS) * KEYS
        key_start += split * span
        key_end = tl.minimum(key_start + span, key_end)

    # A row that has seen no key yet keeps this maximum: what it sums up meanwhile vanishes when the first key comes.
    highest = tl.full([ROWS * GROUP], -1e30, tl.float32)
    total = tl.zeros([ROWS * GROUP], tl.float32)
    mixed = tl.zeros([ROWS * GROUP, DIM], tl.float32)
    for start in range(key_start, key_end, KEYS):
        key_position = start + tl.arange(0, KEYS)
        exists = key_position < key_end
        block = tl.load(block_tables + sequence * table_stride + key_position // BLOCK_TOKENS, mask=exists, other=0)
        place = (block.to(tl.int64) * 2 * kv_heads + kv_head) * BLOCK_TOKENS + key_position % BLOCK_TOKENS
        place = pool + place[:, None] * size + dims[None, :]
        needed = exists[:, None] & inside[None, :]
        key = tl.load(place, mask=needed, other=0.0).to(DOT)
        score = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
        if SOFTCAP:  # tanh x = 2 sigmoid(2 x) - 1
            score = softcap * 1.4426950408889634 * (2 * tl.sigmoid(2 * score / softcap) - 1)
        distance = position[:, None] - key_position[None, :]
        score = tl.where((distance >= 0) & (distance < window), score, -1e30)
        new_highest = tl.maximum(highest, tl.max(score, axis=1))
        weight = tl.exp2(score - new_highest[:, None])
        shrink = tl.exp2(highest - new_highest)
        total = total * shrink + tl.sum(weight, axis=1)
        value = tl.load(place + kv_heads * BLOCK_TOKENS * size, mask=needed, other=0.0).to(DOT)
        mixed = mixed * shrink[:, None] + tl.dot(weight.to(DOT), value, input_precision="ieee")
        highest = new_highest

    slot = (row.to(tl.int64) * kv_heads * shared + head) * SPLITS + split
    divisor = tl.where(total > 0, total, 1.0)
    mixed = mixed / divisor[:, None]
    out_place = out + slot[:, None] * size + dims[None, :]
    tl.store(out_place, mixed.to(out.dtype.element_ty), mask=valid[:, None] & inside[None, :])
    if SPLITS > 1:
        tl.store(lse + slot, tl.where(total > 0, highest + tl.log2(divisor), -1e30), mask=valid)


@triton.jit
def join_splits_kernel(
    parts, lse, out, tile_sequences, tile_rows, query_starts, heads, size,
    SPLITS: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """Grid (tiles * ROWS, heads): the weighted mean of parts [T, heads, SPLITS, size], to out [T, heads, size].

    Bytes: SPLITS * (size + 1) float32 read and size elements written, a row and head.
    """
    tile = tl.program_id(0) // ROWS
    row = tl.load(tile_rows + tile) + tl.program_id(0) % ROWS
    if row >= tl.load(query_starts + tl.load(tile_sequences + tile) + 1):
        return
    slot = row.to(tl.int64) * heads + tl.program_id(1)
    split = tl.arange(0, SPLITS)
    dims = tl.arange(0, DIM)
    inside = dims < size
    weight = tl.load(lse + slot * SPLITS + split)
    weight = tl.exp2(weight - tl.max(weight, axis=0))
    place = parts + (slot * SPLITS + split)[:, None] * size + dims[None, :]
    part = tl.load(place, mask=inside[None, :], other=0.0)
    mean = tl.sum(part * weight[:, None], axis=0) / tl.sum(weight, axis=0)
    tl.store(out + slot * size + dims, mean.to(out.dtype.element_ty), mask=inside)


def paged_attention(
    queries: Tensor,
    pool: Tensor,
    tiles: "Tiles",
    out: Tensor,
    query_starts: Tensor,
    context_lens: Tensor,
    block_tables: Tensor,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    splits: int = 1,
) -> None:
    """Attend the rows of `tiles` in [T, H, D] `queries`, whose heads lie together; `out` is [T, H, D], contiguous.

    `pool` is [blocks, 2 * kv heads, 16, D]; `query_starts` [S + 1], `context_lens` [S] and `block_tables` [S, B] are
    int32, as in FlatBatch. `splits`, a power of two, programs share the keys of each tile.
    """
    heads, size = queries.shape[1:]
    kv_heads = pool.shape[1] // 2
    parts, lse = out, context_lens
    if splits > 1:
        parts = torch.empty(len(queries), heads, splits, size, device=queries.device)
        lse = torch.empty(len(queries), heads, splits, device=queries.device)
    shared = heads // kv_heads
    constants = launch_constants(tiles.size, shared, size)
    paged_attention_kernel[(len(tiles.rows), kv_heads, splits)](
        queries, pool, parts, lse, tiles.sequences, tiles.rows, query_starts, context_lens, block_tables,
        queries.stride(0), block_tables.stride(0), kv_heads, shared, size,
        scale if softcap is not None else scale * LOG2_E, NO_WINDOW if window is None else window, softcap or 0.0,
        SOFTCAP=softcap is not None, SPLITS=splits, BLOCK_TOKENS=BLOCK_TOKENS, DOT=dot_type(pool), **constants,
    )  # fmt: skip
    if splits > 1:
        join_splits_kernel[(len(tiles.rows) * tiles.size, heads)](
            parts, lse, out, tiles.sequences, tiles.rows, query_starts, heads, size,
            SPLITS=splits, ROWS=tiles.size, DIM=constants["DIM"], num_warps=1,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Tiles:
    """Where the tiles of one launch begin: [N] int32 sequences and first rows. A tile has at most `size` rows."""

    size: int
    sequences: Tensor
    rows: Tensor


def rows_per_tile(shared: int, *, decoding: bool) -> int:
    """How many rows to take together where `shared` query heads share a key head: products take at least 16 of both."""
    rows: int = (16 if decoding else 64) // triton.next_power_of_2(shared)
    return max(1, rows)


def launch_constants(rows: int, shared: int, size: int) -> dict[str, int]:
    """Of paged_attention_kernel, such that what a thread holds fits its registers."""
    group, dim = triton.next_power_of_2(shared), max(16, triton.next_power_of_2(size))
    return {
        "ROWS": rows,
        "GROUP": group,
        "KEYS": 64 if dim <= 128 else 32,
        "DIM": dim,
        "num_warps": 8 if rows * group >= 64 else 4,
    }


def dot_type(pool: Tensor) -> tl.dtype:
    """What products are taken in. The interpreter has bfloat16 as bits, and would multiply those."""
    if INTERPRETED:
        return tl.float32
    return {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}[pool.dtype]
