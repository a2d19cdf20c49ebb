"""Gemma 2 and 3 (text): norms around each sub-layer, GELU gates, windows in some layers; 3 norms its heads too."""

from engine.backends.base import WeightStore
from engine.layers.weights import attention_input, attention_output, down, gate_up, head_norms, vocabulary
from engine.loader import Checkpoint
from engine.models.decoder import Decoder, Layer


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
        activation="gelu",
        embedding_scale=config.hidden_size**0.5,
    )


def _layer(checkpoint: Checkpoint, store: WeightStore, index: int) -> Layer:
    hidden, block = checkpoint.config.hidden_size, f"blk.{index}"
    attention = checkpoint.settings.layers[index]
    query_norm, key_norm = head_norms(checkpoint, block) if checkpoint.config.architecture == "gemma3" else (None, None)
    return Layer(
        attn_norm=checkpoint.tensor(f"{block}.attn_norm.weight", hidden),
        qkv=store.linear(*attention_input(checkpoint, block)),
        query_norm=query_norm,
        key_norm=key_norm,
        output=store.linear(*attention_output(checkpoint, block)),
        output_norm=checkpoint.tensor(f"{block}.post_attention_norm.weight", hidden),
        ffn_norm=checkpoint.tensor(f"{block}.ffn_norm.weight", hidden),
        gate_up=store.linear(*gate_up(checkpoint, block)),
        down=store.linear(*down(checkpoint, block)),
        down_norm=checkpoint.tensor(f"{block}.post_ffw_norm.weight", hidden),
        window=attention.window,
        rope=attention.rope,
    )
