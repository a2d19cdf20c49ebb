"""GGUF files: metadata to a model's settings, quantised blocks to float32."""

import math
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from engine.gguf_header import GgufError, TensorInfo, read_header
from engine.loader.checkpoint import Checkpoint, ModelFileError
from engine.loader.dequantise import block_sizes, dequantised
from engine.loader.fields import Fields
from engine.loader.gguf_config import ARCHITECTURES, read_settings

ROPE_DIVISORS = "rope_freqs.weight"


def open_file(path: Path) -> Checkpoint:
    """Open one GGUF file. Raises ModelFileError for a damaged file or anything Farthing cannot run."""
    try:
        header = read_header(path)
        data = np.memmap(path, np.uint8, mode="c")  # copied on write: torch warns of what it cannot write
    except (GgufError, ValueError) as error:  # mapping an empty file is a ValueError
        raise ModelFileError(f"{path}: not a complete GGUF file (cut short or damaged): {error}") from error
    architecture = Fields(str(path), header.fields).text("general.architecture")
    if architecture not in ARCHITECTURES:
        raise ModelFileError(
            f"{path}: architecture {architecture!r} is not supported (can run: {', '.join(ARCHITECTURES)})"
        )
    rows = {name: _stored_rows(path, data, tensor) for name, tensor in header.tensors.items()}
    shapes = {name: tuple(reversed(tensor.shape)) for name, tensor in header.tensors.items()}

    def values(name: str) -> Tensor:
        return dequantised(rows[name], header.tensors[name].type, shapes[name])

    divisors = values(ROPE_DIVISORS) if ROPE_DIVISORS in shapes else None
    shapes.pop(ROPE_DIVISORS, None)
    prefix = f"{architecture}."
    fields = {name.removeprefix(prefix): value for name, value in header.fields.items() if name.startswith(prefix)}
    settings = read_settings(Fields(str(path), fields), architecture, shapes, divisors)
    config = settings.config

    def read(name: str) -> Tensor:
        heads = {"attn_q": config.num_heads, "attn_k": config.num_kv_heads}.get(name.split(".")[-2])
        return _halves(values(name), heads) if architecture == "llama" and heads else values(name)

    return Checkpoint(path, settings, shapes, lambda name: name, read)


def _stored_rows(path: Path, data: np.memmap[Any, Any], tensor: TensorInfo) -> np.ndarray[Any, Any]:
    """[rows, bytes of a row] of the tensor's blocks, still in the file."""
    sizes = block_sizes(tensor.type)
    if sizes is None:
        raise ModelFileError(f"{path}: tensor {tensor.name} has type number {tensor.type}: not supported")
    block, block_bytes = sizes
    columns = tensor.shape[0]
    if columns % block:
        raise ModelFileError(f"{path}: tensor {tensor.name} has rows of {columns}, not a multiple of its block {block}")
    row_bytes = columns // block * block_bytes
    rows = math.prod(tensor.shape[1:])
    if tensor.offset + rows * row_bytes > len(data):
        raise ModelFileError(f"{path}: not a complete GGUF file (cut short): tensor {tensor.name} runs past its end")
    return data[tensor.offset : tensor.offset + rows * row_bytes].reshape(rows, row_bytes)


def _halves(values: Tensor, heads: int) -> Tensor:
    """Undo llama.cpp's row order for Llama's q and k, where rotary pairs are neighbours: even rows first, then odd."""
    head_dim = values.shape[0] // heads
    return values.view(heads, head_dim // 2, 2, *values.shape[1:]).transpose(1, 2).reshape(values.shape)
