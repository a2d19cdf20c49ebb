"""The circuit breaker: when it opens, how it probes, how it closes."""

from hypothesis import given
from hypothesis import strategies as st

from gateway.upstreams.breaker import (
    FAILURES_IN_A_ROW,
    LONGEST_OPEN_SECONDS,
    OPEN_SECONDS,
    PERIOD_SECONDS,
    RATED_REQUESTS,
    Breaker,
)


def opened(now: float = 0.0) -> Breaker:
    breaker = Breaker()
    for _ in range(FAILURES_IN_A_ROW):
        breaker.start()
        breaker.failed(now)
    assert not breaker.closed
    return breaker


def test_it_opens_after_failures_in_a_row_and_a_success_starts_the_count_anew() -> None:
    breaker = Breaker()
    for _ in range(3):
        for _ in range(FAILURES_IN_A_ROW - 1):
            breaker.failed(0.0)
        breaker.passed(0.0)
        breaker.passed(0.0)
        breaker.passed(0.0)
        breaker.passed(0.0)
    assert breaker.closed


def test_it_opens_when_half_of_many_requests_fail() -> None:
    breaker = Breaker()
    for _ in range(RATED_REQUESTS // 2 - 1):
        breaker.passed(0.0)
        breaker.failed(0.0)
    assert breaker.closed
    breaker.passed(0.0)
    breaker.failed(0.0)
    assert not breaker.closed


def test_old_failures_are_forgotten() -> None:
    breaker = Breaker()
    for _ in range(RATED_REQUESTS // 2 - 1):
        breaker.passed(0.0)
        breaker.failed(0.0)
    later = 2 * PERIOD_SECONDS
    breaker.passed(later)
    breaker.failed(later)
    breaker.passed(later)
    breaker.failed(later)
    assert breaker.closed


def test_one_request_probes_and_its_success_closes() -> None:
    breaker = opened()
    assert not breaker.ready(OPEN_SECONDS - 0.01)
    assert breaker.ready_in(0.25) == OPEN_SECONDS - 0.25
    assert breaker.ready(OPEN_SECONDS)
    breaker.start()
    assert not breaker.ready(OPEN_SECONDS + 5)
    breaker.passed(OPEN_SECONDS + 5)
    assert breaker.closed and breaker.ready(OPEN_SECONDS + 5)


def test_each_failed_probe_doubles_the_time_up_to_a_limit() -> None:
    breaker, now = opened(), OPEN_SECONDS
    waits = []
    for _ in range(8):
        breaker.start()
        breaker.failed(now)
        waits.append(breaker.ready_in(now))
        now += waits[-1]
    assert waits[:3] == [2 * OPEN_SECONDS, 4 * OPEN_SECONDS, 8 * OPEN_SECONDS]
    assert waits[-1] == LONGEST_OPEN_SECONDS


def test_what_is_away_is_looked_for_every_second() -> None:
    breaker, now = opened(), OPEN_SECONDS
    for _ in range(4):
        breaker.start()
        breaker.failed(now, away=True)
        assert breaker.ready_in(now) == OPEN_SECONDS
        now += OPEN_SECONDS


def test_a_probe_whose_caller_left_makes_room_for_the_next() -> None:
    breaker = opened()
    breaker.start()
    breaker.abandoned()
    assert breaker.ready(OPEN_SECONDS) and not breaker.closed


def test_requests_from_before_it_opened_do_not_open_it_longer() -> None:
    breaker = opened()
    breaker.failed(0.5)
    assert breaker.ready(OPEN_SECONDS)


@given(st.lists(st.sampled_from(["passed", "failed", "away", "abandoned", "wait"]), max_size=200))
def test_it_never_shuts_for_good(steps: list[str]) -> None:
    breaker, now = Breaker(), 0.0
    for step in steps:
        if step == "wait":
            now += 3.0
        elif breaker.ready(now):
            breaker.start()
            match step:
                case "passed":
                    breaker.passed(now)
                case "failed":
                    breaker.failed(now)
                case "away":
                    breaker.failed(now, away=True)
                case _:
                    breaker.abandoned()
    assert breaker.ready(now + LONGEST_OPEN_SECONDS)
