"""Weights of tokens and the two halves of the wall clock."""

import pytest

from engine.accounting import Clock, CostModel
from tests.engine.fake_runner import FakeRunner


def test_a_token_weighs_its_matrix_products_and_its_context() -> None:
    cost = CostModel(slope=0.5)
    assert cost.weight(0, 1) == 1.5
    assert cost.weight(0, 4) == sum(cost.weight(p, p + 1) for p in range(4))
    assert cost.weight(7, 9) == cost.weight(7, 8) + cost.weight(8, 9)
    assert cost.weight(5, 5) == cost.weight(6, 5) == 0
    assert 0 < CostModel.of(FakeRunner().config).slope < 1


def test_the_weight_of_attention_is_its_share_of_the_arithmetic() -> None:
    config = FakeRunner().config
    width = config.num_heads * config.head_dim
    keys = config.num_kv_heads * config.head_dim
    products = 2 * config.hidden_size * width + 2 * config.hidden_size * keys
    products += 3 * config.hidden_size * config.intermediate_size
    attention = 2 * width * 100  # scores and values over 100 keys
    assert CostModel.of(config).weight(99, 100) == pytest.approx(1 + attention / products)


def test_steps_and_idle_time_are_the_wall_clock() -> None:
    clock = Clock(10.0)
    clock.idle_until(12.5)
    assert clock.busy_until(13.0) == 0.5
    assert clock.busy_until(14.0) == 1.0
    assert (clock.busy_seconds, clock.idle_seconds, clock.mark - clock.start) == (1.5, 2.5, 4.0)
