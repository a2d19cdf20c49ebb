"""The CPU backend: torch and oneDNN, few and large operations, indices worked out once a step."""

import functools
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from engine.backends.attention import AttentionPlan
from engine.backends.base import Linear
from engine.backends.linear import BFloat16Linear, Float32Linear, Int8Linear
from engine.batch import FlatBatch
from engine.native import Kernels

DType = Literal["float32", "bfloat16", "int8"]


def default_dtype() -> DType:
    """The fastest that is exact enough on this machine: int8 needs dot products that do not saturate (VNNI or AMX)."""
    able = torch.cpu.get_capabilities()
    return "int8" if able.get("avx512_vnni") or able.get("amx_int8") else "bfloat16"


@functools.cache
def _root(number: float) -> Tensor:
    return torch.tensor(number**0.5)


class CpuBackend:
    """`native`: the compiled kernels, or None for torch alone. float32 is the reference and always torch alone."""

    def __init__(self, dtype: DType, native: Kernels | None = None) -> None:
        self.dtype = dtype
        self.kv_dtype = torch.float32 if dtype == "float32" else torch.bfloat16
        self.native = None if dtype == "float32" else native

    def linear(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        if self.dtype == "int8":
            return Int8Linear(weight, bias, self.native)
        return BFloat16Linear(weight, bias) if self.dtype == "bfloat16" else Float32Linear(weight, bias)

    def embedding(self, table: Tensor) -> Tensor:
        return table.to(self.kv_dtype)

    def embed(self, table: Tensor, token_ids: Tensor) -> Tensor:
        return table.index_select(0, token_ids).float()

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        if self.native is not None:
            return self.native.rms_norm(x, weight, eps)
        # F.rms_norm is seven operations on the CPU. sqrt(sum of squares + n * eps) is the hypotenuse of two lengths.
        size = x.shape[-1]
        length = torch.hypot(torch.linalg.vector_norm(x, dim=-1, keepdim=True), _root(size * eps))
        return (x * weight).mul_(length.reciprocal_().mul_(size**0.5))

    def silu_gate(self, gate_up: Tensor) -> Tensor:
        half = gate_up.shape[-1] // 2
        return F.silu(gate_up[:, :half]).mul_(gate_up[:, half:])

    def gelu_gate(self, gate_up: Tensor) -> Tensor:
        half = gate_up.shape[-1] // 2
        return F.gelu(gate_up[:, :half], approximate="tanh").mul_(gate_up[:, half:])

    def rotate(self, heads: Tensor, rotations: Tensor) -> None:
        torch.view_as_complex(heads.view(*heads.shape[:2], -1, 2)).mul_(rotations)

    def new_kv(self, num_slots: int, num_kv_heads: int, head_dim: int) -> Tensor:
        """[num_slots, 2 * kv heads, head_dim], keys then values: one write a layer, and runs of blocks are slices."""
        # numpy's zeros are pages that the kernel hands out on first use: the pool takes memory only as it fills.
        shape = num_slots, 2 * num_kv_heads, head_dim * self.kv_dtype.itemsize
        return torch.from_numpy(np.zeros(shape, dtype=np.uint8)).view(self.kv_dtype)

    def write_kv(self, pool: Tensor, keys_values: Tensor, plan: AttentionPlan) -> None:
        pool.index_copy_(0, plan.slot_mapping, keys_values.to(self.kv_dtype))

    def plan(self, batch: FlatBatch) -> AttentionPlan:
        return AttentionPlan(batch, self.kv_dtype, self.native)

    def attend(
        self, queries: Tensor, pool: Tensor, plan: AttentionPlan, scale: float, window: int | None = None
    ) -> Tensor:
        return plan.attend(queries, pool, scale, window)
