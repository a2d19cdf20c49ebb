"""The CPU's three linear layers: float32 (the reference), bfloat16 and int8 (W8A8), each packed once by oneDNN."""

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

ZERO_POINT = 128
"""Activations are unsigned with this zero point: oneDNN has fast kernels for that on AVX512-VNNI and AMX alike, while
signed activations fall to its reference code where there is no AMX."""


STEPS = 127
_QLINEAR = torch.ops.onednn.qlinear_pointwise.default  # the overload itself: looking it up costs 5 us a call


class Float32Linear:
    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight, self.bias = weight, bias

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class BFloat16Linear:
    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight.bfloat16(), 1)
        self.bias = None if bias is None else bias.bfloat16()

    def __call__(self, x: Tensor) -> Tensor:
        product: Tensor = torch.ops.mkldnn._linear_pointwise(x.bfloat16(), self.packed, self.bias, "none", [], "")
        return product.float()


class Int8Linear:
    """Weights in int8 with a scale per output row, activations in uint8 with a scale per token, both symmetric.

    A scale is the row's largest magnitude, which becomes 127 steps. Both factors of 1 / 127 are in the weights' scales.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        largest = weight.abs().amax(-1, keepdim=True).clamp_min_(1e-12)
        rounded = (weight * (STEPS / largest)).round_().to(torch.int8)
        self.scales = largest[:, 0] / STEPS**2
        self.packed = torch.ops.onednn.qlinear_prepack(rounded, None)
        self.zero_points = torch.zeros(len(weight), dtype=torch.int64)
        self.bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        activations, scales = quantise(x)
        product: Tensor = _QLINEAR(
            activations,
            1.0,
            ZERO_POINT,
            self.packed,
            self.scales,
            self.zero_points,
            None,
            1.0,
            0,
            torch.float32,
            "none",
            [],
            "",
        )
        return product.mul_(scales) if self.bias is None else torch.addcmul(self.bias, product, scales)


def quantise(x: Tensor) -> tuple[Tensor, Tensor]:
    """[T, K] float32 to uint8 around ZERO_POINT, and [T, 1] float32: the magnitude that became STEPS steps."""
    largest = x.abs().amax(-1, keepdim=True)
    # A row of zeros divides 0 by 0; whatever a product makes of that is multiplied by its magnitude, 0.
    return torch.addcdiv(_ROUND_TO_ZERO_POINT, x, largest, value=STEPS).to(torch.uint8), largest


_ROUND_TO_ZERO_POINT = torch.tensor(ZERO_POINT + 0.5)
"""Conversion to uint8 cuts the fraction off; half a step more makes that rounding."""
