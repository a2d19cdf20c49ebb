"""Paged attention on the CPU with torch's fused kernel.

Sequences that decode one token go together, padded to the longest of their group. A sequence with several new tokens
(or alone in its group) gets a call of its own. Keys and values that lie in neighbouring blocks
are read in place, others are gathered. Query heads that share a key head ride along a broadcast dimension, so nothing
is repeated.
"""

from collections import defaultdict

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from engine.batch import BLOCK_TOKENS, FlatBatch

SMALLEST_GROUP_BITS = 4
"""Decoding sequences group by the bit length of their block count (so padding less than doubles the work), but all
below 2 ** 4 blocks go together."""


class AttentionPlan:
    """How one batch's rows attend; built once a step, used by every layer."""

    def __init__(self, batch: FlatBatch, dtype: torch.dtype) -> None:
        self.slot_mapping = batch.slot_mapping
        self.groups: list[OneSequence | DecodingGroup] = []
        decoding: dict[int, list[int]] = defaultdict(list)
        for sequence, context in enumerate(batch.context_lens):
            if batch.query_starts[sequence + 1] - batch.query_starts[sequence] > 1:
                self.groups.append(OneSequence(batch, sequence, dtype))
            else:
                decoding[max(SMALLEST_GROUP_BITS, _blocks(context).bit_length())].append(sequence)
        for members in decoding.values():
            if len(members) == 1:
                self.groups.append(OneSequence(batch, members[0], dtype))
            else:
                self.groups.append(DecodingGroup(batch, members, dtype))

    def attend(
        self, queries: Tensor, pool: Tensor, scale: float, window: int | None, softcap: float | None = None
    ) -> Tensor:
        """[T, H, D] float32 queries over a [slots, 2 * kv heads, D] pool: [T, H * D] float32."""
        if len(self.groups) == 1:
            return self.groups[0].attend(queries, pool, scale, window, softcap)
        out = torch.empty(len(queries), queries.shape[1] * queries.shape[2])
        for group in self.groups:
            out[group.rows] = group.attend(queries[group.rows], pool, scale, window, softcap)
        return out


class OneSequence:
    """One sequence with n new tokens, after `context - n` cached ones."""

    def __init__(self, batch: FlatBatch, sequence: int, dtype: torch.dtype) -> None:
        self.rows = slice(batch.query_starts[sequence], batch.query_starts[sequence + 1])
        self.count, self.context, self.dtype = self.rows.stop - self.rows.start, batch.context_lens[sequence], dtype
        self.blocks = batch.block_tables[sequence, : _blocks(self.context)]
        first = int(self.blocks[0])
        run = torch.arange(first, first + len(self.blocks), dtype=self.blocks.dtype)
        self.first_slot = first * BLOCK_TOKENS if torch.equal(self.blocks, run) else None
        self.masks: dict[int | None, Tensor | None] = {}

    def attend(self, queries: Tensor, pool: Tensor, scale: float, window: int | None, softcap: float | None) -> Tensor:
        """[n, H, D] to [n, H * D]"""
        queries = queries.to(self.dtype)
        if self.first_slot is not None:
            keys_values = pool[self.first_slot : self.first_slot + self.context]
        else:
            gathered = pool.view(-1, BLOCK_TOKENS * pool[0].numel()).index_select(0, self.blocks)
            keys_values = gathered.view(-1, *pool.shape[1:])[: self.context]
        kv_heads = pool.shape[1] // 2
        if self.count == 1:  # the query heads of one key head stand where rows would: a quarter of the time
            heads = queries.view(1, kv_heads, -1, queries.shape[2])
            by_head = keys_values.transpose(0, 1)[None]
            keys, values = by_head[:, :kv_heads], by_head[:, kv_heads:]
            out = _attention(heads, keys, values, self._mask(window), scale, softcap)
            return out.float().flatten(1)
        # [kv heads as batch, query heads of each, tokens, D]
        grouped = queries.view(len(queries), kv_heads, -1, queries.shape[2]).permute(1, 2, 0, 3)
        shared = keys_values.view(self.context, 2, kv_heads, -1).permute(1, 2, 0, 3)[:, :, None]
        keys, values = shared.expand(-1, -1, grouped.shape[1], -1, -1)
        if self.count == self.context and self._windowless(window) and softcap is None:
            out = F.scaled_dot_product_attention(grouped, keys, values, is_causal=True, scale=scale)
        else:
            out = _attention(grouped, keys, values, self._mask(window), scale, softcap)
        return out.permute(2, 0, 1, 3).float().flatten(1)

    def _windowless(self, window: int | None) -> bool:
        return window is None or self.context <= window

    def _mask(self, window: int | None) -> Tensor | None:
        """[1, 1, n, context] of 0 and -inf; None when every key is seen."""
        if self.count == 1 and self._windowless(window):
            return None
        if window not in self.masks:
            distance = torch.arange(self.context - self.count, self.context)[:, None] - torch.arange(self.context)
            hidden = distance < 0 if window is None else (distance < 0) | (distance >= window)
            mask = torch.zeros(hidden.shape, dtype=self.dtype).masked_fill_(hidden, -torch.inf)
            self.masks[window] = mask[None, None]
        return self.masks[window]


