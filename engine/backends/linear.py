"""The CPU's three linear layers: float32 (the reference), bfloat16 and int8 (W8A8), each packed once by oneDNN."""

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

ZERO_POINT = 128
"""Activations are unsigned with this zero point: oneDNN has fast kernels for that on AVX512-VNNI and AMX alike, while
signed activations fall to its reference code where there is no AMX."""


class Float32Linear:
    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight, self.bias = weight, bias

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)

    def add_to(self, residual: Tensor, x: Tensor) -> None:
        residual += self(x)


class BFloat16Linear:
    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight.bfloat16(), 1)
        self.bias = None if bias is None else bias.bfloat16()

    def __call__(self, x: Tensor) -> Tensor:
        return self._product(x).float()

    def add_to(self, residual: Tensor, x: Tensor) -> None:
        residual += self._product(x)

    def _product(self, x: Tensor) -> Tensor:
        product: Tensor = torch.ops.mkldnn._linear_pointwise(x.bfloat16(), self.packed, self.bias, "none", [], "")
        return product


class Int8Linear:
    """Weights in int8 with a scale per output row, activations in uint8 with a scale per token, both symmetric."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.scales = _row_scales(weight)[:, 0]
        rounded = (weight / self.scales[:, None]).round_().to(torch.int8)
        self.packed = torch.ops.onednn.qlinear_prepack(rounded, None)
        self.zero_points = torch.zeros(len(weight), dtype=torch.int64)
        self.bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        product, scales = self._product(x)
        return product.mul_(scales) if self.bias is None else torch.addcmul(self.bias, product, scales)

    def add_to(self, residual: Tensor, x: Tensor) -> None:
        product, scales = self._product(x)
        residual.addcmul_(product, scales)
        if self.bias is not None:
            residual += self.bias

    def _product(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """[T, N] still to be multiplied by the second, [T, 1]."""
        scales = _row_scales(x)
        quantised = torch.addcdiv(_ROUND_TO_ZERO_POINT, x, scales).to(torch.uint8)
        product: Tensor = torch.ops.onednn.qlinear_pointwise(
            quantised,
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
        return product, scales


_ROUND_TO_ZERO_POINT = torch.tensor(ZERO_POINT + 0.5)
"""Conversion to uint8 cuts the fraction off; half a step more makes that rounding."""


def _row_scales(x: Tensor) -> Tensor:
    """[rows, 1] such that a row divided by its scale lies in -127..127."""
    return x.abs().amax(-1, keepdim=True).mul_(1 / 127).clamp_min_(1e-12)
