"""Rotary frequencies of models as large as real ones, against transformers' own, without their weights."""

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from engine.loader.fields import Fields
from engine.loader.hf_rope import read_rope, read_theta

REAL: dict[str, tuple[int, int, dict[str, Any]]] = {
    "vicuna-16k": (128, 4096, {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}),
    "internlm": (128, 32768, {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e6}),
    "llama-3.1": (
        128,
        131072,
        {
            "rope_type": "llama3",
            "rope_theta": 5e5,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    ),
    "llama-3.2": (
        64,
        131072,
        {
            "rope_type": "llama3",
            "rope_theta": 5e5,
            "factor": 32.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    ),
    "qwen2.5-yarn": (
        128,
        131072,
        {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 32768},
    ),
    "yarn-llama-2": (
        128,
        65536,
        {
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 16.0,
            "original_max_position_embeddings": 4096,
            "finetuned": True,
        },
    ),
    "gpt-oss-like": (
        64,
        131072,
        {
            "rope_type": "yarn",
            "rope_theta": 1.5e5,
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
        },
    ),
}


@pytest.mark.parametrize("name", REAL)
def test_frequencies_are_transformers_own(name: str) -> None:
    head_dim, context, parameters = REAL[name]
    fields = Fields("config.json", parameters)
    found, reach = read_rope(fields, read_theta(fields, 1e4), head_dim, context)
    config = LlamaConfig(
        hidden_size=head_dim, num_attention_heads=1, max_position_embeddings=context, rope_parameters=dict(parameters)
    )
    wanted = LlamaRotaryEmbedding(config)
    assert torch.allclose(found.frequency, wanted.inv_freq, rtol=1e-6, atol=0)
    assert found.magnitude == pytest.approx(wanted.attention_scaling)
    assert reach == context * (4 if name == "vicuna-16k" else 1)
    positions = torch.tensor([0, 1, 100])
    cosines, sines = wanted(torch.zeros(1), positions[None])
    factors = found.rotations(positions)[:, 0]
    assert torch.allclose(factors.real, cosines[0, :, : head_dim // 2], atol=2e-4)
    assert torch.allclose(factors.imag, sines[0, :, : head_dim // 2], atol=2e-4)
