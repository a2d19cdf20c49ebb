"""Checkpoints with 8-bit floating-point weights give the model that transformers has with the same widened weights."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.loader import ModelFileError, open_checkpoint
from engine.runner import load
from tests.engine.flat import all_logits, relative_error
from tests.engine.model_files import random_model

BLOCK = 32
FP8 = {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK], "activation_scheme": "dynamic"}
COMPRESSED = {"quant_method": "compressed-tensors", "format": "float-quantized"}


def narrowed(weight: torch.Tensor, scheme: str) -> tuple[torch.Tensor, torch.Tensor]:
    """[N, K] as float8 and its scales, in one of the layouts that files have."""
    rows, columns = weight.shape
    if scheme == "block":
        blocks = [
            [weight[i : i + BLOCK, j : j + BLOCK].abs().amax() / 448 for j in range(0, columns, BLOCK)]
            for i in range(0, rows, BLOCK)
        ]
        scale = torch.tensor(blocks)
        spread = scale.repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(BLOCK, 1)[:, :columns]
    else:
        scale = spread = weight.abs().amax(None if scheme == "tensor" else 1, keepdim=scheme == "row") / 448
    return (weight / spread).to(torch.float8_e4m3fn), scale


def widened(values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    if scale.dim() == 2 and scale.shape[1] * BLOCK >= values.shape[1] > scale.shape[1]:
        scale = scale.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)[: values.shape[0], : values.shape[1]]
    return values.float() * scale


@pytest.mark.parametrize(
    ("scheme", "suffix", "settings"),
    [("block", "_inv", FP8), ("row", "", COMPRESSED), ("tensor", "", COMPRESSED)],
)
def test_widened_as_they_are_read(tmp_path: Path, scheme: str, suffix: str, settings: dict[str, object]) -> None:
    model = random_model("Qwen3", head_dim=24, intermediate_size=80)
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    state = model.state_dict()
    for name in [name for name in tensors if "proj" in name]:
        tensors[name], scale = narrowed(tensors[name], scheme)
        tensors[name + "_scale" + suffix] = scale
        tensors[name.replace("weight", "input_scale")] = torch.tensor(1.0)
        state[name].copy_(widened(tensors[name], scale))
    save_file(tensors, tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
    prompt = torch.arange(40)[None]
    with torch.no_grad():
        wanted = model(prompt).logits[0]
    runner = load(tmp_path, "float32")
    runner.allocate(4)
    assert relative_error(all_logits(runner, prompt[0].tolist(), [2, 0, 1]), wanted) < 2e-5


def float8_folder(path: Path, scale: torch.Tensor | None) -> Path:
    random_model("Llama").save_pretrained(path)
    tensors = load_file(path / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    tensors[name] = tensors[name].to(torch.float8_e4m3fn)
    if scale is not None:
        tensors[name + "_scale"] = scale
    save_file(tensors, path / "model.safetensors")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"quantization_config": FP8}))
    return path


@pytest.mark.parametrize(
    ("scale", "words"),
    [
        (None, r"up_proj\.weight has 8-bit weights but no weight_scale"),
        (torch.ones(5, 7), r"up_proj\.weight of shape \[96, 64\] has a scale of shape \[5, 7\]"),
        (torch.ones(64), r"up_proj\.weight of shape \[96, 64\] has a scale of shape \[64\]"),
    ],
)
def test_scales_that_cannot_be_right(tmp_path: Path, scale: torch.Tensor | None, words: str) -> None:
    with pytest.raises(ModelFileError, match=words):
        load(float8_folder(tmp_path, scale), "float32")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"quant_method": "awq", "bits": 4}, "quantization_config of kind 'awq' is not supported"),
        ({"quant_method": "compressed-tensors", "format": "pack-quantized"}, "'compressed-tensors' is not supported"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "weight_block_size is"),
    ],
)
def test_other_kinds_are_named(tmp_path: Path, settings: dict[str, object], words: str) -> None:
    random_model("Llama").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
    with pytest.raises(ModelFileError, match=words):
        open_checkpoint(tmp_path)
