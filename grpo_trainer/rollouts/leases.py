"""The batches that a trainer has leased and not acknowledged yet."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class Leases:
    """Which they are, when they run out, and which of them are trained. May be used from several threads.

    Args:
        seconds: that a lease lasts, from its beginning and from each extension.
    """

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds = seconds
        self._clock = clock
        self._lock = threading.Lock()
        self._deadlines: dict[str, float] = {}
        self._trained: list[str] = []

    def hold(self, batch_id: str) -> None:
        """It was leased, or extended, just now."""
        with self._lock:
            self._deadlines[batch_id] = self._clock() + self._seconds

    def trained(self, batch_id: str) -> None:
        """It is trained on, and is to be acknowledged once a checkpoint holds that."""
        with self._lock:
            self._trained.append(batch_id)

    def end(self, batch_id: str) -> None:
        """It was acknowledged or given back."""
        with self._lock:
            self._deadlines.pop(batch_id, None)
            self._trained = [each for each in self._trained if each != batch_id]

    @property
    def unsettled(self) -> tuple[str, ...]:
        """Those that are trained, in the order of training."""
        with self._lock:
            return tuple(self._trained)

    @property
    def running_out(self) -> list[str]:
        """Those that have less than half of their time left."""
        soon = self._clock() + self._seconds / 2
        with self._lock:
            return [batch_id for batch_id, deadline in self._deadlines.items() if deadline < soon]
