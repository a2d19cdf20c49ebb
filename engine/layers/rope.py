"""Rotary position embedding on neighbouring pairs (Su et al., 2021, "RoFormer").

Checkpoints rotate element i with element i + head_dim / 2. Reordering a head's rows so that the two are neighbours
gives the same attention scores (q and k are reordered alike), and turns the rotation into one complex multiplication.
"""

import torch
from torch import Tensor


def pair_neighbours(weight: Tensor, head_dim: int) -> Tensor:
    """[heads * head_dim, ...] rows with the halves of each head interleaved."""
    halves = weight.view(-1, 2, head_dim // 2, *weight.shape[1:])
    return halves.transpose(1, 2).reshape(weight.shape)


def frequencies(head_dim: int, theta: float, divisors: Tensor | None) -> Tensor:
    """[head_dim / 2] float32 radians per position."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    inverse = 1.0 / theta**exponents
    return inverse if divisors is None else inverse / divisors


def rotations(positions: Tensor, frequency: Tensor) -> Tensor:
    """[T, 1, head_dim / 2] complex64 unit factors for [T] positions, the same for every head."""
    angles = positions[:, None].float() * frequency
    return torch.polar(torch.ones_like(angles), angles)[:, None]
