"""Gradients that explode: norms far above those of the steps before."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from statistics import median

REMEMBERED = 64
NEEDED = 8
"""So many norms make a median that something can be far above."""


class NormHistory:
    """The gradient norms of the last steps. Spikes are remembered, too: a level that lasts is none.

    Args:
        factor: a norm above this many times their median is a spike; 0: none is.
    """

    def __init__(self, factor: float) -> None:
        self._factor = factor
        self._norms: deque[float] = deque(maxlen=REMEMBERED)

    def is_spike(self, norm: float) -> bool:
        """Whether it is one; it is remembered."""
        limit = self._factor * median(self._norms) if len(self._norms) >= NEEDED else float("inf")
        self._norms.append(norm)
        return self._factor > 0.0 and norm > limit

    @property
    def norms(self) -> list[float]:
        """Oldest first, for a checkpoint."""
        return list(self._norms)

    def restore(self, norms: Sequence[float]) -> None:
        """Go on from those of a checkpoint."""
        self._norms = deque(norms, REMEMBERED)
