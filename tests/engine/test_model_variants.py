"""What models of one family differ in, against transformers on tiny random models in float32: stretched contexts,
windows, soft caps, biases; from folders in both spellings and from GGUF files."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from engine.loader import open_checkpoint
from engine.native import library
from engine.native.runner import NativeRunner, read
from engine.runner import load
from tests.engine.flat import Paged, all_logits, greedy, relative_error
from tests.engine.model_files import convert_to_gguf, random_model

TOKENS = 150
PROMPT = torch.randint(0, 300, (1, TOKENS), generator=torch.Generator().manual_seed(1))
FIRST = 32
"""Tokens of the context that the stretched models were first trained on."""


def rope(kind: str, **fields: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 1e4, **fields}}


def yarn(**fields: Any) -> dict[str, Any]:
    return rope("yarn", factor=8.0, original_max_position_embeddings=FIRST, **fields)


LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": FIRST}
GEMMA3 = {
    "head_dim": 32,
    "sliding_window": 24,
    "query_pre_attn_scalar": 20,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}
GEMMA2 = {"head_dim": 32, "query_pre_attn_scalar": 20, "attn_logit_softcapping": 1.5, "final_logit_softcapping": 3.0}
GEMMA3_LINEAR = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
}
WINDOW = {"use_sliding_window": True, "sliding_window": 24}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "linear": ("Llama", rope("linear", factor=4.0)),
    "dynamic": ("Llama", rope("dynamic", factor=4.0)),
    "llama3": ("Llama", rope("llama3", **LLAMA3)),
    "yarn": ("Llama", yarn()),
    "yarn-qwen3": ("Qwen3", {**yarn(), "head_dim": 32}),
    "yarn-betas": ("Qwen2", yarn(beta_fast=20.0, beta_slow=3.0)),
    "yarn-whole-pairs-not": ("Llama", yarn(truncate=False)),
    "yarn-attention-factor": ("Llama", yarn(attention_factor=1.3)),
    "yarn-mscale": ("Llama", yarn(mscale=1.5, mscale_all_dim=0.7)),
    "yarn-one-mscale": ("Llama", yarn(mscale=1.5)),
    "mistral-window": ("Mistral", {"sliding_window": 24, "head_dim": 24}),
    "mistral-no-window": ("Mistral", {"sliding_window": None}),
    "qwen2-window": ("Qwen2", {**WINDOW, "max_window_layers": 1}),
    "qwen2-window-off": ("Qwen2", {"use_sliding_window": False, "sliding_window": 24, "max_window_layers": 0}),
    "qwen3-window": ("Qwen3", {**WINDOW, "head_dim": 32, "layer_types": GEMMA3["layer_types"]}),
    "qwen3-biases": ("Qwen3", {"head_dim": 32, "attention_bias": True}),
    "gemma3-linear": ("Gemma3", {**GEMMA3, "rope_parameters": GEMMA3_LINEAR}),
    "gemma3-cap": ("Gemma3", {**GEMMA3, "final_logit_softcapping": 3.0}),
    "gemma2": ("Gemma2", {**GEMMA2, "sliding_window": 24}),
    "gemma2-no-caps": ("Gemma2", {**GEMMA2, "attn_logit_softcapping": None, "final_logit_softcapping": None}),
    "gemma3-pattern": ("Gemma3", {**GEMMA3, "layer_types": None, "sliding_window_pattern": 2}),
    "gemma3-biases-untied": ("Gemma3", {**GEMMA3, "attention_bias": True, "tie_word_embeddings": False}),
}


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Work this small only waits for a second thread, for long where the cores are busy."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def logits(model: transformers.PreTrainedModel) -> torch.Tensor:
    with torch.no_grad():
        return model(PROMPT).logits[0]


def check(path: Path, wanted: torch.Tensor) -> None:
    """Logits whole and in chunks, and greedy text: the choice after each prefix, where none is a near tie."""
    runner = load(path, "float32")
    runner.allocate(24)
    tokens = PROMPT[0].tolist()
    whole = all_logits(runner, tokens, list(range(10)))
    assert relative_error(whole, wanted) < 2e-5
    assert relative_error(all_logits(runner, tokens, list(range(22, 12, -1)), 37), wanted) < 2e-5
    best = wanted.topk(2).values
    clear = best[:, 0] - best[:, 1] > 1e-3 * wanted.abs().max()
    assert clear.float().mean() > 0.9 and torch.equal(whole.argmax(-1)[clear], wanted.argmax(-1)[clear])


@pytest.mark.parametrize("name", CASES)
def test_folders_match_transformers(tmp_path: Path, name: str) -> None:
    family, options = CASES[name]
    model = random_model(family, **options)
    model.save_pretrained(tmp_path)
    check(tmp_path, logits(model))


@pytest.mark.parametrize("name", ["yarn-attention-factor", "mistral-window", "qwen3-window", "gemma3-linear", "gemma2"])
def test_the_compiled_decoder_has_the_same_variants(tmp_path: Path, name: str) -> None:
    """In int8, so that the bound is wide; each of these is off by 0.8 and more without what it varies."""
    found = library()
    if found is None:
        pytest.skip("this machine cannot compile or run it")
    family, options = CASES[name]
    model = random_model(family, **options)
    model.save_pretrained(tmp_path)
    runner = NativeRunner(read(tmp_path, 8), found)
    runner.allocate(24)
    for chunk in (None, 37):
        got = all_logits(runner, PROMPT[0].tolist(), list(range(10)), chunk)
        assert relative_error(got, logits(model)) < 0.15


@pytest.mark.parametrize("name", ["linear", "dynamic", "llama3", "yarn-betas", "gemma3-linear", "gemma3-pattern"])
def test_older_spellings_mean_the_same(tmp_path: Path, name: str) -> None:
    """`rope_theta` and `rope_scaling` with a `type`, as every file before 2026 has them."""
    family, options = CASES[name]
    model = random_model(family, **options)
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    parameters = config.pop("rope_parameters")
    if family == "Gemma3":
        config["rope_local_base_freq"] = parameters["sliding_attention"]["rope_theta"]
        parameters = parameters["full_attention"]
        config["sliding_window_pattern"] = config.pop("_sliding_window_pattern")
        if options["layer_types"] is None:
            del config["layer_types"]
    config["rope_theta"] = parameters.pop("rope_theta")
    kind = parameters.pop("rope_type")
    config["rope_scaling"] = None if kind == "default" else {"type": kind, **parameters}
    (tmp_path / "config.json").write_text(json.dumps(config))
    check(tmp_path, logits(model))


GGUF_CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "linear": ("linear", {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}),
    "linear-old-key": ("linear", {"rope.scale_linear": 4.0}),
    "yarn": ("yarn", {}),
    "yarn-qwen3": ("yarn-qwen3", {}),
    "yarn-betas": ("yarn-betas", {"rope.scaling.yarn_beta_fast": 20.0, "rope.scaling.yarn_beta_slow": 3.0}),
    "yarn-attention-factor": ("yarn-attention-factor", {"rope.scaling.yarn_attn_factor": 1.3}),
    "qwen3-biases": ("qwen3-biases", {}),
    "gemma3-linear": (
        "gemma3-linear",
        {
            "rope.scaling.type": "linear",
            "rope.scaling.factor": 8.0,
            "rope.freq_base_swa": 500.0,
            "attention.sliding_window_pattern": [True, False, True],
        },
    ),
    "gemma3-cap": (
        "gemma3-cap",
        {"final_logit_softcapping": 3.0, "attention.sliding_window_pattern": [True, False, True]},
    ),
    "gemma2": ("gemma2", {"attn_logit_softcapping": 1.5, "final_logit_softcapping": 3.0}),
    "gemma3-pattern": ("gemma3-pattern", {"attention.sliding_window_pattern": 2}),
}


@pytest.mark.parametrize("name", GGUF_CASES)
def test_gguf_files_match_transformers(tmp_path: Path, name: str) -> None:
    case, fields = GGUF_CASES[name]
    family, options = CASES[case]
    model = random_model(family, **options)
    if case.startswith("yarn"):
        original = {"rope.scaling.original_context_length": FIRST}
        fields = {"rope.scaling.type": "yarn", "rope.scaling.factor": 8.0, **original, **fields}
    if family.startswith("Gemma"):
        scale = GEMMA3["query_pre_attn_scalar"] ** -0.5
        fields = {"attention.sliding_window": 24, "attention.scale": scale, **fields}
    check(convert_to_gguf(tmp_path / "m.gguf", model, **fields), logits(model))


def test_greedy_text_past_the_first_context_is_transformers_own(tmp_path: Path) -> None:
    """Token by token from a cache, on both sides."""
    model = random_model("Llama", **yarn())
    model.save_pretrained(tmp_path)
    prompt = PROMPT[:, : FIRST - 5]
    wanted = model.generate(prompt, max_new_tokens=40, do_sample=False, eos_token_id=None, pad_token_id=0)
    runner = load(tmp_path, "float32")
    runner.allocate(8)
    assert greedy(runner, [Paged(prompt[0].tolist(), list(range(5)))], 40)[0] == wanted[0, FIRST - 5 :].tolist()


def test_the_context_is_what_the_stretched_embedding_reaches(tmp_path: Path) -> None:
    """`dynamic` changes every frequency with each token past the first context, so that is where it ends here."""
    for name, reach in (("linear", 4 * 512), ("dynamic", 512), ("llama3", 512), ("yarn", 512), ("gemma3-linear", 512)):
        family, options = CASES[name]
        folder = tmp_path / name
        random_model(family, **options).save_pretrained(folder)
        assert open_checkpoint(folder).config.max_context == reach, name
    config = json.loads((tmp_path / "yarn" / "config.json").read_text())
    config["rope_parameters"]["original_max_position_embeddings"] = 100
    (tmp_path / "yarn" / "config.json").write_text(json.dumps(config))
    assert open_checkpoint(tmp_path / "yarn").config.max_context == 800


@pytest.mark.parametrize("family", ["Mistral", "Qwen2", "Qwen3", "Gemma2", "Gemma3"])
def test_fields_that_are_left_out_mean_the_familys_default(tmp_path: Path, family: str) -> None:
    """What transformers' own configuration has for them."""
    options = {"use_sliding_window": True, "max_window_layers": 1} if "Qwen" in family else {}
    model = random_model(family, num_hidden_layers=2, **options)
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    optional = "head_dim hidden_act hidden_activation layer_types query_pre_attn_scalar rms_norm_eps rope_parameters "
    optional += (
        "sliding_window tie_word_embeddings attn_logit_softcapping final_logit_softcapping _sliding_window_pattern"
    )
    left = {name: value for name, value in config.items() if name not in optional.split()}
    (tmp_path / "config.json").write_text(json.dumps(left))
    check(tmp_path, logits(model))
    windows = [layer.window for layer in open_checkpoint(tmp_path).settings.layers]
    assert windows == {"Mistral": [4096] * 2, "Gemma2": [4096, None], "Gemma3": [4096] * 2}.get(family, [None, 4096])
    assert open_checkpoint(tmp_path).config.rope_theta == (1e6 if family == "Gemma3" else 1e4)
