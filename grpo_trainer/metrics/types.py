"""Metrics that merge correctly: a mean keeps its weight, and a maximum stays a maximum.

Totals may be tensors on a device. `reduce` reads them, only once a step, so that microbatches do not wait for the
device. `numbers` reads them for other processes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Self, SupportsFloat, TypeAlias


class _Totals:
    """A metric that consists of sums: those of two parts are added up."""

    def merge(self, other: Self) -> Self:
        return type(self)(*(mine + its for mine, its in zip(vars(self).values(), vars(other).values(), strict=True)))

    def numbers(self) -> Self:
        return type(self)(*map(float, vars(self).values()))


@dataclass(frozen=True)
class Mean(_Totals):
    """A weighted mean: `total / count`."""

    total: SupportsFloat
    count: SupportsFloat = 1.0

    def value(self) -> float:
        count = float(self.count)
        return float(self.total) / count if count else 0.0


@dataclass(frozen=True)
class Sum(_Totals):
    """A total over all that is merged."""

    total: SupportsFloat

    def value(self) -> float:
        return float(self.total)


@dataclass(frozen=True)
class Max:
    """The largest of all that is merged."""

    largest: SupportsFloat

    def merge(self, other: Max) -> Max:
        mine, its = float(self.largest), float(other.largest)
        return self if mine >= its or mine != mine else other

    def numbers(self) -> Max:
        return Max(float(self.largest))

    def value(self) -> float:
        return float(self.largest)


@dataclass(frozen=True)
class EffectiveShare(_Totals):
    """The effective sample size of importance weights, as a share of the samples: `total² / (count · squares)`.

    It is 1 if all weights are equal, and 1 / count if one outweighs all others (Kong 1992; Owen, Monte Carlo theory,
    methods and examples, section 9.3).
    """

    total: SupportsFloat
    squares: SupportsFloat
    """Sum of the weights' squares."""
    count: SupportsFloat

    def value(self) -> float:
        spread = float(self.count) * float(self.squares)
        return float(self.total) ** 2 / spread if spread else 0.0


Metric: TypeAlias = Mean | Sum | Max | EffectiveShare
Metrics: TypeAlias = Mapping[str, Metric]


def merge(parts: Iterable[Metrics]) -> dict[str, Metric]:
    """Combine the metrics of several parts (microbatches, ranks) by key."""
    merged: dict[str, Any] = {}
    for part in parts:
        for key, metric in part.items():
            merged[key] = merged[key].merge(metric) if key in merged else metric
    return merged


def reduce(metrics: Metrics) -> dict[str, float]:
    """Return the numbers to log."""
    return {key: metric.value() for key, metric in metrics.items()}
