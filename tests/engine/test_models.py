"""Every family against transformers, on tiny random models that both read from one folder, in float32."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from engine.runner import load
from tests.engine.flat import Paged, all_logits, flat_batch, greedy, relative_error
from tests.engine.model_files import random_model

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
GEMMA3 = {
    "head_dim": 16,
    "sliding_window": 8,
    "query_pre_attn_scalar": 24,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}
CASES = {
    "llama-tied": ("Llama", {"tie_word_embeddings": True}),
    "llama-untied": ("Llama", {"tie_word_embeddings": False, "head_dim": 24}),
    "llama-all-heads": ("Llama", {"num_key_value_heads": 4}),
    "llama-biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama3-rope": ("Llama", {"rope_parameters": LLAMA3_ROPE}),
    "linear-rope": (
        "Llama",
        {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}},
    ),
    "qwen2-tied": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2-untied": ("Qwen2", {"tie_word_embeddings": False, "num_key_value_heads": 1}),
    "qwen3": ("Qwen3", {"head_dim": 32}),
    "gemma3": ("Gemma3", GEMMA3),
}
PROMPT = torch.randint(0, 300, (1, 70), generator=torch.Generator().manual_seed(1))


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Work this small only waits for a second thread, for long where the cores are busy."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module", params=CASES, ids=list(CASES))
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, torch.Tensor]:
    """A model folder and transformers' logits [70, 300] for the prompt."""
    family, options = CASES[request.param]
    model = random_model(family, **options)
    folder = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(folder, max_shard_size="200KB")
    with torch.no_grad():
        return folder, model(PROMPT).logits[0]


def test_logits_match_transformers(saved: tuple[Path, torch.Tensor]) -> None:
    folder, wanted = saved
    runner = load(folder, "float32")
    runner.allocate(16)
    tokens = PROMPT[0].tolist()
    whole = all_logits(runner, tokens, [1, 2, 3, 4, 5])
    assert relative_error(whole, wanted) < 1e-4
    for chunk in (1, 16, 23):
        assert relative_error(all_logits(runner, tokens, [7, 3, 9, 1, 0], chunk), wanted) < 1e-4


def test_a_mixed_step_equals_each_alone(saved: tuple[Path, torch.Tensor]) -> None:
    """One step with prefill from the start, prefill after a cached part, and several decoding sequences."""
    folder, wanted = saved
    runner = load(folder, "float32")
    runner.allocate(64)
    tokens = PROMPT[0].tolist()
    plan = [(0, 40), (24, 30), (50, 1), (3, 1), (17, 1), (69, 1)]
    steps = []
    for index, (cached, new) in enumerate(plan):
        sequence = Paged(tokens, [index + 6 * i for i in range(5)])
        if cached:
            runner.forward(flat_batch([(sequence, cached)]))
        steps.append((sequence, new))
    got = runner.forward(flat_batch(steps))
    assert relative_error(got, wanted[[cached + new - 1 for cached, new in plan]]) < 1e-4


def test_reduced_precision_stays_close(saved: tuple[Path, torch.Tensor]) -> None:
    folder, wanted = saved
    for dtype, bound in (("bfloat16", 0.05), ("int8", 0.1)):
        runner = load(folder, dtype)
        runner.allocate(8)
        assert relative_error(all_logits(runner, PROMPT[0].tolist(), [4, 1, 2, 3, 0]), wanted) < bound


def test_greedy_does_not_depend_on_company(saved: tuple[Path, torch.Tensor]) -> None:
    folder, _ = saved
    runner = load(folder, "float32")
    runner.allocate(64)
    prompts = [PROMPT[0, i : 2 * i + 9].tolist() for i in range(8)]
    together = greedy(runner, [Paged(prompt, [i + 8 * j for j in range(5)]) for i, prompt in enumerate(prompts)], 20)
    alone = [greedy(runner, [Paged(prompt, [9, 2, 4, 30])], 20)[0] for prompt in prompts]
    assert together == alone


def test_block_bytes_is_what_the_pool_takes(saved: tuple[Path, torch.Tensor]) -> None:
    folder, _ = saved
    for dtype, size in (("float32", 4), ("bfloat16", 2)):
        runner = load(folder, dtype)
        runner.allocate(10)
        config = runner.config
        assert runner.block_bytes == 16 * 2 * config.num_layers * config.num_kv_heads * config.head_dim * size
