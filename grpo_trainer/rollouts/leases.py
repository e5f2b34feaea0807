"""Leases of batches that are not acknowledged yet."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class Leases:
    """The leased batches, their deadlines, and which of them are trained. Thread-safe.

    Args:
        seconds: duration of a lease, from its start and from each extension.
    """

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds = seconds
        self._clock = clock
        self._lock = threading.Lock()
        self._deadlines: dict[str, float] = {}
        self._trained: list[str] = []

    def hold(self, batch_id: str) -> None:
        """Record that a batch was leased or extended just now."""
        with self._lock:
            self._deadlines[batch_id] = self._clock() + self._seconds

    def trained(self, batch_id: str) -> None:
        """Record that a batch was trained on; it is acknowledged once a checkpoint contains it."""
        with self._lock:
            self._trained.append(batch_id)

    def end(self, batch_id: str) -> None:
        """Record that a batch was acknowledged or released."""
        with self._lock:
            self._deadlines.pop(batch_id, None)
            self._trained = [each for each in self._trained if each != batch_id]

    @property
    def unsettled(self) -> tuple[str, ...]:
        """Trained batches, in the order of training."""
        with self._lock:
            return tuple(self._trained)

    @property
    def running_out(self) -> list[str]:
        """Batches whose lease has less than half of its time left."""
        soon = self._clock() + self._seconds / 2
        with self._lock:
            return [batch_id for batch_id, deadline in self._deadlines.items() if deadline < soon]
