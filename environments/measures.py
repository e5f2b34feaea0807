"""Figures that an environment takes while it works, and their means."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from statistics import fmean


@dataclass(slots=True)
class Measures:
    """Values by name, until they are taken."""

    values: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    def add(self, name: str, value: float) -> None:
        """One more value; a truth counts as 1."""
        self.values[name].append(float(value))

    def take(self) -> dict[str, float]:
        """Each name's mean since the last call."""
        means = {name: fmean(values) for name, values in self.values.items()}
        self.values.clear()
        return means
