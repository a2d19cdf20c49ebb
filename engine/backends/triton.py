"""NVIDIA and AMD devices: Triton kernels, and torch's matrix products."""

from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from numpy.typing import NDArray
from torch import Tensor

from engine import kernels
from engine.backends.base import Activation, Embedding, HeadNorms, Linear
from engine.batch import BLOCK_TOKENS, FlatBatch
from engine.kernels.choose import choose
from engine.kernels.gate import gate
from engine.kernels.paged_attention import Tiles, paged_attention, rows_per_tile
from engine.kernels.rms_norm import rms_norm
from engine.kernels.rotate_and_store import rotate_and_store

Numbers = NDArray[np.int64]

SPLITS = (1, 4, 16)
"""Few numbers, because each makes a kernel of its own to compile."""

SPLIT_KEYS = 256
"""Fewest keys worth a program of their own."""


class PlainLinear:
    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight, self.bias = weight, bias

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


@dataclass(slots=True)
class Plan:
    """A batch's bookkeeping on the device. Tiles depend on the heads that share a key head, so on first use."""

    batch: FlatBatch
    query_starts: Tensor
    """[S + 1] int32"""
    context_lens: Tensor
    """[S] int32"""
    tiles: dict[int, tuple[Tiles, Tiles]] = field(default_factory=dict)
    """By shared heads: the tiles of short sequences, then of long ones."""


class TritonBackend:
    """Weights, activations and KV are `dtype`, on `device`: "cuda", or the CPU in Triton's interpreter."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        if device.type == "cpu" and not kernels.INTERPRETED:
            raise ValueError("Triton kernels run on the CPU with TRITON_INTERPRET=1 only: use the CPU backend")
        if device.index:
            raise ValueError("A process computes on its first device: choose that with CUDA_VISIBLE_DEVICES")
        self.kv_dtype, self.device = dtype, device
        self._processors = 1
        if device.type == "cuda":
            if not torch.cuda.is_available():
                raise ValueError(
                    "torch sees no GPU here: install its CUDA or ROCm build and the driver, or take the CPU"
                )
            self._processors = torch.cuda.get_device_properties(device).multi_processor_count

    def linear(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        return PlainLinear(self._placed(weight), None if bias is None else self._placed(bias))

    def head(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        return self.linear(weight, bias)

    def embedding(self, table: Tensor, head: Linear | None) -> Embedding:
        stored = head.weight if isinstance(head, PlainLinear) else self._placed(table)
        return lambda token_ids: stored.index_select(0, token_ids)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return rms_norm(x, weight, eps)

    def add_rms_norm(self, residual: Tensor, delta: Tensor, weight: Tensor, eps: float) -> Tensor:
        return rms_norm(residual, weight, eps, delta)

    def gate(self, gate_up: Tensor, activation: Activation) -> Tensor:
        return gate(gate_up, gelu=activation == "gelu")

    def new_kv(self, num_slots: int, num_kv_heads: int, head_dim: int) -> Tensor:
        """[blocks, 2 * kv heads, 16, head_dim], keys then values: what a program reads of a block is one piece."""
        shape = num_slots // BLOCK_TOKENS, 2 * num_kv_heads, BLOCK_TOKENS, head_dim
        return torch.zeros(shape, dtype=self.kv_dtype, device=self.device)

    def plan(self, batch: FlatBatch) -> Plan:
        return Plan(batch, self._int32(batch.query_starts), self._int32(batch.context_lens))

    def rotate_and_store(
        self, mixed: Tensor, heads: int, norms: HeadNorms | None, rotations: Tensor, pool: Tensor, plan: Plan
    ) -> None:
        rotate_and_store(mixed, heads, norms, rotations, pool, plan.batch.slot_mapping)

    def attend(
        self,
        queries: Tensor,
        pool: Tensor,
        plan: Plan,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
    ) -> Tensor:
        tokens, heads, size = queries.shape
        shared = 2 * heads // pool.shape[1]
        if shared not in plan.tiles:
            plan.tiles[shared] = self._tiles(plan.batch, shared)
        out = torch.empty(tokens, heads * size, dtype=queries.dtype, device=queries.device)
        for tiles in plan.tiles[shared]:
            if len(tiles.rows):
                paged_attention(
                    queries, pool, tiles, out, plan.query_starts, plan.context_lens, plan.batch.block_tables,
                    scale, window, softcap, self._splits(tiles, plan.batch, pool.shape[1] // 2, window),
                )  # fmt: skip
        return out

    def choose(
        self, logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, uniform: Tensor
    ) -> Tensor:
        return choose(logits, temperature, top_k, top_p, min_p, uniform)

    def _placed(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.device, self.kv_dtype)

    def _int32(self, values: object) -> Tensor:
        return torch.from_numpy(np.array(values, np.int32)).to(self.device)

    def _tiles(self, batch: FlatBatch, shared: int) -> tuple[Tiles, Tiles]:
        """Sequences with a tile's worth of new rows or fewer get one small tile, the others large ones."""
        few, many = (rows_per_tile(shared, decoding=decoding) for decoding in (True, False))
        starts = np.array(batch.query_starts)
        short = np.diff(starts) <= few
        return self._cut(starts, np.flatnonzero(short), few), self._cut(starts, np.flatnonzero(~short), many)

    def _cut(self, starts: Numbers, sequences: Numbers, size: int) -> Tiles:
        counts = -(-(starts[sequences + 1] - starts[sequences]) // size)
        own = np.repeat(sequences, counts)
        number = np.arange(len(own)) - np.repeat(np.cumsum(counts) - counts, counts)
        return Tiles(size, self._int32(own), self._int32(starts[own] + number * size))

    def _splits(self, tiles: Tiles, batch: FlatBatch, kv_heads: int, window: int | None) -> int:
        """Into how many programs to split each tile's keys so that the device has work for all its processors."""
        longest = max(batch.context_lens)
        keys = longest if window is None else min(longest, window)
        useful = min(2 * self._processors // (len(tiles.rows) * kv_heads), keys // SPLIT_KEYS)
        return max(splits for splits in SPLITS if splits <= max(useful, 1))
