"""The real models against transformers reading the same GGUF file, in float32.

Relative error is the largest logit difference over the largest logit magnitude. Greedy text is compared by giving
transformers our prompt and our 64 tokens in one forward: when its argmax agrees at each position, its own greedy run is
the same, token by token.
"""

import functools
import gc
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from engine.catalog import pull
from engine.loader.dequantise import dequantised
from engine.runner import ModelRunner, load
from engine.tokenizer import load_tokenizer
from tests.engine.flat import Paged, all_logits, flat_batch, greedy, relative_error

pytestmark = pytest.mark.model

TEXTS = [
    "The capital of France is",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
    "Once upon a time, in a village by the sea, there lived an old fisherman who",
    "2 + 2 = 4\n3 + 3 = 6\n4 + 4 =",
    "水的化学式是",
    "import json\n\nwith open('data.json') as file:\n",
    "Dear customer, thank you for your message. We are sorry to hear that your order",
    "The three laws of motion, in the words of a physics teacher to a class of ten-year-olds:\n1.",
]
COUNT = 64
MODELS = ["smollm2-135m", "qwen2.5-coder-0.5b"] + (
    ["qwen2.5-coder-1.5b", "gemma3-270m"] if os.environ.get("FARTHING_TEST_ALL_MODELS") else []
)


@dataclass
class Real:
    path: Path
    runner: ModelRunner
    prompts: list[list[int]]
    answers: list[list[int]]


@pytest.fixture(scope="module", params=MODELS)
def real(request: pytest.FixtureRequest) -> Iterator[Real]:
    """A float32 runner and its greedy answers to the prompts, all eight decoded together."""
    path = pull(request.param)
    tokenizer = load_tokenizer(path)
    prompts = [tokenizer.encode(text, add_special=True) for text in TEXTS]
    runner = load(path, "float32")
    runner.allocate(128)
    answers = greedy(runner, [Paged(prompt, list(range(8 * i, 8 * i + 8))) for i, prompt in enumerate(prompts)], COUNT)
    yield Real(path, runner, prompts, answers)
    del runner
    gc.collect()


def fast_dequantize(data: np.ndarray, kind: gguf.GGMLQuantizationType) -> np.ndarray:
    """What gguf.dequantize gives, bit for bit (test_dequantise.py), in a fifth of the time."""
    elements, size = gguf.GGML_QUANT_SIZES[kind]
    rows = np.array(data.view(np.uint8)).reshape(-1, data.view(np.uint8).shape[-1])
    return dequantised(rows, kind, (*data.shape[:-1], rows.shape[1] // size * elements)).numpy()


def test_logits_and_greedy_text_match_transformers(real: Real, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf, "dequantize", fast_dequantize)
    monkeypatch.setattr(gguf, "GGUFReader", functools.cache(gguf.GGUFReader))  # it takes 10 s, twice
    peer = AutoModelForCausalLM.from_pretrained(real.path.parent, gguf_file=real.path.name, dtype=torch.float32)
    for prompt, answer in zip(real.prompts, real.answers, strict=True):
        tokens = prompt + answer
        with torch.no_grad():
            wanted = peer(torch.tensor([tokens]), logits_to_keep=COUNT + 1).logits[0]
        assert wanted.argmax(-1)[:-1].tolist() == answer
        got = all_logits(real.runner, tokens, list(range(100, 108)))[-COUNT - 1 :]
        assert relative_error(got, wanted) < 1e-3


def test_chunked_warm_and_alone_give_the_same_text(real: Real) -> None:
    for prompt, answer in zip(real.prompts, real.answers, strict=True):
        whole = all_logits(real.runner, prompt + answer, list(range(100, 108)))
        chunked = all_logits(real.runner, prompt + answer, [111, 90, 117, 95, 113, 99, 92, 80], chunk=32)
        assert relative_error(chunked, whole) < 1e-4
        assert chunked.argmax(-1)[len(prompt) - 1 : -1].tolist() == answer
    # Blocks left by another request serve a prefix as well as computed ones do.
    shared = 16 * ((len(prompt) + COUNT) // 16 - 1)
    warm = Paged(prompt + answer, [111, 90, 117, 95, 113, 99, 92, 80], done=shared)
    last = real.runner.forward(flat_batch([(warm, len(warm.tokens) - shared)]))
    assert relative_error(last[0], whole[-1]) < 1e-4
    assert greedy(real.runner, [Paged(real.prompts[0], list(range(100, 108)))], COUNT)[0] == real.answers[0]


def test_reduced_precision_agrees_where_the_reference_is_sure(real: Real) -> None:
    """Mean divergence of next-token distributions, and the choice wherever float32 leads by 30 percentage points."""
    for dtype, bound in (("bfloat16", 0.01), ("int8", 0.15)):
        runner = load(real.path, dtype)
        runner.allocate(8)
        divergences, agreed, sure = [], 0, 0
        for prompt, answer in zip(real.prompts, real.answers, strict=True):
            wanted = all_logits(real.runner, prompt + answer, list(range(100, 108))).log_softmax(-1)
            got = all_logits(runner, prompt + answer, list(range(8))).log_softmax(-1)
            divergences.append((wanted.exp() * (wanted - got)).sum(-1).mean().item())
            best = wanted.exp().topk(2).values
            clear = best[:, 0] - best[:, 1] > 0.3
            sure += int(clear.sum())
            agreed += int((wanted.argmax(-1) == got.argmax(-1))[clear].sum())
        print(dtype, sum(divergences) / len(divergences), agreed / sure)
        assert sum(divergences) / len(divergences) < bound
        assert agreed / sure > 0.95
