"""GGUF files: metadata to a configuration, quantised blocks to float32."""

import math
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from torch import Tensor

from engine.batch import ModelConfig
from engine.gguf_header import GgufError, GgufHeader, TensorInfo, read_header
from engine.loader.checkpoint import Checkpoint, ModelFileError, SlidingWindow

ARCHITECTURES = ("llama", "qwen2", "qwen3", "gemma3")
CHUNK_ELEMENTS = 1 << 16
"""Elements dequantised at once: numpy's intermediates then stay in the cache, which is 2 to 3 times faster."""
GEMMA3_FULL_ATTENTION_EVERY = 6
GEMMA3_27B_LAYERS = 62


def open_file(path: Path) -> Checkpoint:
    """Open one GGUF file. Raises ModelFileError for a damaged file or anything Farthing cannot run."""
    try:
        header = read_header(path)
        data = np.memmap(path, np.uint8, mode="r")
    except (GgufError, ValueError) as error:  # mapping an empty file is a ValueError
        raise ModelFileError(f"{path}: not a complete GGUF file (cut short or damaged): {error}") from error
    fields = _Fields(path, header)
    architecture = fields.text("general.architecture")
    if architecture not in ARCHITECTURES:
        raise ModelFileError(
            f"{path}: architecture {architecture!r} is not supported (can run: {', '.join(ARCHITECTURES)})"
        )
    rows = {name: _stored_rows(path, data, tensor) for name, tensor in header.tensors.items()}
    shapes = {name: tuple(reversed(tensor.shape)) for name, tensor in header.tensors.items()}
    config = _config(path, fields, architecture, shapes)

    def read(name: str) -> Tensor:
        values = _dequantised(rows[name], GGMLQuantizationType(header.tensors[name].type), shapes[name])
        heads = {"attn_q": config.num_heads, "attn_k": config.num_kv_heads}.get(name.split(".")[-2])
        return _halves(values, heads) if architecture == "llama" and heads else values

    divisors = _rope_divisors(path, fields, config, shapes, read)
    checkpoint = Checkpoint(path, config, shapes, lambda name: name, read, divisors)
    return _with_gemma_windows(checkpoint, fields) if architecture == "gemma3" else checkpoint


class _Fields:
    """The file's metadata; keys that start with a dot belong to the architecture (`.block_count`)."""

    def __init__(self, path: Path, header: GgufHeader) -> None:
        self.path, self.fields = path, header.fields
        self.prefix = self.text("general.architecture")

    def get(self, key: str, default: Any = None) -> Any:
        return self.fields.get(self.prefix + key if key.startswith(".") else key, default)

    def _required(self, key: str) -> Any:
        value = self.get(key)
        if value is None:
            raise ModelFileError(f"{self.path}: metadata field {key.removeprefix('.')} is missing")
        return value

    def text(self, key: str) -> str:
        return str(self._required(key))

    def integer(self, key: str) -> int:
        value = self._required(key)
        if not isinstance(value, int):
            raise ModelFileError(
                f"{self.path}: metadata field {key.removeprefix('.')} is {value!r}, expected one integer"
            )
        return value

    def number(self, key: str) -> float:
        return float(self._required(key))


