"""Sums over the sequences of flat tensors: N tokens of B sequences."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Segments:
    """Which of `count` sequences each of N tokens belongs to."""

    index_N: Tensor
    count: int

    def total_B(self, values_N: Tensor) -> Tensor:
        """Return the sum of each sequence's values."""
        return torch.zeros(self.count, dtype=values_N.dtype, device=values_N.device).index_add(
            0, self.index_N, values_N
        )

    def total_N(self, values_N: Tensor) -> Tensor:
        """Return the sum of each sequence's values at each of its tokens."""
        return self.total_B(values_N)[self.index_N]
