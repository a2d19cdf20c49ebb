"""What a model asks of a device. T is the step's tokens, H heads, D head size.

Activations are of the type that the backend's embedding gives: float32 on the CPU, the weights' own on the others. All
tensors that an operation takes and gives lie on the backend's device; `linear` and `embedding` bring theirs there.
"""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from engine.batch import FlatBatch

Activation = Literal["silu", "gelu"]
"""GELU in its tanh form."""

Linear = Callable[[Tensor], Tensor]
"""[T, K] to a new [T, N], bias added."""

Embedding = Callable[[Tensor], Tensor]
"""[T] token ids to [T, hidden], a new tensor."""


class WeightStore(Protocol):
    """What a checkpoint is read into."""

    def linear(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        """A weight [N, K] with its optional bias [N], stored as the backend likes it."""

    def head(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        """The same for the output head, which is quantised less if at all."""

    def embedding(self, table: Tensor, head: Linear | None) -> Embedding:
        """[vocab, hidden] float32; `head` has been made from the same table where the model ties the two."""


class HeadNorms(NamedTuple):
    """RMSNorm weights [D] float32 of every query and every key head."""

    query: Tensor
    key: Tensor
    eps: float


class Backend(WeightStore, Protocol):
    kv_dtype: torch.dtype
    device: torch.device

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Normalise the last dimension; a new tensor of x's shape (Zhang and Sennrich, 2019).

        x is [T, size], `weight` float32.
        """

    def add_rms_norm(self, residual: Tensor, delta: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Add `delta` to `residual` in place; the sum's norm as a new tensor."""

    def gate(self, gate_up: Tensor, activation: Activation) -> Tensor:
        """[T, 2N] to activation(first half) * second half, [T, N]."""

    def new_kv(self, num_slots: int, num_kv_heads: int, head_dim: int) -> Tensor:
        """One layer's KV pool, in the backend's own layout."""

    def plan(self, batch: FlatBatch) -> Any:
        """What attention needs to know of a batch, worked out once for all layers."""

    def rotate_and_store(
        self, mixed: Tensor, heads: int, norms: HeadNorms | None, rotations: Tensor, pool: Tensor, plan: Any
    ) -> None:
        """`mixed` is [T, heads + 2 * kv heads, D]: queries, keys, values.

        Normalise queries and keys where there are norms, turn their neighbouring pairs by [T, 1, D / 2] complex
        factors, the queries in place, and store keys and values in the batch's slots. Nothing may be asked of `mixed`'s
        keys and values afterwards.
        """

    def attend(
        self, queries: Tensor, pool: Tensor, plan: Any, scale: float, window: int | None, softcap: float | None
    ) -> Tensor:
        """Causal attention of [T, H, D] over each row's own sequence, seeing the last `window` keys: [T, H * D].

        With `softcap`, scaled scores s become softcap * tanh(s / softcap).
        """

    def choose(
        self, logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, uniform: Tensor
    ) -> Tensor:
        """The next token of each row of `logits` [L, V] float32, [L] int64: see engine.sampling.choose."""
