"""Tiny random models of every family, as transformers runs them and as files that hold them."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers
from gguf import GGMLQuantizationType as Kind

SIZES = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
GGUF_NAMES = {
    "llama": "llama",
    "mistral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma2": "gemma2",
    "gemma3_text": "gemma3",
}


def random_model(family: str, **options: Any) -> transformers.PreTrainedModel:
    """A model of transformers' class `{family}ForCausalLM`, everything in it random: fresh models have zero biases and
    unit norms, which hide mistakes."""
    config_class = "Gemma3TextConfig" if family == "Gemma3" else f"{family}Config"
    config = getattr(transformers, config_class)(**{**SIZES, **options})
    # Its other attention forgets about soft caps.
    model = getattr(transformers, f"{family}ForCausalLM")._from_config(config, attn_implementation="eager")
    torch.manual_seed(2)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.add_(torch.randn_like(parameter) * 0.2)
            else:
                parameter.copy_(torch.randn_like(parameter) * (0.3 if "bias" in name else parameter.shape[-1] ** -0.5))
    return model.eval()


def write_gguf(
    path: Path,
    architecture: str,
    fields: dict[str, Any],
    tensors: dict[str, torch.Tensor],
    heads: tuple[int, int],
    kind: Kind = Kind.F32,
) -> Path:
    """A file as llama.cpp has it: tensors under its names, a Llama's q and k rows reordered, matrices as `kind`.

    `fields` are the architecture's own; `heads` counts query and key heads.
    """
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in fields.items():
        add = {
            int: writer.add_uint32,
            str: writer.add_string,
            float: writer.add_float32,
            bool: writer.add_bool,
            list: writer.add_array,
        }[type(value)]
        add(f"{architecture}.{key}", value)
    for name, tensor in tensors.items():
        values = tensor.numpy()
        count = dict(zip(("attn_q", "attn_k"), heads, strict=True)).get(name.split(".")[-2])
        if architecture == "llama" and count:
            values = values.reshape(count, 2, -1, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)
        if values.ndim == 2 and kind != Kind.F32:
            writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, np.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def convert_to_gguf(path: Path, model: transformers.PreTrainedModel, **fields: Any) -> Path:
    """The model under the names of the gguf package's own table, with what its configuration says of sizes."""
    config = model.config
    architecture = GGUF_NAMES.get(config.model_type, config.model_type)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[architecture.upper()], config.num_hidden_layers)
    tensors = {}
    for stored, tensor in model.state_dict().items():
        if stored == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values = tensor + 1 if architecture.startswith("gemma") and stored.endswith("norm.weight") else tensor
        tensors[names.get_name(stored, try_suffixes=(".weight", ".bias"))] = values
    rope = config.rope_parameters
    sizes = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": float(rope.get("full_attention", rope)["rope_theta"]),
    }
    if getattr(config, "head_dim", None):
        sizes |= {"attention.key_length": config.head_dim, "attention.value_length": config.head_dim}
    heads = config.num_attention_heads, config.num_key_value_heads
    return write_gguf(path, architecture, sizes | fields, tensors, heads)
