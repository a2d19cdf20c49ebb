"""The balancing policies: pure, so their properties are tried with many situations."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.upstreams.balance import EXPLORED, POLICIES, Balance, View, latency, least_busy, prefix_affine, weighted

ROLLS = st.floats(0, 1, exclude_max=True)
VIEWS = st.lists(
    st.builds(
        View,
        weight=st.integers(1, 10),
        in_flight=st.integers(0, 200),
        seconds=st.none() | st.floats(0.001, 100),
        matched=st.integers(0, 50),
    ),
    min_size=1,
    max_size=6,
)


@pytest.mark.parametrize("policy", POLICIES)
@given(views=VIEWS, roll=ROLLS)
def test_a_candidate_is_chosen_whatever_they_do(policy: Balance, views: list[View], roll: float) -> None:
    assert 0 <= POLICIES[policy](views, roll) < len(views)


@given(views=VIEWS, roll=ROLLS)
def test_nobody_is_less_busy_than_the_least_busy(views: list[View], roll: float) -> None:
    assert views[least_busy(views, roll)].busy == min(view.busy for view in views)


@given(views=VIEWS, roll=ROLLS)
def test_the_longest_prefix_wins_unless_its_holder_is_overloaded(views: list[View], roll: float) -> None:
    chosen = views[prefix_affine(views, roll)]
    least = min(view.busy for view in views)
    for view in views:
        if view.matched > chosen.matched:
            assert view.busy > 1.5 * least and view.busy > least + 8
    assert chosen.busy <= max(1.5 * least, least + 8)


def test_shares_follow_the_weights() -> None:
    views = [View(weight=3), View(weight=1)]
    chosen = Counter(weighted(views, roll / 1000) for roll in range(1000))
    assert chosen == {0: 750, 1: 250}


def test_equally_busy_ones_share_by_weight() -> None:
    views = [View(weight=1), View(weight=4), View(weight=1, in_flight=1)]
    chosen = Counter(least_busy(views, roll / 1000) for roll in range(1000))
    assert chosen == {0: 200, 1: 800}


def test_a_prompt_that_nobody_knows_goes_to_the_least_busy() -> None:
    assert prefix_affine([View(in_flight=3), View(in_flight=1), View(in_flight=2)], 0.5) == 1


def test_an_idle_holder_beats_an_idle_stranger_and_loses_when_it_drowns() -> None:
    assert prefix_affine([View(matched=5, in_flight=8), View()], 0.9) == 0
    assert prefix_affine([View(matched=5, in_flight=9), View()], 0.9) == 1


def test_the_quickest_for_what_it_has_to_do_is_asked() -> None:
    slow, quick, new = View(seconds=1.0), View(seconds=0.2, in_flight=3), View()
    assert latency([slow, quick], 0.5) == 1
    assert latency([slow, View(seconds=0.2, in_flight=9)], 0.5) == 0
    assert latency([slow, quick, new], 0.5) == 2


def test_what_was_slow_once_is_measured_again() -> None:
    views = [View(seconds=60.0), View(seconds=0.1)]
    chosen = Counter(latency(views, roll / 1000) for roll in range(1000))
    assert 0 < chosen[0] <= EXPLORED * 1000
