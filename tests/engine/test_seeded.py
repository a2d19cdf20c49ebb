"""A seeded request gives the same tokens whatever its neighbours are, with every sampler feature on."""

import pytest

from engine.logits import needs_rules
from tests.engine.fake_model import fake_model
from tests.engine.harness import Harness, text

FEATURES = {
    "plain": {},
    "filters": {"top_k": 40, "top_p": 0.9, "min_p": 0.01},
    "penalties": {"frequency_penalty": 0.5, "presence_penalty": 0.3, "repetition_penalty": 1.2},
    "biases": {"logit_bias": ((5, 2.0), (6, -100.0)), "bad_words": ((7,), (8, 9)), "min_tokens": 10},
    "logprobs": {"logprobs": 5, "prompt_logprobs": 3},
}


@pytest.mark.parametrize("name", FEATURES)
def test_alone_and_in_company(name: str) -> None:
    found = []
    for company in (0, 6):
        model = fake_model(num_blocks=24, budget=16)
        with Harness(model) as harness:
            others = [
                harness.submit(model, f"other number {i}", 30, temperature=1.0, **features)
                for i, features in enumerate([*FEATURES.values(), {}][:company])
            ]
            request = harness.submit(model, "seeded", 30, temperature=1.5, seed=7, **FEATURES[name])
            events = harness.collect(request, *others)[request]
            scores = [score for event in events for score in event.scores]
            found.append((text(events), scores, request.prompt_scores))
            assert (request.rules is not None) == needs_rules(request.params)
    assert found[0] == found[1]
    assert len(found[0][1]) == (30 if name == "logprobs" else 0)
