"""Checkpoint tensors joined the way the models use them: one product for q, k, v and one for gate and up."""

import torch
from torch import Tensor

from engine.backends.base import Embedding, Linear, WeightStore
from engine.layers.rope import pair_neighbours
from engine.loader import Checkpoint


def projection(checkpoint: Checkpoint, name: str, out: int, inner: int) -> tuple[Tensor, Tensor | None]:
    """Weight [out, inner] and bias [out], None where the model has none."""
    weight = checkpoint.tensor(f"{name}.weight", out, inner)
    has_bias = name.split(".")[-1] in checkpoint.settings.biases
    return weight, checkpoint.tensor(f"{name}.bias", out) if has_bias else None


def attention_input(checkpoint: Checkpoint, block: str) -> tuple[Tensor, Tensor | None]:
    """q, k and v: weight [(heads + 2 * kv heads) * head_dim, hidden] and bias, with rotary pairs as neighbours."""
    config = checkpoint.config
    parts = []
    for part, heads in (("q", config.num_heads), ("k", config.num_kv_heads), ("v", config.num_kv_heads)):
        tensors = projection(checkpoint, f"{block}.attn_{part}", heads * config.head_dim, config.hidden_size)
        if part != "v":
            weight, bias = tensors
            tensors = (
                pair_neighbours(weight, config.head_dim),
                None if bias is None else pair_neighbours(bias, config.head_dim),
            )
        parts.append(tensors)
    return _stacked(parts)


def attention_output(checkpoint: Checkpoint, block: str) -> tuple[Tensor, Tensor | None]:
    """Weight [hidden, heads * head_dim] and bias."""
    config = checkpoint.config
    return projection(checkpoint, f"{block}.attn_output", config.hidden_size, config.num_heads * config.head_dim)


def gate_up(checkpoint: Checkpoint, block: str) -> tuple[Tensor, Tensor | None]:
    """Weight [2 * intermediate, hidden] and bias: gate rows, then up rows."""
    config = checkpoint.config
    names = (f"{block}.ffn_gate", f"{block}.ffn_up")
    return _stacked([projection(checkpoint, name, config.intermediate_size, config.hidden_size) for name in names])


def down(checkpoint: Checkpoint, block: str) -> tuple[Tensor, Tensor | None]:
    """Weight [hidden, intermediate] and bias."""
    config = checkpoint.config
    return projection(checkpoint, f"{block}.ffn_down", config.hidden_size, config.intermediate_size)


def head_norms(checkpoint: Checkpoint, block: str) -> tuple[Tensor, Tensor]:
    """[head_dim] norm weights of the query and key heads, reordered like their rows."""
    size = checkpoint.config.head_dim
    query, key = (checkpoint.tensor(f"{block}.attn_{part}_norm.weight", size) for part in ("q", "k"))
    return pair_neighbours(query, size), pair_neighbours(key, size)


def vocabulary(checkpoint: Checkpoint, store: WeightStore) -> tuple[Embedding, Linear]:
    """The embedding and the output head, which has the same values where the model ties them."""
    shape = checkpoint.config.vocab_size, checkpoint.config.hidden_size
    table = checkpoint.tensor("token_embd.weight", *shape)
    if checkpoint.config.tied_embeddings:
        head = store.head(table)
        return store.embedding(table, head), head
    embedding = store.embedding(table, None)
    del table
    return embedding, store.head(*projection(checkpoint, "output", *shape))


def _stacked(parts: list[tuple[Tensor, Tensor | None]]) -> tuple[Tensor, Tensor | None]:
    weight = torch.cat([weight for weight, _ in parts])
    if all(bias is None for _, bias in parts):
        return weight, None
    return weight, torch.cat([torch.zeros(len(weight)) if bias is None else bias for weight, bias in parts])
