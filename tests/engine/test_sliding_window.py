"""Gemma 3's local layers and a reused prefix: blocks behind a layer's window are still the right ones to share."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from engine.block_manager import BlockManager
from engine.catalog import pull
from engine.hosted import HostedModel
from engine.native import library
from engine.runner import DType, load
from engine.tokenizer import Tokenizer, load_tokenizer
from tests.engine.fake_model import fake_tokenizer
from tests.engine.fake_runner import VOCAB
from tests.engine.harness import Harness, text
from tests.engine.model_files import random_model

TURNS = 4
COUNT = 8
"""Tokens an answer; each takes the real model 0.1 s, most of it for the head."""


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def check_reuse(
    path: Path, dtype: DType, tokenizer: Tokenizer, prompt: str, window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same prompt four times, then with another end, then without the cache: one text each, and stable hits."""
    if dtype == "int8" and library() is None:
        pytest.skip("op by op, an int8 row depends on its neighbours: only the compiled decoder's do not")
    model = HostedModel("gemma", load(path, dtype), tokenizer, 200, 128)
    with Harness(model) as harness:

        def answer(ask: str) -> tuple[str, int]:
            request = harness.submit(model, ask, COUNT)
            said = text(harness.collect(request)[request])
            length = request.sequence.prompt_len
            assert length > window + 64
            assert request.sequence.cached_tokens in (0, (length - 1) // 16 * 16) or ask != prompt
            return said, request.sequence.cached_tokens

        turns = [answer(prompt) for _ in range(TURNS)]
        other_end = prompt[: len(prompt) * 9 // 10] + " But then"
        warm_end = answer(other_end)
        monkeypatch.setattr(BlockManager, "match", lambda *args: [])
        assert {said for said, _ in turns} == {answer(prompt)[0]}
        assert [cached > 0 for _, cached in turns] == [False] + [True] * (TURNS - 1)
        assert len({cached for _, cached in turns[1:]}) == 1
        assert warm_end[1] > window and warm_end[0] == answer(other_end)[0]


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_a_window_of_two_blocks(tmp_path: Path, dtype: DType, monkeypatch: pytest.MonkeyPatch) -> None:
    layers = ["sliding_attention", "full_attention", "sliding_attention"]
    random_model("Gemma3", vocab_size=VOCAB, head_dim=16, sliding_window=32, layer_types=layers).save_pretrained(
        tmp_path
    )
    check_reuse(tmp_path, dtype, fake_tokenizer(), "What a long prompt this is, says the window. " * 5, 32, monkeypatch)


@pytest.mark.model
@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_the_real_model_past_its_window(dtype: DType, monkeypatch: pytest.MonkeyPatch) -> None:
    path = pull("gemma3-270m")
    prompt = "".join(f"Entry {i}: {i * 37 % 101} apples went to harbour {i % 7}, paid in silver.\n" for i in range(36))
    check_reuse(path, dtype, load_tokenizer(path), prompt, 512, monkeypatch)
