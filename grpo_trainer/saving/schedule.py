"""When checkpoints are due: every N steps, every so many seconds, or never."""

from __future__ import annotations

import time
from collections.abc import Callable

SHARE = 0.02
"""Largest share of a run's time for which checkpoints by time keep training from going on."""


class Schedule:
    """Say when the next checkpoint is due. One that is put off stays due until it is begun.

    Args:
        steps: from one checkpoint to the next, which are due at its multiples; 0: by `seconds`.
        seconds: from one checkpoint to the next, more where training waits for the disk; 0 as well: none is due.
        clock: in seconds, on a clock that nobody sets.
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
        """Note that there is a checkpoint of this step, or will be, for which training waited so many seconds."""
        self._is_demanded = False
        self._last_step = step
        self._due_at = self._clock() + max(self._seconds, waited / SHARE)
