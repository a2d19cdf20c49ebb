"""Hugging Face folders: config.json and one or several safetensors files."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from engine.loader.checkpoint import Checkpoint, ModelFileError
from engine.loader.fields import Fields
from engine.loader.float8 import FLOAT8, block_sizes, widened
from engine.loader.hf_config import read_settings

TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
BLOCK_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
GEMMA_BLOCK_NAMES = BLOCK_NAMES | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
FLOAT_TYPES = (torch.float32, torch.float16, torch.bfloat16)
HARMLESS_ENDINGS = (".rotary_emb.inv_freq", ".input_scale")
"""Rotary frequencies, which follow from the configuration, and what only rounding activations to 8 bits needs."""


def open_folder(path: Path) -> Checkpoint:
    """Open a model folder. Raises ModelFileError for damaged files or anything Farthing cannot run."""
    fields = Fields(str(path / "config.json"), _json(path / "config.json"))
    scale_block = block_sizes(fields)
    settings = read_settings(fields)
    architecture = settings.config.architecture
    files = _files(path)
    shapes = {
        name: tuple(file.get_slice(name).get_shape())
        for name, file in files.items()
        if not name.endswith(HARMLESS_ENDINGS) and not (settings.config.tied_embeddings and name == "lm_head.weight")
    }
    scales = {name for name in shapes if name.endswith((".weight_scale", ".weight_scale_inv"))}
    to_stored = _stored_names(architecture)

    def read(name: str) -> Tensor:
        stored = to_stored(name)
        values: Tensor = files[stored].get_tensor(stored)
        if values.dtype in FLOAT8:
            scale = next((files[known].get_tensor(known) for known in scales if known.startswith(stored + "_")), None)
            values = widened(values, scale, scale_block, f"{path}: tensor {stored}")
        if values.dtype not in FLOAT_TYPES:
            raise ModelFileError(f"{path}: tensor {stored} has type {values.dtype}: not supported")
        values = values.float()
        # Gemma stores its norm weights as their distance from 1.
        return values + 1 if architecture.startswith("gemma") and "norm" in name else values

    weights = {name: shape for name, shape in shapes.items() if name not in scales}
    return Checkpoint(path, settings, weights, to_stored, read)


def _json(path: Path) -> dict[str, Any]:
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ModelFileError(f"{path}: no such file; a Hugging Face model folder has one") from error
    except (ValueError, RecursionError) as error:
        raise ModelFileError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(fields, dict):
        raise ModelFileError(f"{path}: not a JSON object")
    return fields


def _files(path: Path) -> dict[str, Any]:
    """Open file of each tensor."""
    files: dict[str, Any] = {}
    for name in _file_names(path):
        try:
            file: Any = safe_open(path / name, framework="pt")
        except FileNotFoundError as error:
            raise ModelFileError(f"{path / name}: no such file") from error
        except (SafetensorError, OSError) as error:
            raise ModelFileError(f"{path / name}: cut short or damaged: {error}") from error
        for tensor in file.keys():  # noqa: SIM118 (not a mapping)
            if tensor in files:
                raise ModelFileError(f"{path / name}: tensor {tensor} is in two files")
            files[tensor] = file
    return files


def _file_names(path: Path) -> list[str]:
    index = path / "model.safetensors.index.json"
    if not index.exists():
        return ["model.safetensors"]
    places = _json(index).get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(name, str) for name in places.values()):
        raise ModelFileError(f"{index}: field weight_map must give the file of each tensor")
    names = sorted(set(places.values()))
    for name in names:
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise ModelFileError(f"{index}: {name!r} is not a safetensors file of this folder")
    return names


def _stored_names(architecture: str) -> Callable[[str], str]:
    blocks = GEMMA_BLOCK_NAMES if architecture.startswith("gemma") else BLOCK_NAMES

    def stored(name: str) -> str:
        stem, _, kind = name.rpartition(".")
        if not stem.startswith("blk."):
            return f"{TOP_NAMES[stem]}.{kind}"
        _, layer, part = stem.split(".")
        return f"model.layers.{layer}.{blocks.get(part, part)}.{kind}"

    return stored
