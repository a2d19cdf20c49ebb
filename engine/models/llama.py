"""Llama, and its near relatives Qwen2 (biases on q, k, v) and Qwen3 (a norm on each query and key head)."""

from dataclasses import dataclass

from torch import Tensor

from engine.backends.base import Backend, Linear
from engine.batch import FlatBatch
from engine.layers.rope import frequencies, rotations
from engine.layers.weights import attention_input, attention_output, down, gate_up, head_norms, vocabulary
from engine.loader import Checkpoint


@dataclass(frozen=True, slots=True)
class Layer:
    attn_norm: Tensor
    qkv: Linear
    head_norms: tuple[Tensor, Tensor] | None
    output: Linear
    ffn_norm: Tensor
    gate_up: Linear
    down: Linear


class Llama:
    def __init__(self, checkpoint: Checkpoint, backend: Backend) -> None:
        config = self.config = checkpoint.config
        self.backend = backend
        self.frequency = frequencies(config.head_dim, config.rope_theta, checkpoint.rope_divisors)
        self.table, self.head = vocabulary(checkpoint, backend)
        self.norm = checkpoint.tensor("output_norm.weight", config.hidden_size)
        self.layers = [self._layer(checkpoint, f"blk.{i}") for i in range(config.num_layers)]

    def _layer(self, checkpoint: Checkpoint, block: str) -> Layer:
        linear, hidden = self.backend.linear, self.config.hidden_size
        return Layer(
            attn_norm=checkpoint.tensor(f"{block}.attn_norm.weight", hidden),
            qkv=linear(*attention_input(checkpoint, block)),
            head_norms=head_norms(checkpoint, block) if self.config.architecture == "qwen3" else None,
            output=linear(*attention_output(checkpoint, block)),
            ffn_norm=checkpoint.tensor(f"{block}.ffn_norm.weight", hidden),
            gate_up=linear(*gate_up(checkpoint, block)),
            down=linear(*down(checkpoint, block)),
        )

    def forward(self, batch: FlatBatch, pools: list[Tensor]) -> Tensor:
        """Logits [L, vocab] of the batch's wanted rows."""
        config, backend = self.config, self.backend
        plan = backend.plan(batch)
        turns = rotations(batch.positions, self.frequency)
        scale = config.head_dim**-0.5
        heads, key_end = config.num_heads, config.num_heads + config.num_kv_heads
        x = backend.embed(self.table, batch.token_ids)
        for layer, pool in zip(self.layers, pools, strict=True):
            mixed = layer.qkv(backend.rms_norm(x, layer.attn_norm, config.rms_eps)).view(len(x), -1, config.head_dim)
            if layer.head_norms is not None:
                for part, weight in zip((mixed[:, :heads], mixed[:, heads:key_end]), layer.head_norms, strict=True):
                    part.copy_(backend.rms_norm(part, weight, config.rms_eps))
            backend.rotate(mixed[:, :key_end], turns)
            backend.write_kv(pool, mixed[:, heads:], plan)
            layer.output.add_to(x, backend.attend(mixed[:, :heads], pool, plan, scale))
            gated = backend.silu_gate(layer.gate_up(backend.rms_norm(x, layer.ffn_norm, config.rms_eps)))
            layer.down.add_to(x, gated)
        return self.head(backend.rms_norm(x.index_select(0, batch.logits_rows), self.norm, config.rms_eps))
