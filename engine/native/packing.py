"""Weights as the compiled decoder reads them (the layouts are in matrix.h)."""

from dataclasses import dataclass

import torch
from torch import Tensor

TILE = 32
COLUMN_MULTIPLE = 64
WEIGHT_GROUP = 32
SMALLEST = 1e-12


@dataclass(frozen=True, slots=True)
class Packed:
    """A weight [outputs, inputs] with its bias, rows padded to whole tiles and columns to COLUMN_MULTIPLE by zeros."""

    data: Tensor
    scales: Tensor
    bias: Tensor | None
    rows: int
    """Padded outputs."""
    columns: int
    """Padded inputs."""
    bits: int

    def __call__(self, x: Tensor) -> Tensor:
        raise TypeError("packed weights run inside the compiled decoder only")

    def dequantised(self) -> Tensor:
        """[rows, columns] float32."""
        if self.bits == 8:
            quads = self.data.view(-1, self.columns // 4, TILE, 4)
            values = quads.permute(0, 2, 1, 3).reshape(self.rows, self.columns).float() - 128
            return values * self.scales[:, None]
        lines = self.data.view(-1, self.columns // WEIGHT_GROUP, 4, TILE, 4)
        halves = torch.stack([lines & 15, lines >> 4], dim=2)  # [tiles, groups, 2, 4, 32, 4]
        values = halves.permute(0, 4, 1, 2, 3, 5).reshape(self.rows, -1, WEIGHT_GROUP).float()
        scales = self.scales.permute(2, 0, 3, 1).reshape(2, self.rows, -1, 1).float()
        return torch.addcmul(scales[1], values, scales[0]).reshape(self.rows, self.columns)


def pack(weight: Tensor, bias: Tensor | None, bits: int) -> Packed:
    """Quantise [outputs, inputs] float32: int8 with a scale an output, int4 from the least of each 32 inputs."""
    outputs, inputs = weight.shape
    rows, columns = -(-outputs // TILE) * TILE, -(-inputs // COLUMN_MULTIPLE) * COLUMN_MULTIPLE
    if (rows, columns) != (outputs, inputs):
        weight = torch.nn.functional.pad(weight, (0, columns - inputs, 0, rows - outputs))
    if bias is not None:
        bias = torch.nn.functional.pad(bias.float(), (0, rows - outputs))
    data, scales = _int8(weight) if bits == 8 else _int4(weight)
    return Packed(data, scales, bias, rows, columns, bits)


def _int8(weight: Tensor) -> tuple[Tensor, Tensor]:
    rows, columns = weight.shape
    scales = weight.abs().amax(-1).clamp_min_(SMALLEST).div_(127)
    values = (weight / scales[:, None]).add_(128.5).to(torch.uint8)  # the conversion cuts off: rounds half up
    return values.view(rows // TILE, TILE, columns // 4, 4).permute(0, 2, 1, 3).contiguous(), scales


def _int4(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Weights that a file has in steps of 16 or fewer (GGUF's Q4_1, Q4_K, Q4_0) come out as they are, but for float16.

    A group's range is taken as 15 steps, or as fewer where that fits its values better: exactly so where a file used
    fewer of its steps.
    """
    rows, columns = weight.shape
    groups = weight.view(rows, -1, WEIGHT_GROUP)
    least, most = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    least = least.half().float()
    best = torch.full_like(least, torch.inf)
    steps, values = torch.zeros_like(least), torch.zeros_like(groups, dtype=torch.uint8)
    for count in range(15, 6, -1):
        step = ((most - least) / count).half().float()
        tried = ((groups - least) / step.clamp_min(SMALLEST)).round_().clamp_(0, 15)
        error = (tried * step + least - groups).square_().sum(-1, keepdim=True)
        better = error < best
        best, steps = torch.where(better, error, best), torch.where(better, step, steps)
        values = torch.where(better, tried.to(torch.uint8), values)
    # [tiles, 32 outputs, groups, half, quadruple, 4] to [tiles, groups, half, quadruple, 32 outputs, 4]
    halves = values.view(-1, TILE, columns // WEIGHT_GROUP, 2, 4, 4).permute(0, 2, 3, 4, 1, 5)
    data = (halves[:, :, 0] | halves[:, :, 1] << 4).contiguous()
    scales = torch.cat([steps, least], -1).view(-1, TILE, columns // WEIGHT_GROUP, 2).half()
    return data, scales.permute(0, 2, 3, 1).contiguous()


def interleave_halves(packed: Packed) -> Packed:
    """Rows of two halves (gate, then up) regrouped in turns of 16, so that a tile has both parts of 16 outputs.

    The halves must be multiples of 16 rows.
    """
    parts = 2 * packed.rows // TILE
    # Within a tile, whatever runs over its 32 outputs: [..., 32, inner] as [..., 2, 16 * inner].
    data = _swap(packed.data.view(packed.rows // TILE, -1, 2, TILE // 2 * 4), parts).view(packed.data.shape)
    scales = _swap(packed.scales.view(packed.rows // TILE, -1, 2, TILE // 2), parts).view(packed.scales.shape)
    bias = None if packed.bias is None else _swap(packed.bias.view(-1, 1, 2, TILE // 2), parts).flatten()
    return Packed(data, scales, bias, packed.rows, packed.columns, packed.bits)


def _swap(tiles: Tensor, parts: int) -> Tensor:
    """[tiles, lines, 2, n]: all halves are one list, whose first half goes in turn with the rest."""
    halves = tiles.permute(0, 2, 1, 3).reshape(2, parts // 2, *tiles.shape[1:2], tiles.shape[3])
    return halves.permute(1, 2, 0, 3).contiguous()
