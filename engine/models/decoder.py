"""The transformer decoder that every family here is a case of: its weights, and one step of it, op by op.

A family (llama.py, gemma.py) only says which parts it has. A backend may also take a `Decoder` whole, as data, and run
its step in one call of its own.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from engine.backends.base import Activation, Backend, Embedding, HeadNorms, Linear
from engine.batch import FlatBatch, ModelConfig, moved
from engine.layers.rope import Rope


@dataclass(frozen=True, slots=True)
class Layer:
    """Norms are [hidden], head norms [head_dim]; None where the family has none."""

    attn_norm: Tensor
    qkv: Linear
    output: Linear
    ffn_norm: Tensor
    gate_up: Linear
    down: Linear
    query_norm: Tensor | None = None
    key_norm: Tensor | None = None
    output_norm: Tensor | None = None
    """Of what attention adds to the residual stream."""
    down_norm: Tensor | None = None
    """Of what the feed-forward part adds."""
    window: int | None = None
    """How many of the last keys a query sees; None for all."""
    rope: int = 0
    """Which of the decoder's rotary embeddings its heads turn by."""


@dataclass(frozen=True, slots=True)
class Decoder:
    config: ModelConfig
    layers: tuple[Layer, ...]
    embedding: Embedding
    norm: Tensor
    head: Linear
    ropes: tuple[Rope, ...]
    scale: float
    """What attention scores are multiplied by."""
    activation: Activation = "silu"
    embedding_scale: float = 1.0
    attention_softcap: float | None = None
    """Scores s become cap * tanh(s / cap)."""
    logit_softcap: float | None = None

    def on(self, device: torch.device) -> "Decoder":
        """With the norms and rotary frequencies there, where the backend has already brought the rest."""
        layers = tuple(moved(layer, device) for layer in self.layers)
        return replace(moved(self, device), layers=layers, ropes=tuple(moved(rope, device) for rope in self.ropes))

    def hidden(self, backend: Backend, batch: FlatBatch, pools: list[Tensor]) -> Tensor:
        """Final-norm hidden states [T, hidden] of all rows; `pools` has one KV pool a layer."""
        plan = backend.plan(batch)
        turns = [rope.rotations(batch.positions) for rope in self.ropes]
        x = self.embedding(batch.token_ids)
        if self.embedding_scale != 1:
            x *= self.embedding_scale
        eps = self.config.rms_eps
        normed = backend.rms_norm(x, self.layers[0].attn_norm, eps)
        following = [*(layer.attn_norm for layer in self.layers[1:]), self.norm]
        for layer, pool, next_norm in zip(self.layers, pools, following, strict=True):
            delta = layer.output(self._attend(layer, backend, normed, turns[layer.rope], pool, plan))
            if layer.output_norm is not None:
                delta = backend.rms_norm(delta, layer.output_norm, eps)
            normed = backend.add_rms_norm(x, delta, layer.ffn_norm, eps)
            delta = layer.down(backend.gate(layer.gate_up(normed), self.activation))
            if layer.down_norm is not None:
                delta = backend.rms_norm(delta, layer.down_norm, eps)
            normed = backend.add_rms_norm(x, delta, next_norm, eps)
        return normed

    def logits(self, hidden: Tensor) -> Tensor:
        """[L, hidden] final-norm states to [L, vocab] float32."""
        logits = self.head(hidden).float()
        return logits if self.logit_softcap is None else (logits / self.logit_softcap).tanh_().mul_(self.logit_softcap)

    def _attend(
        self, layer: Layer, backend: Backend, normed: Tensor, turns: Tensor, pool: Tensor, plan: object
    ) -> Tensor:
        """[T, hidden] normed states to [T, H * D]; their keys and values go to the pool first."""
        heads = self.config.num_heads
        mixed = layer.qkv(normed).view(len(normed), -1, self.config.head_dim)
        norms = None
        if layer.query_norm is not None and layer.key_norm is not None:
            norms = HeadNorms(layer.query_norm, layer.key_norm, self.config.rms_eps)
        backend.rotate_and_store(mixed, heads, norms, turns, pool, plan)
        return backend.attend(mixed[:, :heads], pool, plan, self.scale, layer.window, self.attention_softcap)
