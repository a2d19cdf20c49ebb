"""The CPU's linear layers against float64."""

import pytest
import torch

from engine.backends.linear import BFloat16Linear, Float32Linear, Int8Linear
from tests.engine.flat import relative_error


@pytest.mark.parametrize("rows", [1, 5, 64])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("kind", "bound"), [(Float32Linear, 1e-6), (BFloat16Linear, 8e-3), (Int8Linear, 2e-2)])
def test_product_and_bias(kind, bound: float, biased: bool, rows: int) -> None:
    torch.manual_seed(0)
    weight, x = torch.randn(96, 64) / 8, torch.randn(rows, 64)
    bias = torch.randn(96) if biased else None
    wanted = x.double() @ weight.double().T + (bias.double() if biased else 0)
    assert relative_error(kind(weight, bias)(x), wanted) < bound


def test_int8_is_exact_where_int8_can_be() -> None:
    weight = torch.randint(-127, 128, (32, 48)).float()
    x = torch.randint(-127, 128, (4, 48)).float()
    weight[:, 0], x[:, 1] = 127, -127  # every scale is exactly 1
    torch.testing.assert_close(Int8Linear(weight)(x), x @ weight.T, rtol=1e-6, atol=0)


def test_int8_scales_rows_and_tokens_on_their_own() -> None:
    """A huge row, a huge token, a zero row and a zero token leave the others' precision alone."""
    torch.manual_seed(0)
    weight, x = torch.randn(32, 48), torch.randn(5, 48)
    weight[0] *= 1e4
    weight[1] = 0
    x[0] *= 1e4
    x[1] = 0
    got, wanted = Int8Linear(weight)(x), x @ weight.T
    assert relative_error(got[2:, 2:], wanted[2:, 2:]) < 0.02
    assert relative_error(got[0], wanted[0]) < 0.02
    assert not got[1].any() and not got[:, 1].any()
