"""Rotary position embedding on neighbouring pairs (Su et al., 2021, "RoFormer").

Checkpoints rotate element i with element i + head_dim / 2. Reordering a head's rows so that the two are neighbours
gives the same attention scores (q and k are reordered alike), and turns the rotation into one complex multiplication.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


def pair_neighbours(weight: Tensor, head_dim: int) -> Tensor:
    """[heads * head_dim, ...] rows with the halves of each head interleaved."""
    halves = weight.view(-1, 2, head_dim // 2, *weight.shape[1:])
    return halves.transpose(1, 2).reshape(weight.shape)


@dataclass(frozen=True, slots=True)
class Rope:
    frequency: Tensor
    """[head_dim / 2] float32 radians per position"""
    magnitude: float = 1.0
    """Length of the factors; above 1 where a model stretched past its first context sharpens its attention."""

    @classmethod
    def of(cls, head_dim: int, theta: float, divisors: Tensor | None = None) -> "Rope":
        """Base `theta`; `divisors` [head_dim / 2] are what a stretched model divides its frequencies by."""
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
        inverse = 1.0 / theta**exponents
        return cls(inverse if divisors is None else inverse / divisors)

    def rotations(self, positions: Tensor) -> Tensor:
        """[T, 1, head_dim / 2] complex64 factors for [T] positions, the same for every head."""
        angles = positions[:, None].float() * self.frequency
        return torch.polar(torch.full_like(angles, self.magnitude), angles)[:, None]
