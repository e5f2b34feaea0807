"""Figures that an environment measures while it works, and their means."""

from __future__ import annotations

import threading
from collections import defaultdict
from dataclasses import dataclass, field
from statistics import fmean


@dataclass(slots=True)
class Measures:
    """Collects values by name until `take`. Several threads may use it."""

    values: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, name: str, value: float) -> None:
        """Add a value; True counts as 1."""
        with self._lock:
            self.values[name].append(float(value))

    def take(self) -> dict[str, float]:
        """Return each name's mean since the last call."""
        with self._lock:
            means = {name: fmean(values) for name, values in self.values.items()}
            self.values.clear()
        return means
