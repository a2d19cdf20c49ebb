"""Tiny random models on the Triton backend give the same greedy text as on the CPU backend.

Run in a process of its own: by test_triton.py in the interpreter, by `python -m benchmarks.gpu` on a GPU.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from engine.backends.triton import TritonBackend
from engine.kernels import INTERPRETED
from engine.loader import open_checkpoint
from engine.models import build
from engine.runner import ModelRunner, load
from tests.engine.flat import Paged, all_logits, flat_batch, greedy, relative_error

SIZES = {
    "vocab_size": 120,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
GEMMA3 = {
    "head_dim": 16,
    "sliding_window": 8,
    "query_pre_attn_scalar": 24,
    "layer_types": ["sliding_attention", "full_attention"],
}
CASES = {
    "llama": (LlamaForCausalLM, LlamaConfig, {"tie_word_embeddings": False, "attention_bias": True}),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {"head_dim": 24, "tie_word_embeddings": True}),
    "gemma3": (Gemma3ForCausalLM, Gemma3TextConfig, GEMMA3),
}


@pytest.fixture(scope="module", params=CASES, ids=list(CASES))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    family, config, options = CASES[request.param]
    model = family(config(**{**SIZES, **options}))
    torch.manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            scale = 0.2 if "norm" in name or "bias" in name else parameter.shape[-1] ** -0.5
            parameter.copy_(torch.randn_like(parameter) * scale + ("norm" in name and request.param != "gemma3"))
    path = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(path)
    return path


def on_triton(folder: Path, dtype: torch.dtype) -> ModelRunner:
    with torch.inference_mode():
        backend = TritonBackend(dtype, torch.device("cpu" if INTERPRETED else "cuda"))
        return ModelRunner(build(open_checkpoint(folder), backend), backend)


def both(folder: Path) -> tuple[ModelRunner, ModelRunner]:
    runners = load(folder, "float32"), on_triton(folder, torch.float32)
    for runner in runners:
        runner.allocate(24)
    return runners


def prompt(seed: int, count: int) -> list[int]:
    return torch.randint(0, SIZES["vocab_size"], (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def test_greedy_text_of_several_sequences(folder: Path) -> None:
    """Prompts of very different lengths in one step, then decoding together across block borders."""
    prompts = [prompt(seed, count) for seed, count in ((1, 3), (2, 37), (3, 15))]
    texts = [
        greedy(runner, [Paged(tokens, [i + 3 * j for j in (4, 2, 0, 5)]) for i, tokens in enumerate(prompts)], 8)
        for runner in both(folder)
    ]
    assert texts[0] == texts[1]


def test_chunked_prefill_and_prefix_reuse(folder: Path) -> None:
    cpu, triton = both(folder)
    tokens = prompt(4, 50)
    wanted = all_logits(cpu, tokens, [3, 1, 4, 7])
    assert relative_error(all_logits(triton, tokens, [3, 1, 4, 7], chunk=19).cpu(), wanted) < 1e-4
    # Another request has the first two blocks in common, and computes beside a third one that decodes.
    reusing = Paged(tokens[:32] + prompt(5, 9), [3, 1, 9, 10], done=32)
    alone = Paged([*reusing.tokens], [20, 21, 22, 23])
    assert greedy(triton, [reusing], 5) == greedy(cpu, [alone], 5)
    states = [runner.hidden(flat_batch([(Paged(tokens, [5, 6, 8, 11]), 50)])).cpu() for runner in (triton, cpu)]
    assert relative_error(*states) < 1e-4


def test_bfloat16_stays_close(folder: Path) -> None:
    cpu, _ = both(folder)
    triton = on_triton(folder, torch.bfloat16)
    triton.allocate(8)
    tokens = prompt(6, 40)
    got = all_logits(triton, tokens, [2, 5, 1])
    assert got.dtype == torch.float32
    assert relative_error(got.cpu(), all_logits(cpu, tokens, [2, 5, 1])) < 0.1