def _config(path: Path, fields: _Fields, architecture: str, shapes: dict[str, tuple[int, ...]]) -> ModelConfig:
    heads, hidden = fields.integer(".attention.head_count"), fields.integer(".embedding_length")
    head_dim = int(fields.get(".attention.key_length", hidden // heads))
    for key in (".attention.value_length", ".rope.dimension_count"):
        if fields.get(key, head_dim) != head_dim:
            raise ModelFileError(
                f"{path}: {key[1:]} {fields.get(key)} differs from the head size {head_dim}: not supported"
            )
    if "token_embd.weight" not in shapes:
        raise ModelFileError(f"{path}: tensor token_embd.weight is missing")
    return ModelConfig(
        architecture=architecture,
        vocab_size=shapes["token_embd.weight"][0],
        num_layers=fields.integer(".block_count"),
        hidden_size=hidden,
        intermediate_size=fields.integer(".feed_forward_length"),
        num_heads=heads,
        num_kv_heads=int(fields.get(".attention.head_count_kv", heads)),
        head_dim=head_dim,
        max_context=fields.integer(".context_length"),
        rms_eps=fields.number(".attention.layer_norm_rms_epsilon"),
        rope_theta=float(fields.get(".rope.freq_base", 10000.0)),
        tied_embeddings="output.weight" not in shapes,
    )


def _rope_divisors(
    path: Path,
    fields: _Fields,
    config: ModelConfig,
    shapes: dict[str, tuple[int, ...]],
    read: Callable[[str], Tensor],
) -> Tensor | None:
    kind = fields.get(".rope.scaling.type", "none")
    if kind not in ("none", "linear"):
        raise ModelFileError(f"{path}: rope scaling {kind!r} is not supported")
    if kind == "linear":
        return torch.full((config.head_dim // 2,), fields.number(".rope.scaling.factor"))
    if "rope_freqs.weight" not in shapes:
        return None
    if shapes["rope_freqs.weight"] != (config.head_dim // 2,):
        raise ModelFileError(
            f"{path}: tensor rope_freqs.weight has shape {list(shapes['rope_freqs.weight'])}, "
            f"expected {[config.head_dim // 2]}"
        )
    return read("rope_freqs.weight")


def _with_gemma_windows(checkpoint: Checkpoint, fields: _Fields) -> Checkpoint:
    config = checkpoint.config
    local = tuple((i + 1) % GEMMA3_FULL_ATTENTION_EVERY != 0 for i in range(config.num_layers))
    sliding = SlidingWindow(
        fields.integer(".attention.sliding_window"), float(fields.get(".rope.freq_base_swa", 10000.0)), local
    )
    # The file has no field for it: the 27B alone scales queries by hidden size per head instead of by head size.
    scale = (config.hidden_size / config.num_heads) ** -0.5 if config.num_layers == GEMMA3_27B_LAYERS else None
    return Checkpoint(
        checkpoint.path,
        config,
        checkpoint.shapes,
        checkpoint.stored_name,
        checkpoint.read,
        checkpoint.rope_divisors,
        sliding,
        scale,
    )


def _stored_rows(path: Path, data: np.memmap[Any, Any], tensor: TensorInfo) -> np.ndarray[Any, Any]:
    """[rows, bytes of a row] of the tensor's blocks, still in the file."""
    try:
        block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(tensor.type)]
        dequantize(np.zeros((1, block_bytes), np.uint8), GGMLQuantizationType(tensor.type))
    except (ValueError, NotImplementedError) as error:
        raise ModelFileError(f"{path}: tensor {tensor.name} has type number {tensor.type}: not supported") from error
    columns = tensor.shape[0]
    if columns % block:
        raise ModelFileError(f"{path}: tensor {tensor.name} has rows of {columns}, not a multiple of its block {block}")
    row_bytes = columns // block * block_bytes
    rows = math.prod(tensor.shape[1:])
    stored = data[tensor.offset : tensor.offset + rows * row_bytes]
    if len(stored) < rows * row_bytes:
        raise ModelFileError(f"{path}: not a complete GGUF file (cut short): tensor {tensor.name} runs past its end")
    return stored.reshape(rows, row_bytes)


def _dequantised(rows: np.ndarray[Any, Any], kind: GGMLQuantizationType, shape: tuple[int, ...]) -> Tensor:
    """[shape] float32, in row chunks over all cores."""
    values = np.empty((len(rows), shape[-1]), np.float32)
    step = max(1, CHUNK_ELEMENTS // shape[-1])

    def convert(start: int) -> None:
        values[start : start + step] = dequantize(rows[start : start + step], kind)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(convert, range(0, len(rows), step)))
    return torch.from_numpy(values).reshape(shape)


def _halves(values: Tensor, heads: int) -> Tensor:
    """Undo llama.cpp's row order for Llama's q and k, where rotary pairs are neighbours: even rows first, then odd."""
    head_dim = values.shape[0] // heads
    return values.view(heads, head_dim // 2, 2, *values.shape[1:]).transpose(1, 2).reshape(values.shape)
