"""Gemma 3 (text): norms around each sub-layer and on each head, GELU gates, local attention in most layers."""

from dataclasses import dataclass

from torch import Tensor

from engine.backends.base import Backend, Linear
from engine.batch import FlatBatch
from engine.layers.rope import frequencies, rotations
from engine.layers.weights import attention_input, attention_output, down, gate_up, head_norms, vocabulary
from engine.loader import Checkpoint, ModelFileError


@dataclass(frozen=True, slots=True)
class Layer:
    local: bool
    attn_norm: Tensor
    qkv: Linear
    query_norm: Tensor
    key_norm: Tensor
    output: Linear
    output_norm: Tensor
    ffn_norm: Tensor
    gate_up: Linear
    down: Linear
    down_norm: Tensor


class Gemma3:
    def __init__(self, checkpoint: Checkpoint, backend: Backend) -> None:
        config = self.config = checkpoint.config
        if checkpoint.sliding is None:
            raise ModelFileError(f"{checkpoint.path}: a Gemma 3 model needs its sliding window")
        self.backend, self.sliding = backend, checkpoint.sliding
        self.scale = checkpoint.query_scale or config.head_dim**-0.5
        self.frequency = frequencies(config.head_dim, config.rope_theta, checkpoint.rope_divisors)
        self.local_frequency = frequencies(config.head_dim, self.sliding.rope_theta, None)
        self.table, self.head = vocabulary(checkpoint, backend)
        self.norm = checkpoint.tensor("output_norm.weight", config.hidden_size)
        self.layers = [self._layer(checkpoint, i) for i in range(config.num_layers)]

    def _layer(self, checkpoint: Checkpoint, index: int) -> Layer:
        linear, hidden, block = self.backend.linear, self.config.hidden_size, f"blk.{index}"
        query_norm, key_norm = head_norms(checkpoint, block)
        return Layer(
            local=self.sliding.layers[index],
            attn_norm=checkpoint.tensor(f"{block}.attn_norm.weight", hidden),
            qkv=linear(*attention_input(checkpoint, block)),
            query_norm=query_norm,
            key_norm=key_norm,
            output=linear(*attention_output(checkpoint, block)),
            output_norm=checkpoint.tensor(f"{block}.post_attention_norm.weight", hidden),
            ffn_norm=checkpoint.tensor(f"{block}.ffn_norm.weight", hidden),
            gate_up=linear(*gate_up(checkpoint, block)),
            down=linear(*down(checkpoint, block)),
            down_norm=checkpoint.tensor(f"{block}.post_ffw_norm.weight", hidden),
        )

    def forward(self, batch: FlatBatch, pools: list[Tensor]) -> Tensor:
        """Logits [L, vocab] of the batch's wanted rows."""
        config, backend = self.config, self.backend
        plan = backend.plan(batch)
        turns = rotations(batch.positions, self.frequency)
        local_turns = rotations(batch.positions, self.local_frequency)
        heads, key_end = config.num_heads, config.num_heads + config.num_kv_heads
        x = backend.embed(self.table, batch.token_ids) * config.hidden_size**0.5
        for layer, pool in zip(self.layers, pools, strict=True):
            mixed = layer.qkv(self._normed(x, layer.attn_norm)).view(len(x), -1, config.head_dim)
            mixed[:, :heads] = self._normed(mixed[:, :heads], layer.query_norm)
            mixed[:, heads:key_end] = self._normed(mixed[:, heads:key_end], layer.key_norm)
            backend.rotate(mixed[:, :key_end], local_turns if layer.local else turns)
            backend.write_kv(pool, mixed[:, heads:], plan)
            window = self.sliding.tokens if layer.local else None
            attended = backend.attend(mixed[:, :heads], pool, plan, self.scale, window)
            x += self._normed(layer.output(attended), layer.output_norm)
            gated = backend.gelu_gate(layer.gate_up(self._normed(x, layer.ffn_norm)))
            x += self._normed(layer.down(gated), layer.down_norm)
        return self.head(self._normed(x.index_select(0, batch.logits_rows), self.norm))

    def _normed(self, x: Tensor, weight: Tensor) -> Tensor:
        return self.backend.rms_norm(x, weight, self.config.rms_eps)
