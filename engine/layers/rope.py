"""Rotary position embedding on neighbouring pairs (Su et al., 2021, "RoFormer"), and the ways models stretch it past
the context they were first trained on. A stretched model's frequencies are fixed when it is loaded: a key that is
cached for one request must be the right one for the next.

Checkpoints rotate element i with element i + head_dim / 2. Reordering a head's rows so that the two are neighbours
gives the same attention scores (q and k are reordered alike), and turns the rotation into one complex multiplication.
"""

import math
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

    def rotations(self, positions: Tensor) -> Tensor:
        """[T, 1, head_dim / 2] complex64 factors for [T] positions, the same for every head."""
        angles = positions[:, None].float() * self.frequency
        return torch.polar(torch.full_like(angles, self.magnitude), angles)[:, None]


def plain(head_dim: int, theta: float, divisors: Tensor | None = None) -> Rope:
    """Base `theta`; `divisors` [head_dim / 2] are what a file itself says that its frequencies are divided by."""
    frequency = 1.0 / _periods(head_dim, theta)
    return Rope(frequency if divisors is None else frequency / divisors)


def linear(rope: Rope, factor: float) -> Rope:
    """Positions squeezed by `factor` (Chen et al., 2023, "Positional interpolation")."""
    return Rope(rope.frequency / factor, rope.magnitude)


def llama3(rope: Rope, factor: float, low: float, high: float, original: int) -> Rope:
    """Llama 3.1's rule (Grattafiori et al., 2024): frequencies that turn fewer than `low` times in the `original`
    context are divided by `factor`, those that turn more than `high` times kept, those between blended."""
    turns = original * rope.frequency / (2 * math.pi)
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return Rope((1 - kept) * rope.frequency / factor + kept * rope.frequency, rope.magnitude)


def yarn(
    rope: Rope,
    theta: float,
    factor: float,
    original: int,
    magnitude: float,
    *,
    beta_fast: float = 32.0,
    beta_slow: float = 1.0,
    truncate: bool = True,
) -> Rope:
    """YaRN (Peng et al., 2023): frequencies that turn more than `beta_fast` times in the `original` context are kept,
    those below `beta_slow` turns divided by `factor`, with a ramp over the pairs between; `truncate` widens the ramp to
    whole pairs. The paper's `magnitude` is `sharpening(factor)`.
    """
    pairs = len(rope.frequency)

    def pair_that_turns(times: float) -> float:
        return pairs * math.log(original / (times * 2 * math.pi)) / math.log(theta)

    first, last = pair_that_turns(beta_fast), pair_that_turns(beta_slow)
    if truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * pairs - 1)
    if first == last:
        last += 0.001
    stretched = ((torch.arange(pairs, dtype=torch.float32) - first) / (last - first)).clamp(0, 1)
    frequency = rope.frequency / factor * stretched + rope.frequency * (1 - stretched)
    return Rope(frequency, rope.magnitude * magnitude)


def sharpening(factor: float, multiplier: float = 1.0) -> float:
    """YaRN's magnitude for a context `factor` times the original: 0.1 * multiplier * ln(factor) + 1."""
    return 1.0 if factor <= 1 else 0.1 * multiplier * math.log(factor) + 1.0


def _periods(head_dim: int, theta: float) -> Tensor:
    """[head_dim / 2] positions per radian"""
    periods: Tensor = theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    return periods
