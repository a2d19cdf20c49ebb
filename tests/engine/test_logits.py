"""Penalties, biases, forbidden tokens and masks: each row by its own rules, as their definitions say."""

import math
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.logits import TokenRules, apply_grammars, apply_rules, needs_rules
from engine.sampling_params import ParameterError, SamplingParams

VOCABULARY = 40
tokens = st.lists(st.integers(0, VOCABULARY - 1), max_size=30)
rows = st.tuples(
    st.builds(
        SamplingParams,
        frequency_penalty=st.sampled_from([0.0, 0.5, -1.0]),
        presence_penalty=st.sampled_from([0.0, 1.5, -2.0]),
        repetition_penalty=st.sampled_from([1.0, 1.3, 0.5]),
        logit_bias=st.sampled_from([(), ((3, 5.0), (39, -100.0))]),
        bad_words=st.sampled_from([(), ((5,), (1, 2)), ((7, 7, 7),)]),
        min_tokens=st.sampled_from([0, 4, 20]),
        ignore_eos=st.booleans(),
    ),
    tokens,
    tokens,
)


def by_definition(logits: list[float], params: SamplingParams, prompt: list[int], output: list[int]) -> list[float]:
    """One token at a time."""
    counts = Counter(output)
    result = []
    for token, logit in enumerate(logits):
        if token in counts or token in prompt:
            logit = logit / params.repetition_penalty if logit > 0 else logit * params.repetition_penalty
        logit -= params.frequency_penalty * counts[token] + params.presence_penalty * (token in counts)
        logit += dict(params.logit_bias).get(token, 0.0)
        for *before, last in params.bad_words:
            if last == token and output[len(output) - len(before) :] == before:
                logit = -math.inf
        if len(output) < params.min_tokens and token == 0 and not params.ignore_eos:
            logit = -math.inf
        result.append(logit)
    return result


@settings(deadline=None)
@given(st.lists(rows, min_size=1, max_size=5))
def test_rules_do_what_their_definitions_say(rows) -> None:
    logits = torch.randn(len(rows) + 1, VOCABULARY, generator=torch.Generator().manual_seed(len(rows)))
    before = logits.clone()
    rules = []
    for row, (params, prompt, output) in enumerate(rows):
        if needs_rules(params):
            rule = TokenRules(params, prompt, [0])
            for token in output:
                rule.push(token)
            rules.append((row, rule))
    apply_rules(logits, rules)
    for row, (params, prompt, output) in enumerate(rows):
        expected = torch.tensor(by_definition(before[row].tolist(), params, prompt, output))
        torch.testing.assert_close(logits[row], expected)
    assert torch.equal(logits[-1], before[-1])


def test_the_work_per_token_does_not_grow_with_the_text() -> None:
    rule = TokenRules(SamplingParams(frequency_penalty=0.1), [], [])
    for i in range(10_000):
        rule.push(i % 100)
    ids, counts = rule.seen
    assert len(ids) == 100 and set(counts.tolist()) == {100.0}


class OnlyEven:
    def mask(self) -> np.ndarray:
        return np.array([0x55555555], np.int32)

    def accept(self, token: int) -> None: ...


def test_a_grammar_forbids_what_its_mask_lacks_and_what_lies_past_it() -> None:
    logits = torch.zeros(2, VOCABULARY)
    apply_grammars(logits, [(1, OnlyEven())])
    assert not logits[0].any()
    assert (logits[1] == 0).nonzero().squeeze(1).tolist() == list(range(0, 32, 2))


@pytest.mark.parametrize(
    ("param", "values"),
    [
        ("frequency_penalty", [-2.1, 2.1, math.nan]),
        ("presence_penalty", [3, "1"]),
        ("repetition_penalty", [0, -1, math.inf, 11]),
        ("logit_bias", [((1, 101.0),), ((1, math.nan),), tuple((i, 0.0) for i in range(2000))]),
        ("min_tokens", [-1, 1.5, 9]),
        ("logprobs", [-1, 21, True]),
        ("prompt_logprobs", [-1, 21]),
    ],
)
def test_a_bad_parameter_is_named(param: str, values: list[object]) -> None:
    for value in values:
        with pytest.raises(ParameterError) as error:
            SamplingParams(**{"max_tokens": 8, param: value}).validate()  # type: ignore[arg-type]
        assert error.value.param == param
