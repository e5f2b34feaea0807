"""Figures that an environment takes while it works, and their means."""

from __future__ import annotations

import threading
from collections import defaultdict
from dataclasses import dataclass, field
from statistics import fmean


@dataclass(slots=True)
class Measures:
    """Values by name, until they are taken. May be used from several threads."""

    values: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, name: str, value: float) -> None:
        """One more value; a truth counts as 1."""
        with self._lock:
            self.values[name].append(float(value))

    def take(self) -> dict[str, float]:
        """Each name's mean since the last call."""
        with self._lock:
            means = {name: fmean(values) for name, values in self.values.items()}
            self.values.clear()
        return means
