"""Scores of prompts: complete and the same under pressure, and never more logits at once than a step may have."""

import time

from engine.accounting import Clock
from engine.hosted import SCORED_ROWS
from tests.engine.fake_model import expected_text, fake_model
from tests.engine.harness import Harness, generation, text


def test_pressure_changes_no_score() -> None:
    prompts = [f"prompt {i} " * (6 + i) for i in range(6)]
    found = []
    for blocks in (200, 20):
        model = fake_model(num_blocks=blocks, budget=24)
        with Harness(model) as harness:
            requests = [harness.submit(model, prompt, 70, prompt_logprobs=2, logprobs=1) for prompt in prompts]
            events = harness.collect(*requests)
        for request, prompt in zip(requests, prompts, strict=True):
            assert text(events[request]) == expected_text(prompt, 70)
            assert [score.token for score in request.prompt_scores] == request.sequence.tokens[1 : len(prompt)]
            assert sum(len(event.scores) for event in events[request]) == 70
        found.append([request.prompt_scores for request in requests])
        assert (model.scheduler.preemptions > 0) == (blocks == 20)
    assert found[0] == found[1]


def test_a_long_prompt_is_scored_a_few_rows_at_a_time() -> None:
    model = fake_model(num_blocks=100, budget=512)
    model.runner.batches.clear()
    with Harness(model) as harness:
        requests = [harness.submit(model, c * 400, 5, prompt_logprobs=1) for c in "ab"]
        events = harness.collect(*requests)
    assert max(len(batch.logits_rows) for batch in model.runner.batches) == SCORED_ROWS
    for request in requests:
        assert len(request.prompt_scores) == 399 and len(text(events[request])) == 5


def test_an_abort_while_a_prompt_is_scored_gives_everything_back() -> None:
    model = fake_model(num_blocks=100, budget=16)
    with Harness(model) as harness:
        request = harness.submit(model, "x" * 400, 5, prompt_logprobs=1)
        harness.core.abort(model, request)
        assert harness.collect(request)[request][-1].finish == "abort"
        again = harness.submit(model, "x" * 400, 5)
        assert len(text(harness.collect(again)[again])) == 5


def test_prompts_that_are_only_read_leave_the_others_of_their_step_alone() -> None:
    model = fake_model(num_blocks=100, budget=512)
    for temperature in (0.0, 1e-3):
        prompts = {f"{temperature} {word}": count for word, count in (("read", 0), ("one", 3), ("skip", 0), ("two", 4))}
        requests = {
            prompt: generation(model, prompt, count, streaming=False, max_tokens=count, temperature=temperature)
            for prompt, count in prompts.items()
        }
        for request in requests.values():
            model.start(request)
        events = []
        while model.has_work:
            events += model.step(Clock(time.monotonic()))
        found = {event.generation: (event.text, event.finish) for event in events if event.finish}
        for prompt, request in requests.items():
            assert found[request] == (expected_text(prompt, prompts[prompt]), "length")
