"""The CPU op by op: torch and oneDNN, few and large operations, indices worked out once a step.

float32 is the reference and bfloat16 the fast path of machines without int8 dot products. int8 is here for machines
that have those but no C++ compiler; with one, engine.native runs int8 steps whole.
"""

import functools
from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from engine.backends.attention import AttentionPlan
from engine.backends.base import Activation, Embedding, HeadNorms, Linear
from engine.backends.linear import BFloat16Linear, Float32Linear, Int8Linear
from engine.batch import FlatBatch
from engine.sampling import choose

LinearKind = Callable[[Tensor, Tensor | None], Linear]
LINEARS: dict[str, LinearKind] = {"float32": Float32Linear, "bfloat16": BFloat16Linear, "int8": Int8Linear}


@functools.cache
def _root(number: float) -> Tensor:
    return torch.tensor(number**0.5)


class CpuBackend:
    """`dtype`: a key of LINEARS. Keys and values are float32 with float32, else bfloat16."""

    device = torch.device("cpu")

    def __init__(self, dtype: str) -> None:
        self._linear = LINEARS[dtype]
        self.kv_dtype = torch.float32 if dtype == "float32" else torch.bfloat16

    def linear(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        return self._linear(weight, bias)

    def head(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        return self.linear(weight, bias)

    def embedding(self, table: Tensor, head: Linear | None) -> Embedding:
        stored = table.to(self.kv_dtype)
        return lambda token_ids: stored.index_select(0, token_ids).to(torch.float32, copy=True)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        # F.rms_norm is seven operations on the CPU. sqrt(sum of squares + n * eps) is the hypotenuse of two lengths.
        size = x.shape[-1]
        length = torch.hypot(torch.linalg.vector_norm(x, dim=-1, keepdim=True), _root(size * eps))
        return (x * weight).mul_(length.reciprocal_().mul_(size**0.5))

    def add_rms_norm(self, residual: Tensor, delta: Tensor, weight: Tensor, eps: float) -> Tensor:
        return self.rms_norm(residual.add_(delta), weight, eps)

    def gate(self, gate_up: Tensor, activation: Activation) -> Tensor:
        half = gate_up.shape[-1] // 2
        gate, up = gate_up[:, :half], gate_up[:, half:]
        return (F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")).mul_(up)

    def new_kv(self, num_slots: int, num_kv_heads: int, head_dim: int) -> Tensor:
        """[num_slots, 2 * kv heads, head_dim], keys then values: one write a layer, and runs of blocks are slices."""
        # numpy's zeros are pages that the kernel hands out on first use: the pool takes memory only as it fills.
        shape = num_slots, 2 * num_kv_heads, head_dim * self.kv_dtype.itemsize
        return torch.from_numpy(np.zeros(shape, dtype=np.uint8)).view(self.kv_dtype)

    def plan(self, batch: FlatBatch) -> AttentionPlan:
        return AttentionPlan(batch, self.kv_dtype)

    def rotate_and_store(
        self, mixed: Tensor, heads: int, norms: HeadNorms | None, rotations: Tensor, pool: Tensor, plan: AttentionPlan
    ) -> None:
        key_end = heads + pool.shape[1] // 2
        if norms is not None:
            for part, weight in ((mixed[:, :heads], norms.query), (mixed[:, heads:key_end], norms.key)):
                part.copy_(self.rms_norm(part, weight, norms.eps))
        turned = mixed[:, :key_end]
        torch.view_as_complex(turned.view(*turned.shape[:2], -1, 2)).mul_(rotations)
        pool.index_copy_(0, plan.slot_mapping, mixed[:, heads:].to(self.kv_dtype))

    def attend(
        self,
        queries: Tensor,
        pool: Tensor,
        plan: AttentionPlan,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
    ) -> Tensor:
        return plan.attend(queries, pool, scale, window, softcap)

    def choose(
        self, logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, uniform: Tensor
    ) -> Tensor:
        return choose(logits, temperature, top_k, top_p, min_p, uniform)
