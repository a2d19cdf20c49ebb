"""What the loaders read exactly, and what they refuse by name."""

import json
import struct
from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import save_file

from engine.loader import ModelFileError, open_checkpoint
from engine.runner import load
from tests.engine import model_files
from tests.engine.flat import all_logits, relative_error

VOCAB, HIDDEN, INNER, HEADS, KV_HEADS, DIM = 96, 64, 96, 4, 2, 16
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": 1,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5000.0,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
}
HF_NAMES = {
    "token_embd.weight": ("model.embed_tokens.weight", (VOCAB, HIDDEN)),
    "output_norm.weight": ("model.norm.weight", (HIDDEN,)),
    "blk.0.attn_norm.weight": ("model.layers.0.input_layernorm.weight", (HIDDEN,)),
    "blk.0.attn_q.weight": ("model.layers.0.self_attn.q_proj.weight", (HEADS * DIM, HIDDEN)),
    "blk.0.attn_k.weight": ("model.layers.0.self_attn.k_proj.weight", (KV_HEADS * DIM, HIDDEN)),
    "blk.0.attn_v.weight": ("model.layers.0.self_attn.v_proj.weight", (KV_HEADS * DIM, HIDDEN)),
    "blk.0.attn_output.weight": ("model.layers.0.self_attn.o_proj.weight", (HIDDEN, HEADS * DIM)),
    "blk.0.ffn_norm.weight": ("model.layers.0.post_attention_layernorm.weight", (HIDDEN,)),
    "blk.0.ffn_gate.weight": ("model.layers.0.mlp.gate_proj.weight", (INNER, HIDDEN)),
    "blk.0.ffn_up.weight": ("model.layers.0.mlp.up_proj.weight", (INNER, HIDDEN)),
    "blk.0.ffn_down.weight": ("model.layers.0.mlp.down_proj.weight", (HIDDEN, INNER)),
}
FIELDS = {
    "block_count": 1,
    "context_length": 128,
    "embedding_length": HIDDEN,
    "feed_forward_length": INNER,
    "attention.head_count": HEADS,
    "attention.head_count_kv": KV_HEADS,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "rope.freq_base": 5000.0,
}


@pytest.fixture
def tensors() -> dict[str, torch.Tensor]:
    """A tiny Llama's tensors under GGUF's names, in Hugging Face's row order."""
    generator = torch.Generator().manual_seed(3)
    return {name: torch.randn(shape, generator=generator) / 8 for name, (_, shape) in HF_NAMES.items()}


def write_folder(path: Path, tensors: dict[str, torch.Tensor], **changes: object) -> Path:
    path.mkdir()
    (path / "config.json").write_text(json.dumps({**CONFIG, **changes}))
    save_file({HF_NAMES[name][0]: tensor for name, tensor in tensors.items()}, path / "model.safetensors")
    return path


def write_gguf(
    path: Path,
    tensors: dict[str, torch.Tensor],
    *,
    architecture: str = "llama",
    kind: Kind = Kind.F32,
    **changes: object,
) -> Path:
    """The same model as llama.cpp stores it."""
    return model_files.write_gguf(path, architecture, {**FIELDS, **changes}, tensors, (HEADS, KV_HEADS), kind)


@pytest.mark.parametrize(
    ("kind", "bound"),
    [
        (Kind.F32, 0),
        (Kind.F16, 1e-3),
        (Kind.BF16, 1e-2),
        (Kind.Q8_0, 2e-2),
        (Kind.Q5_0, 0.1),
        (Kind.Q4_1, 0.15),
        (Kind.Q4_0, 0.2),
    ],
)
def test_gguf_tensors_come_back_in_the_common_order(tmp_path: Path, tensors, kind: Kind, bound: float) -> None:
    checkpoint = open_checkpoint(write_gguf(tmp_path / "m.gguf", tensors, kind=kind))
    for name, wanted in tensors.items():
        assert relative_error(checkpoint.tensor(name, *wanted.shape), wanted) <= bound, name
    assert checkpoint.config.tied_embeddings and checkpoint.config.rope_theta == 5000.0


def test_gguf_and_folder_give_the_same_logits(tmp_path: Path, tensors) -> None:
    logits = []
    for path in (write_gguf(tmp_path / "m.gguf", tensors), write_folder(tmp_path / "m", tensors)):
        runner = load(path, "float32")
        runner.allocate(4)
        logits.append(all_logits(runner, list(range(40)), [2, 0, 1]))
    assert relative_error(*logits) < 1e-6


def test_rope_frequencies_from_the_file(tmp_path: Path, tensors) -> None:
    tensors["rope_freqs.weight"] = torch.linspace(1, 8, DIM // 2)
    checkpoint = open_checkpoint(write_gguf(tmp_path / "m.gguf", tensors))
    plain = 1 / 5000.0 ** (torch.arange(0, DIM, 2) / DIM)
    assert torch.allclose(checkpoint.settings.ropes[0].frequency, plain / tensors["rope_freqs.weight"])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_folders(tmp_path: Path, tensors, dtype: torch.dtype) -> None:
    halves = {name: tensor.to(dtype) for name, tensor in tensors.items()}
    checkpoint = open_checkpoint(write_folder(tmp_path / "m", halves))
    for name, wanted in halves.items():
        assert torch.equal(checkpoint.tensor(name, *wanted.shape), wanted.float())


def test_no_such_path(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="no such file or folder"):
        load(tmp_path / "nothing.gguf", "float32")


@pytest.mark.parametrize("keep", [0.99, 0.5, 0.02, 0.0])
def test_truncated_gguf(tmp_path: Path, tensors, keep: float) -> None:
    path = write_gguf(tmp_path / "m.gguf", tensors)
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * keep)])
    with pytest.raises(ModelFileError, match=r"m\.gguf: not a complete GGUF file"):
        load(path, "float32")