class DecodingGroup:
    """Several sequences with one new token each, padded to the longest."""

    def __init__(self, batch: FlatBatch, members: list[int], dtype: torch.dtype) -> None:
        self.rows = _rows(batch, members)
        self.contexts = torch.tensor([batch.context_lens[sequence] for sequence in members])
        self.width = _blocks(int(self.contexts.max()))
        self.blocks = batch.block_tables[torch.tensor(members), : self.width].flatten()
        self.dtype = dtype
        self.masks: dict[int | None, Tensor] = {}

    def attend(self, queries: Tensor, pool: Tensor, scale: float, window: int | None, softcap: float | None) -> Tensor:
        """[S, H, D] to [S, H * D]"""
        queries = queries.to(self.dtype)
        kv_heads = pool.shape[1] // 2
        gathered = pool.view(-1, BLOCK_TOKENS * pool[0].numel()).index_select(0, self.blocks)
        keys_values = gathered.view(len(queries), self.width * BLOCK_TOKENS, *pool.shape[1:]).transpose(1, 2)
        # The query heads that share a key head stand where queries of one sequence would: [S, kv heads, n, D].
        grouped = queries.view(len(queries), kv_heads, -1, queries.shape[2])
        mask = self._mask(window).expand(-1, -1, grouped.shape[2], -1)
        keys, values = keys_values[:, :kv_heads], keys_values[:, kv_heads:]
        return _attention(grouped, keys, values, mask, scale, softcap).float().flatten(1)

    def _mask(self, window: int | None) -> Tensor:
        """[S, 1, 1, padded context] of 0 and -inf."""
        if window not in self.masks:
            distance = self.contexts[:, None] - 1 - torch.arange(self.width * BLOCK_TOKENS)
            hidden = distance < 0 if window is None else (distance < 0) | (distance >= window)
            mask = torch.zeros(hidden.shape, dtype=self.dtype).masked_fill_(hidden, -torch.inf)
            self.masks[window] = mask[:, None, None]
        return self.masks[window]


def _attention(
    queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float, softcap: float | None
) -> Tensor:
    """Over the last two dimensions of each. torch's fused kernel has no soft cap, so that one goes step by step."""
    if softcap is None:
        return F.scaled_dot_product_attention(queries, keys, values, mask, scale=scale)
    scores = (queries.float() @ keys.transpose(-1, -2).float()).mul_(scale / softcap).tanh_().mul_(softcap)
    if mask is not None:
        scores += mask.float()
    return (scores.softmax(-1) @ values.float()).to(queries.dtype)


def _blocks(tokens: int) -> int:
    return -(-tokens // BLOCK_TOKENS)


def _rows(batch: FlatBatch, members: list[int]) -> slice | Tensor:
    """The rows of sequences with one new token each, as a slice where they are neighbours."""
    rows = [batch.query_starts[sequence] for sequence in members]
    adjacent = rows == list(range(rows[0], rows[0] + len(rows)))
    return slice(rows[0], rows[0] + len(rows)) if adjacent else torch.tensor(rows)
