"""Llama, and its near relatives Qwen2 (biases on q, k, v) and Qwen3 (a norm on each query and key head)."""

from engine.backends.base import WeightStore
from engine.layers.weights import attention_input, attention_output, down, gate_up, head_norms, vocabulary
from engine.loader import Checkpoint
from engine.models.decoder import Decoder, Layer

NORMED_HEADS = ("qwen3", "gemma3")
"""Architectures with a norm on each query and key head."""


def read(checkpoint: Checkpoint, store: WeightStore) -> Decoder:
    """The checkpoint's weights, given to what stores them."""
    config, settings = checkpoint.config, checkpoint.settings
    embedding, head = vocabulary(checkpoint, store)
    return Decoder(
        config=config,
        layers=tuple(_layer(checkpoint, store, i) for i in range(config.num_layers)),
        embedding=embedding,
        norm=checkpoint.tensor("output_norm.weight", config.hidden_size),
        head=head,
        ropes=settings.ropes,
        scale=settings.scale,
        attention_softcap=settings.attention_softcap,
        logit_softcap=settings.logit_softcap,
    )


def _layer(checkpoint: Checkpoint, store: WeightStore, index: int) -> Layer:
    hidden, block = checkpoint.config.hidden_size, f"blk.{index}"
    attention = checkpoint.settings.layers[index]
    query_norm, key_norm = (
        head_norms(checkpoint, block) if checkpoint.config.architecture in NORMED_HEADS else (None, None)
    )
    return Layer(
        attn_norm=checkpoint.tensor(f"{block}.attn_norm.weight", hidden),
        qkv=store.linear(*attention_input(checkpoint, block)),
        query_norm=query_norm,
        key_norm=key_norm,
        output=store.linear(*attention_output(checkpoint, block)),
        ffn_norm=checkpoint.tensor(f"{block}.ffn_norm.weight", hidden),
        gate_up=store.linear(*gate_up(checkpoint, block)),
        down=store.linear(*down(checkpoint, block)),
        window=attention.window,
        rope=attention.rope,
    )
