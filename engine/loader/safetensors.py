"""Hugging Face folders: config.json and one or several safetensors files."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from engine.batch import ModelConfig
from engine.loader.checkpoint import Checkpoint, ModelFileError, SlidingWindow

ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Gemma3ForCausalLM": "gemma3",
}
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
GEMMA3_BLOCK_NAMES = BLOCK_NAMES | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
ACTIVATIONS = {"llama": "silu", "qwen2": "silu", "qwen3": "silu", "gemma3": "gelu_pytorch_tanh"}
FLOAT_TYPES = (torch.float32, torch.float16, torch.bfloat16)


def open_folder(path: Path) -> Checkpoint:
    """Open a model folder. Raises ModelFileError for damaged files or anything Farthing cannot run."""
    fields = _json(path / "config.json")
    names = fields.get("architectures") or [None]
    architecture = ARCHITECTURES.get(names[0])
    if architecture is None:
        raise ModelFileError(
            f"{path}: architecture {names[0]!r} is not supported (can run: {', '.join(ARCHITECTURES)})"
        )
    try:
        config = _config(fields, architecture)
    except KeyError as error:
        raise ModelFileError(f"{path / 'config.json'}: field {error.args[0]} is missing") from error
    activation = fields.get("hidden_activation") or fields.get("hidden_act") or ACTIVATIONS[architecture]
    if activation != ACTIVATIONS[architecture]:
        raise ModelFileError(f"{path}: activation {activation!r} is not supported for {names[0]}")
    if fields.get("use_sliding_window"):
        raise ModelFileError(f"{path}: use_sliding_window is not supported for {names[0]}")
    if fields.get("final_logit_softcapping") or fields.get("attn_logit_softcapping"):
        raise ModelFileError(f"{path}: logit soft-capping is not supported")
    if fields.get("quantization_config"):
        raise ModelFileError(f"{path}: quantised checkpoints (quantization_config) are not supported")

    files = _files(path)
    shapes = {name: tuple(file.get_slice(name).get_shape()) for name, file in files.items()}
    to_stored = _stored_names(architecture)

    def read(name: str) -> Tensor:
        stored = to_stored(name)
        values: Tensor = files[stored].get_tensor(stored)
        if values.dtype not in FLOAT_TYPES:
            raise ModelFileError(f"{path}: tensor {stored} has type {values.dtype}: not supported")
        values = values.float()
        # Gemma stores its norm weights as their distance from 1.
        return values + 1 if architecture == "gemma3" and "norm" in name else values

    rope = fields.get("rope_parameters") or fields.get("rope_scaling")
    sliding = None
    scale = None
    if architecture == "gemma3":
        rope = rope.get("full_attention", rope) if rope else None
        sliding = _sliding(fields, config)
        scale = fields.get("query_pre_attn_scalar", config.head_dim) ** -0.5
    return Checkpoint(path, config, shapes, to_stored, read, _rope_divisors(path, rope, config), sliding, scale)


def _json(path: Path) -> dict[str, Any]:
    try:
        fields: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ModelFileError(f"{path}: no such file; a Hugging Face model folder has one") from error
    except ValueError as error:
        raise ModelFileError(f"{path}: not valid JSON: {error}") from error
    return fields


def _config(fields: dict[str, Any], architecture: str) -> ModelConfig:
    rope = fields.get("rope_parameters") or {}
    rope = rope.get("full_attention", rope)
    heads = fields["num_attention_heads"]
    return ModelConfig(
        architecture=architecture,
        vocab_size=fields["vocab_size"],
        num_layers=fields["num_hidden_layers"],
        hidden_size=fields["hidden_size"],
        intermediate_size=fields["intermediate_size"],
        num_heads=heads,
        num_kv_heads=fields.get("num_key_value_heads") or heads,
        head_dim=fields.get("head_dim") or fields["hidden_size"] // heads,
        max_context=fields["max_position_embeddings"],
        rms_eps=fields["rms_norm_eps"],
        rope_theta=float(rope.get("rope_theta") or fields.get("rope_theta") or 10000.0),
        # Hugging Face leaves the field out where it is the family's default, and Gemma ties by default.
        tied_embeddings=fields.get("tie_word_embeddings", architecture == "gemma3"),
    )


def _sliding(fields: dict[str, Any], config: ModelConfig) -> SlidingWindow:
    local_rope = (fields.get("rope_parameters") or {}).get("sliding_attention", {})
    theta = local_rope.get("rope_theta") or fields.get("rope_local_base_freq") or 10000.0
    every = fields.get("sliding_window_pattern") or fields.get("_sliding_window_pattern") or 6
    kinds = fields.get("layer_types")
    if kinds is None:
        local = tuple((i + 1) % every != 0 for i in range(config.num_layers))
    else:
        local = tuple(kind == "sliding_attention" for kind in kinds)
    return SlidingWindow(fields["sliding_window"], float(theta), local)


def _rope_divisors(path: Path, rope: dict[str, Any] | None, config: ModelConfig) -> Tensor | None:
    """[head_dim / 2] divisors; `llama3` follows the published Llama 3.1 rule: long wavelengths are stretched by
    `factor`, short ones kept, those between blended."""
    kind = (rope or {}).get("rope_type") or (rope or {}).get("type") or "default"
    if (rope or {}).get("partial_rotary_factor", 1.0) != 1.0:
        raise ModelFileError(f"{path}: partial_rotary_factor is not supported")
    if kind == "default" or rope is None:
        return None
    if kind == "linear":
        return torch.full((config.head_dim // 2,), float(rope["factor"]))
    if kind != "llama3":
        raise ModelFileError(f"{path}: rope scaling {kind!r} is not supported")
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    turns = rope["original_max_position_embeddings"] / (2 * math.pi * config.rope_theta**exponents)
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    divisors: Tensor = 1 / ((1 - kept) / rope["factor"] + kept)
    return divisors


def _files(path: Path) -> dict[str, Any]:
    """Open file of each tensor."""
    index = path / "model.safetensors.index.json"
    names = sorted(set(_json(index)["weight_map"].values())) if index.exists() else ["model.safetensors"]
    files: dict[str, Any] = {}
    for name in names:
        try:
            file: Any = safe_open(path / name, framework="pt")
        except FileNotFoundError as error:
            raise ModelFileError(f"{path / name}: no such file") from error
        except SafetensorError as error:
            raise ModelFileError(f"{path / name}: cut short or damaged: {error}") from error
        files |= dict.fromkeys(file.keys(), file)
    return files


def _stored_names(architecture: str) -> Callable[[str], str]:
    blocks = GEMMA3_BLOCK_NAMES if architecture == "gemma3" else BLOCK_NAMES

    def stored(name: str) -> str:
        stem, _, kind = name.rpartition(".")
        if not stem.startswith("blk."):
            return f"{TOP_NAMES[stem]}.{kind}"
        _, layer, part = stem.split(".")
        return f"model.layers.{layer}.{blocks.get(part, part)}.{kind}"

    return stored
