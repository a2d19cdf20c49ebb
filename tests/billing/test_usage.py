"""Reported counts become disjoint classes; what cannot be right is flagged and never earns a discount."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from billing.records import TokenClasses
from billing.usage import MOST_TOKENS, token_classes

counts = st.integers(-50, 200)


@pytest.mark.parametrize(
    ("reported", "classes"),
    [
        ({}, TokenClasses(input_fresh=1000, output_text=136)),
        (
            {"cached_tokens": 200, "cache_write_tokens": 700},
            TokenClasses(input_fresh=100, input_cache_write=700, input_cached=200, output_text=136),
        ),
        ({"reasoning_tokens": 31}, TokenClasses(input_fresh=1000, output_text=105, output_reasoning=31)),
        ({"total_tokens": 1136}, TokenClasses(input_fresh=1000, output_text=136)),
    ],
)
def test_consistent_usage_is_split_without_a_flag(reported: dict[str, int], classes: TokenClasses) -> None:
    assert token_classes(1000, 136, **reported) == (classes, None)


@pytest.mark.parametrize(
    ("reported", "flag"),
    [
        ({"cached_tokens": 1001}, "cached_tokens 1001 + cache_write_tokens 0 exceed prompt_tokens 1000"),
        ({"cached_tokens": 600, "cache_write_tokens": 600}, "exceed prompt_tokens 1000"),
        ({"reasoning_tokens": 137}, "reasoning_tokens 137 exceed completion_tokens 136"),
        ({"total_tokens": 1}, "total_tokens is 1, its parts are 1000 \\+ 136"),
        ({"cached_tokens": -1}, "cached_tokens is -1"),
    ],
)
def test_inconsistent_usage_is_flagged_and_taken_at_the_full_price(reported: dict[str, int], flag: str) -> None:
    classes, said = token_classes(1000, 136, **reported)
    assert classes == TokenClasses(input_fresh=1000, output_text=136)
    assert said is not None
    assert flag.replace("\\", "") in said


def test_absurd_counts_fit_into_a_bigint_and_are_flagged() -> None:
    classes, flag = token_classes(10**30, 10**5000, cached_tokens=10**29, total_tokens=-(10**5000))
    assert (classes.input_fresh, classes.input_cached, classes.output_text) == (0, MOST_TOKENS, MOST_TOKENS)
    assert 5 * MOST_TOKENS < 2**63
    assert flag is not None and "prompt_tokens is more than" in flag and "completion_tokens is more than" in flag


@given(counts, counts, counts, counts, counts)
def test_the_classes_add_up_to_what_was_reported(
    prompt: int, completion: int, read: int, write: int, think: int
) -> None:
    classes, flag = token_classes(
        prompt, completion, cached_tokens=read, cache_write_tokens=write, reasoning_tokens=think
    )
    assert classes.prompt_tokens == max(prompt, 0)
    assert classes.completion_tokens == max(completion, 0)
    sane = min(prompt, completion, read, write, think) >= 0 and read + write <= prompt and think <= completion
    assert (flag is None) == sane
