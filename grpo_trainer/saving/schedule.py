"""Decides when checkpoints are due: every N steps, every N seconds, or never."""

from __future__ import annotations

import time
from collections.abc import Callable

SHARE = 0.02
"""Largest share of a run's time that training may wait for checkpoints by time."""


class Schedule:
    """Decides when the next checkpoint is due. A postponed checkpoint stays due until it begins.

    Args:
        steps: checkpoints are due at multiples of this step; 0: `seconds` decides.
        seconds: time between checkpoints, which grows if training waits for the disk; 0 as well: none is due.
        clock: a monotonic clock in seconds.
    """

    def __init__(self, steps: int, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._steps = steps
        self._seconds = seconds
        self._clock = clock
        self._last_step = 0
        self._due_at = clock() + seconds
        self._is_demanded = False

    def is_due(self, step: int) -> bool:
        """Return whether a checkpoint is due when `step` steps are done."""
        if self._is_demanded:
            return True
        if self._steps:
            return step // self._steps > self._last_step // self._steps
        return self._seconds > 0 and self._clock() >= self._due_at

    def demand(self) -> None:
        """Make a checkpoint due now, whatever the interval."""
        self._is_demanded = True

    def begun(self, step: int, waited: float = 0.0) -> None:
        """Record that a checkpoint of this step exists or has begun, for which training waited `waited` seconds."""
        self._is_demanded = False
        self._last_step = step
        self._due_at = self._clock() + max(self._seconds, waited / SHARE)
