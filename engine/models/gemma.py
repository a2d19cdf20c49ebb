"""Gemma 2 and 3 (text): a Llama whose sub-layers' results are normed too, with GELU gates and scaled embeddings."""

from dataclasses import replace

from engine.backends.base import WeightStore
from engine.loader import Checkpoint
from engine.models import llama
from engine.models.decoder import Decoder, Layer


def read(checkpoint: Checkpoint, store: WeightStore) -> Decoder:
    """The checkpoint's weights, given to what stores them."""
    plain = llama.read(checkpoint, store)
    return replace(
        plain,
        layers=tuple(_with_norms(layer, checkpoint, f"blk.{i}") for i, layer in enumerate(plain.layers)),
        activation="gelu",
        embedding_scale=checkpoint.config.hidden_size**0.5,
    )


def _with_norms(layer: Layer, checkpoint: Checkpoint, block: str) -> Layer:
    hidden = checkpoint.config.hidden_size
    return replace(
        layer,
        output_norm=checkpoint.tensor(f"{block}.post_attention_norm.weight", hidden),
        down_norm=checkpoint.tensor(f"{block}.post_ffw_norm.weight", hidden),
    )
