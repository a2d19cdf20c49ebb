"""A text's hidden states as one vector, gathered chunk by chunk."""

from typing import Literal

import torch
from torch import Tensor

PoolingKind = Literal["mean", "last"]


class Pooling:
    """`mean` averages all tokens' states, `last` takes the last one's."""

    def __init__(self, kind: PoolingKind) -> None:
        self.kind = kind
        self._sum: Tensor | None = None
        self._count = 0

    def add(self, hidden: Tensor, start: int) -> None:
        """Take in the states [T, hidden] of the tokens from `start` on; 0 begins anew, as after a preemption."""
        if start == 0:
            self._sum, self._count = None, 0
        if self.kind == "last":
            self._sum, self._count = hidden[-1].clone(), 1
            return
        part = hidden.sum(dim=0)
        self._sum = part if self._sum is None else self._sum + part
        self._count += len(hidden)

    @property
    def vector(self) -> Tensor:
        """[hidden] float32, of length 1."""
        assert self._sum is not None
        return torch.nn.functional.normalize(self._sum / self._count, dim=0)
