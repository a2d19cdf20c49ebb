"""The spike detector on arrays, and who made a rise."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from billing.alerts.causes import shares
from billing.alerts.detector import HOURS_A_WEEK, LEAST_SCALE, Baseline, Series, baseline, between, score
from billing.alerts.kinds import Spike

Amounts = st.dictionaries(st.tuples(st.sampled_from("abcde"), st.just("")), st.floats(0, 1e6))


def a_past(weeks: int, noise: float = 0.1, seed: int = 1) -> Series:
    """Busy by day, quiet by night and on weekends."""
    rng = np.random.default_rng(seed)
    hours = np.arange(weeks * HOURS_A_WEEK)
    shape = (1 + 0.6 * np.cos((hours % 24 - 14) / 24 * 2 * math.pi)) * np.where(hours % HOURS_A_WEEK >= 120, 0.3, 1)
    past: Series = 10 * shape * np.exp(noise * rng.normal(size=hours.size))
    return past


@pytest.mark.parametrize("weeks", [2, 3, 8])
@pytest.mark.parametrize("hour", [2, 14, 120, 160])  # by night, by day, at the weekend's begin, on it
def test_a_third_more_is_usual_and_three_times_as_much_is_not(weeks: int, hour: int) -> None:
    past = a_past(weeks + 1)
    until = weeks * HOURS_A_WEEK + hour
    usual = baseline(past[:until])
    assert usual is not None
    assert abs(score(usual, past[until])) < 3
    assert score(usual, 3 * usual.expected) > Spike().score


def test_a_weekend_is_not_measured_by_weekdays() -> None:
    past = a_past(5)
    usual = baseline(past[: 4 * HOURS_A_WEEK + 130])  # a Saturday, 10:00
    assert usual is not None
    assert usual.expected == pytest.approx(past[4 * HOURS_A_WEEK + 130], rel=0.3)


def test_spikes_of_the_past_do_not_hide_a_new_one() -> None:
    clean = a_past(6)
    spiked = clean.copy()
    spiked[np.random.default_rng(2).choice(spiked.size, spiked.size // 20, replace=False)] *= 10
    before, after = baseline(clean), baseline(spiked)
    assert before is not None and after is not None
    assert after.expected == pytest.approx(before.expected, rel=0.2)
    assert score(after, 3 * after.expected) > Spike().score


def test_growth_is_no_spike() -> None:
    past = a_past(8) * 1.1 ** (np.arange(8 * HOURS_A_WEEK) / HOURS_A_WEEK)
    usual = baseline(past[:-1])
    assert usual is not None and abs(score(usual, past[-1])) < 3


@pytest.mark.parametrize(
    ("past", "known"),
    [
        (np.zeros(0), False),
        (np.zeros(3000), False),
        (a_past(2)[:-1], False),
        (a_past(2), True),
        (np.concatenate([np.zeros(2000), a_past(1)]), False),  # the zeros are from before there was anything
        (np.concatenate([[1.0], np.zeros(2000), a_past(1)]), True),
    ],
)
def test_nothing_is_judged_before_the_warm_up(past: Series, known: bool) -> None:
    assert (baseline(past) is not None) == known


@given(st.floats(1e-6, 1e6), st.integers(2, 5), st.floats(0, 1e3))
@settings(max_examples=25, deadline=None)
def test_the_unit_of_money_does_not_matter(unit: float, weeks: int, amount: float) -> None:
    one, other = baseline(a_past(weeks)), baseline(a_past(weeks) * unit)
    assert one is not None and other is not None
    assert score(other, amount * unit) == pytest.approx(score(one, amount), rel=1e-6, abs=1e-6)


@given(st.integers(0, 2**32), st.floats(0, 1), st.floats(0, 12), st.floats(0, 1e9), st.floats(0, 1e9))
@settings(max_examples=50, deadline=None)
def test_any_past_gives_a_finite_answer_that_rises_with_the_amount(
    seed: int, idle: float, wild: float, a: float, b: float
) -> None:
    rng = np.random.default_rng(seed)
    past = np.where(rng.random(400) < idle, 0.0, np.exp(wild * rng.normal(size=400)))
    usual = baseline(past)
    if usual is None:
        return
    assert usual.expected >= 0 and usual.scale >= LEAST_SCALE and math.isfinite(usual.scale)
    low, high = sorted((a, b))
    assert score(usual, low) <= score(usual, high) and math.isfinite(score(usual, high))


def test_an_hour_between_two_is_a_mix_of_them() -> None:
    last, running = Baseline(10, 0.2, 1), Baseline(30, 0.4, 3)
    assert between(last, running, 0) == last and between(last, running, 1) == running
    assert between(last, running, 0.5) == pytest.approx(Baseline(20, 0.3, 2))


def test_whoever_rose_made_the_rise() -> None:
    now = {("a", "a"): 40.0, ("b", "b"): 12.0, ("c", "c"): 1.0}
    before = [
        {("a", "a"): 10.0, ("b", "b"): 2.0, ("c", "c"): 5.0},
        {("a", "a"): 10.0, ("b", "b"): 2.0},
        {("a", "a"): 900.0},
    ]
    found = shares(now, before)
    assert [item[0] for item, _, _ in found] == ["a", "b", "c"]
    by = {item[0]: (share, usual) for item, share, usual in found}
    assert by["a"][0] == pytest.approx(30 / 41) and by["b"][0] == pytest.approx(10 / 41)
    assert by["a"][1] == pytest.approx(10 / 12)


@given(Amounts, st.lists(Amounts, max_size=4))
def test_shares_of_a_rise_add_up_to_all_of_it(
    now: dict[tuple[str, str], float], before: list[dict[tuple[str, str], float]]
) -> None:
    found = shares(now, before)
    assert all(0 <= share <= 1 + 1e-9 for _, share, _ in found)
    assert not found or sum(share for _, share, _ in found) == pytest.approx(1)
