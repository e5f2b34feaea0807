"""Detects exploding gradients: norms far above those of earlier steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from statistics import median

REMEMBERED = 64
NEEDED = 8
"""Least number of norms for a median to compare with."""


class NormHistory:
    """The gradient norms of the last steps, including spikes, so that a lasting new level is no spike.

    Args:
        factor: a norm above this many times the median is a spike; 0: no norm is.
    """

    def __init__(self, factor: float) -> None:
        self._factor = factor
        self._norms: deque[float] = deque(maxlen=REMEMBERED)

    def is_spike(self, norm: float) -> bool:
        """Return whether a norm is a spike, and add it to the history."""
        limit = self._factor * median(self._norms) if len(self._norms) >= NEEDED else float("inf")
        self._norms.append(norm)
        return self._factor > 0.0 and norm > limit

    @property
    def norms(self) -> list[float]:
        """The norms, oldest first, for a checkpoint."""
        return list(self._norms)

    def restore(self, norms: Sequence[float]) -> None:
        """Restore the norms of a checkpoint."""
        self._norms = deque(norms, REMEMBERED)
