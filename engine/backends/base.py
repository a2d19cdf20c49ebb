"""What a model asks of a device. T is the step's tokens, H heads, D head size; activations are float32."""

from typing import Any, Protocol

import torch
from torch import Tensor

from engine.batch import FlatBatch


class Linear(Protocol):
    """A weight [N, K] with its optional bias [N], stored as the backend likes it."""

    def __call__(self, x: Tensor) -> Tensor:
        """[T, K] to a new [T, N]."""

    def add_to(self, residual: Tensor, x: Tensor) -> None:
        """Add the product of [T, K] to [T, N] in place."""


class Backend(Protocol):
    kv_dtype: torch.dtype

    def linear(self, weight: Tensor, bias: Tensor | None = None) -> Linear: ...

    def embedding(self, table: Tensor) -> Tensor:
        """The table as `embed` wants it."""

    def embed(self, table: Tensor, token_ids: Tensor) -> Tensor:
        """[T] ids to [T, hidden]."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Normalise the last dimension; a new tensor of x's shape (Zhang and Sennrich, 2019)."""

    def silu_gate(self, gate_up: Tensor) -> Tensor:
        """[T, 2N] to silu(first half) * second half, [T, N]."""

    def gelu_gate(self, gate_up: Tensor) -> Tensor:
        """The same with GELU in its tanh form."""

    def rotate(self, heads: Tensor, rotations: Tensor) -> None:
        """Turn the neighbouring pairs of [T, H, D] in place by [T, 1, D / 2] complex factors."""

    def new_kv(self, num_slots: int, num_kv_heads: int, head_dim: int) -> Tensor:
        """One layer's KV pool, in the backend's own layout."""

    def write_kv(self, pool: Tensor, keys_values: Tensor, plan: Any) -> None:
        """Store [T, 2 * kv heads, D] (keys, then values) in the batch's slots."""

    def plan(self, batch: FlatBatch) -> Any:
        """What attention needs to know of a batch, worked out once for all layers."""

    def attend(self, queries: Tensor, pool: Tensor, plan: Any, scale: float, window: int | None = None) -> Tensor:
        """Causal attention of [T, H, D] over each row's own sequence, seeing the last `window` keys: [T, H * D]."""
