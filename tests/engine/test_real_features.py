"""Texts, log-probabilities and embeddings of the real small model: its own, whatever was cached or ran beside them."""

import gc
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch

from engine.hosted import HostedModel
from engine.runner import ModelRunner, load
from engine.tokenizer import Tokenizer, load_tokenizer
from tests.engine.flat import Paged, all_logits, flat_batch
from tests.engine.harness import Harness, text
from tests.engine.serving import serving

pytestmark = pytest.mark.model

PROMPT = "A ledger is a book of accounts. Every entry names what was bought, by whom, and what it cost. " * 4
SENTENCES = ["The cat sat on the mat.", "A kitten was lying on the rug.", "Interest rates rose by half a per cent."]


@pytest.fixture(scope="module")
def tokenizer(small_model: Path) -> Tokenizer:
    return load_tokenizer(small_model)


@pytest.fixture(scope="module")
def runner(small_model: Path) -> Iterator[ModelRunner]:
    yield load(small_model, "int8")
    gc.collect()


def test_prompt_logprobs_are_the_models_own_and_the_same_warm(runner: ModelRunner, tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode(PROMPT, add_special=True)
    runner.allocate(64)
    direct = all_logits(runner, tokens, list(range(64))).log_softmax(-1)
    model = HostedModel("m", runner, tokenizer, 64, 96)
    with Harness(model) as harness:
        found = []
        for _ in range(2):
            request = harness.submit(model, PROMPT, 4, prompt_logprobs=3, logprobs=0)
            events = harness.collect(request)[request]
            found.append(request.prompt_scores)
            assert events[-1].account.input_cached == 0
            company = harness.submit(model, PROMPT, 4)
            assert text(harness.collect(company)[company]) == text(events)
    assert found[0] == found[1]
    assert [score.token for score in found[0]] == tokens[1:]
    for row, score in enumerate(found[0]):
        near = 0 if runner.batch_invariant else 0.1
        assert score.logprob == pytest.approx(direct[row, score.token].item(), abs=near)
        assert len(score.top) == 3 and score.top[0][1] == pytest.approx(direct[row].max().item(), abs=near)


def test_embeddings_are_the_mean_of_the_last_hidden_states(runner: ModelRunner, tokenizer: Tokenizer) -> None:
    model = HostedModel("m", runner, tokenizer, 64, 16)
    with serving(model) as url, httpx.Client(base_url=url, timeout=60) as http:
        body = {"model": "m", "input": [*SENTENCES, PROMPT]}
        data = http.post("/v1/embeddings", json=body).json()["data"]
    vectors = np.array([item["embedding"] for item in data])
    assert np.allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)
    assert vectors[0] @ vectors[1] > vectors[0] @ vectors[2]
    tokens = tokenizer.encode(PROMPT, add_special=True)
    runner.allocate(64)
    hidden = runner.hidden(flat_batch([(Paged(tokens, list(range(64))), len(tokens))]))
    direct = torch.nn.functional.normalize(hidden.mean(0), dim=0).numpy()
    assert vectors[3] @ direct == pytest.approx(1, abs=1e-3)


def test_a_deterministic_request_has_the_same_logprobs_in_company(runner: ModelRunner, tokenizer: Tokenizer) -> None:
    if not runner.batch_invariant:
        pytest.skip("this machine cannot run the int8 format whose results do not depend on the batch")
    prompts = [PROMPT[i : i + 40 + 7 * i] for i in range(44)]
    found = []
    for company in (0, 43):
        model = HostedModel("m", runner, tokenizer, 600, 128)
        with Harness(model) as harness:
            others = [harness.submit(model, prompt, 12) for prompt in prompts[:company]]
            request = harness.submit(model, prompts[-1], 12, logprobs=5, temperature=1.0, seed=1)
            events = harness.collect(request, *others)[request]
            found.append((text(events), [score for event in events for score in event.scores]))
    assert found[0] == found[1] and len(found[0][1]) == 12


def test_collisions_and_pressure_change_no_text(
    runner: ModelRunner, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where all blocks have one hash, and where the pool is too small for all that run; and no hit is reported."""
    if not runner.batch_invariant:
        pytest.skip("op by op, an int8 row depends on its neighbours")
    prompts = [f"{number}: {PROMPT[: 100 + 40 * number]}" for number in range(4)]
    found, preemptions = [], []
    for blocks, digest in ((200, None), (200, lambda *fields: b"same"), (16, None)):
        model = HostedModel("m", runner, tokenizer, blocks, 64)
        if digest:
            monkeypatch.setattr(model.blocks, "digest", digest)
        with Harness(model) as harness:
            requests = [harness.submit(model, prompt, 80) for prompt in prompts]
            events = harness.collect(*requests)
            found.append([text(events[request]) for request in requests])
            assert all(events[request][-1].account.input_cached == 0 for request in requests)
            again = harness.submit(model, prompts[0], 80)
            assert text(harness.collect(again)[again]) == found[0][0]
            preemptions.append(model.scheduler.preemptions)
    assert found[0] == found[1] == found[2]
    assert preemptions[:2] == [0, 0] and preemptions[2] > 0
