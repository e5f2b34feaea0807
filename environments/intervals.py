"""Confidence intervals of measured shares."""

from __future__ import annotations

import math
from dataclasses import dataclass

Z_95 = 1.959963984540054
"""The normal distribution's 97.5 % quantile: 95 % of values are within this many standard deviations."""


@dataclass(frozen=True, slots=True)
class Interval:
    """A 95 % confidence interval of a share."""

    low: float
    high: float


def wilson(share: float, trials: int) -> Interval:
    """Return Wilson's score interval of a binomial share in `trials` independent trials.

    Unlike the normal approximation, it stays within 0 and 1 and has a width if the share is 0 or 1.
    Source: E. B. Wilson, Probable inference, the law of succession, and statistical inference, JASA 22 (1927).
    """
    if trials < 1:
        return Interval(0.0, 1.0)
    shrink = 1 + Z_95**2 / trials
    centre = (share + Z_95**2 / (2 * trials)) / shrink
    half = Z_95 / shrink * math.sqrt(share * (1 - share) / trials + Z_95**2 / (4 * trials**2))
    # At a share of 0 or 1 one bound is the share itself, but for rounding.
    low = 0.0 if share <= 0.0 else max(0.0, centre - half)
    return Interval(low, 1.0 if share >= 1.0 else min(1.0, centre + half))