def test_not_gguf_at_all(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"#!/bin/sh\n" * 100)
    with pytest.raises(ModelFileError, match=r"m\.gguf: not a complete GGUF file"):
        load(tmp_path / "m.gguf", "float32")


@pytest.mark.parametrize("keep", [0.9, 0.01])
def test_truncated_safetensors(tmp_path: Path, tensors, keep: float) -> None:
    file = write_folder(tmp_path / "m", tensors) / "model.safetensors"
    file.write_bytes(file.read_bytes()[: int(file.stat().st_size * keep)])
    with pytest.raises(ModelFileError, match=r"model\.safetensors: cut short or damaged"):
        load(tmp_path / "m", "float32")


@pytest.mark.parametrize("name", sorted(HF_NAMES))
def test_missing_tensor_is_named(tmp_path: Path, tensors, name: str) -> None:
    del tensors[name]
    with pytest.raises(ModelFileError, match=f"tensor {name} is missing"):
        load(write_gguf(tmp_path / "m.gguf", tensors), "float32")
    with pytest.raises(ModelFileError, match=f"tensor {HF_NAMES[name][0]} is missing"):
        load(write_folder(tmp_path / "m", tensors), "float32")


@pytest.mark.parametrize("name", sorted(set(HF_NAMES) - {"token_embd.weight"}))
def test_wrong_shape_is_named_with_both_shapes(tmp_path: Path, tensors, name: str) -> None:
    tensors[name] = torch.zeros(48, *tensors[name].shape[1:])
    with pytest.raises(ModelFileError, match=rf"tensor {name} has shape \[48.*expected \[{HF_NAMES[name][1][0]}"):
        load(write_gguf(tmp_path / "m.gguf", tensors), "float32")
    with pytest.raises(ModelFileError, match=rf"tensor {HF_NAMES[name][0]} has shape \[48"):
        load(write_folder(tmp_path / "m", tensors), "float32")


def test_unknown_architecture(tmp_path: Path, tensors) -> None:
    with pytest.raises(ModelFileError, match="architecture 'mamba' is not supported"):
        load(write_gguf(tmp_path / "m.gguf", tensors, architecture="mamba"), "float32")
    with pytest.raises(ModelFileError, match="architecture 'MambaForCausalLM' is not supported"):
        load(write_folder(tmp_path / "m", tensors, architectures=["MambaForCausalLM"]), "float32")


def test_unknown_rope_scaling(tmp_path: Path, tensors) -> None:
    with pytest.raises(ModelFileError, match="rope scaling 'longrope' is not supported"):
        load(write_gguf(tmp_path / "m.gguf", tensors, **{"rope.scaling.type": "longrope"}), "float32")
    with pytest.raises(ModelFileError, match="rope scaling 'longrope' is not supported"):
        load(write_folder(tmp_path / "m", tensors, rope_scaling={"type": "longrope", "factor": 4.0}), "float32")


def test_partial_rotation(tmp_path: Path, tensors) -> None:
    with pytest.raises(ModelFileError, match=r"rope\.dimension_count 8 differs from the head size 16"):
        load(write_gguf(tmp_path / "m.gguf", tensors, **{"rope.dimension_count": 8}), "float32")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_act": "relu"}, "activation 'relu'"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config"),
        ({"num_attention_heads": 4, "rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
    ],
)
def test_folder_settings_that_would_change_the_result(tmp_path: Path, tensors, changes, message: str) -> None:
    with pytest.raises(ModelFileError, match=message):
        load(write_folder(tmp_path / "m", tensors, **changes), "float32")


def test_missing_fields(tmp_path: Path, tensors) -> None:
    folder = write_folder(tmp_path / "m", tensors)
    (folder / "config.json").write_text(json.dumps({k: v for k, v in CONFIG.items() if k != "hidden_size"}))
    with pytest.raises(ModelFileError, match="field hidden_size is missing"):
        load(folder, "float32")
    (folder / "config.json").write_text("{")
    with pytest.raises(ModelFileError, match="not valid JSON"):
        load(folder, "float32")
    (folder / "config.json").unlink()
    with pytest.raises(ModelFileError, match=r"config\.json: no such file"):
        load(folder, "float32")


def test_shard_that_is_not_there(tmp_path: Path, tensors) -> None:
    folder = write_folder(tmp_path / "m", tensors)
    index = {"weight_map": dict.fromkeys((HF_NAMES[name][0] for name in tensors), "model-00001-of-00001.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelFileError, match=r"model-00001-of-00001\.safetensors: no such file"):
        load(folder, "float32")


def test_integer_tensor_in_a_folder(tmp_path: Path, tensors) -> None:
    tensors["output_norm.weight"] = torch.ones(HIDDEN, dtype=torch.int32)
    with pytest.raises(ModelFileError, match=r"model\.norm\.weight has type torch\.int32"):
        load(write_folder(tmp_path / "m", tensors), "float32")


def test_gguf_type_that_cannot_be_read(tmp_path: Path, tensors) -> None:
    path = write_gguf(tmp_path / "m.gguf", tensors)
    data = bytearray(path.read_bytes())
    at = data.index(b"blk.0.ffn_up.weight") + len("blk.0.ffn_up.weight") + 4 + 2 * 8
    assert struct.unpack_from("<I", data, at) == (Kind.F32,)
    struct.pack_into("<I", data, at, Kind.I32)
    path.write_bytes(data)
    with pytest.raises(ModelFileError, match=r"tensor blk\.0\.ffn_up\.weight has type number 26: not supported"):
        load(path, "float32")
