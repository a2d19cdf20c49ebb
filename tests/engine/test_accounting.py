"""Weights of tokens, shares of steps, and the two halves of the wall clock."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.accounting import Clock, DeviceTime, Intervals
from engine.batch import FlatBatch
from engine.cost import CostModel, measure
from engine.layout import Chunk
from engine.sequence import Sequence
from tests.engine.fake_runner import FakeRunner

COST = CostModel(step=0.0, prefill_row=1.0, prefill_context=0.5, decode_row=2.0, decode_context=0.25)


def test_a_token_weighs_its_row_and_its_context() -> None:
    assert COST.prefill(0, 1) == 1.5 and COST.decode(3, 4) == 3.0
    assert COST.prefill(0, 4) == sum(COST.prefill(p, p + 1) for p in range(4))
    assert COST.decode(7, 9) == COST.decode(7, 8) + COST.decode(8, 9)
    assert COST.prefill(5, 5) == 0


class Timed(FakeRunner):
    """Its clock goes on by what a step of a known machine would take."""

    def __init__(self, truth: CostModel) -> None:
        super().__init__(max_context=2048)
        self.truth, self.now = truth, 0.0

    def forward(self, batch: FlatBatch) -> torch.Tensor:
        self.now += self.truth.step
        for (first, end), context in zip(itertools.pairwise(batch.query_starts), batch.context_lens, strict=True):
            weigh = self.truth.decode if end - first == 1 else self.truth.prefill
            self.now += weigh(context - (end - first), context)
        return super().forward(batch)


@pytest.mark.parametrize("blocks,budget", [(128, 512), (128, 8), (4, 512)])
def test_measuring_finds_what_a_machine_costs(monkeypatch, blocks: int, budget: int) -> None:
    truth = CostModel(step=0.02, prefill_row=0.0005, prefill_context=2e-7, decode_row=0.001, decode_context=1e-6)
    runner = Timed(truth)
    runner.allocate(blocks)
    monkeypatch.setattr("engine.cost.time.perf_counter", lambda: runner.now)
    found = measure(runner, blocks, budget)
    # One row alone is a decode to that machine, and its context is one token, not none.
    for name in ("step", "prefill_row", "prefill_context", "decode_row", "decode_context"):
        assert getattr(found, name) == pytest.approx(getattr(truth, name), rel=0.02, abs=2e-6), name
    assert found.decode_weight == pytest.approx(truth.decode(512, 513) / truth.prefill(512, 513), rel=0.05)


@pytest.mark.parametrize("held_up", range(5))
def test_a_step_that_was_held_up_makes_no_token_free(monkeypatch, held_up: int) -> None:
    truth = CostModel(step=0.02, prefill_row=0.0005, prefill_context=2e-7, decode_row=0.001, decode_context=1e-6)
    runner = Timed(truth)
    runner.allocate(128)
    monkeypatch.setattr("engine.cost.time.perf_counter", lambda: runner.now)
    monkeypatch.setattr("engine.cost.PATIENCE", 0.0)
    forward, calls = runner.forward, itertools.count()

    def late(batch: FlatBatch) -> torch.Tensor:
        runner.now += 5.0 if next(calls) == held_up else 0.0
        return forward(batch)

    monkeypatch.setattr(runner, "forward", late)
    found = measure(runner, 128, 512)
    assert min(found.prefill(0, 1), found.decode(1, 2)) > truth.prefill_row / 10
    assert 1 <= found.decode_weight <= 8


def test_a_real_measurement_is_usable_on_the_smallest_pool() -> None:
    runner = FakeRunner(max_context=16)
    runner.allocate(1)
    cost = measure(runner, 1, 1)
    assert cost.prefill(0, 1) > 0 and cost.decode(1, 2) >= 0 and 1 <= cost.decode_weight <= 8


chunks = st.lists(st.tuples(st.integers(1, 50), st.integers(0, 60), st.integers(1, 40)), min_size=1, max_size=20)


@given(chunks, st.floats(0.001, 10))
def test_a_steps_seconds_are_shared_out_whole(parts, seconds: float) -> None:
    """Prompt and answer, and chunks across their border."""
    device = DeviceTime()
    made = [
        Chunk(Sequence("", b"", [0] * (start + count), prompt, 1000, 0.0), start, start + count)
        for prompt, start, count in parts
    ]
    device.share(seconds, made, COST)
    prefill, decode = (sum(getattr(c.sequence, f"{kind}_seconds") for c in made) for kind in ("prefill", "decode"))
    assert prefill + decode == pytest.approx(seconds)
    assert (device.prefill_seconds, device.decode_seconds) == pytest.approx((prefill, decode))
    assert device.prefill_tokens + device.decode_tokens == sum(count for _, _, count in parts)
    assert device.decode_tokens == sum(max(0, start + count - max(start, prompt)) for prompt, start, count in parts)


def test_steps_and_idle_time_are_the_wall_clock() -> None:
    clock = Clock(10.0)
    clock.idle_until(12.5)
    assert clock.busy_until(13.0) == 0.5
    assert clock.busy_until(14.0) == 1.0
    assert (clock.busy_seconds, clock.idle_seconds, clock.mark - clock.start) == (1.5, 2.5, 4.0)


def test_the_times_between_tokens() -> None:
    sequence = Sequence("", b"", [1, 2], 2, 10, arrived=1.0)
    assert sequence.account(1.5).mean_inter_token_seconds is None
    gaps = []
    for now in (2.0, 2.5, 4.5):
        gaps.append(sequence.sampled(now))
        sequence.tokens.append(3)
        if len(gaps) == 1:
            assert sequence.account(now).max_inter_token_seconds is None
    assert gaps == [None, 0.5, 2.0]
    account = sequence.account(5.0)
    assert (account.ttft_seconds, account.mean_inter_token_seconds, account.max_inter_token_seconds) == (1.0, 1.25, 2.0)


def test_a_histogram_puts_a_bound_below_itself() -> None:
    intervals = Intervals()
    for seconds in (0.001, 0.005, 0.006, 100.0):
        intervals.add(seconds)
    assert intervals.counts[:2] == [2, 1] and intervals.counts[-1] == 1
    assert sum(intervals.counts) == 4 and intervals.total == pytest.approx(100.012)
