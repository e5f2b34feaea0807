"""Confidence intervals of measured shares."""

from __future__ import annotations

import math

Z_95 = 1.959963984540054
"""The normal distribution's 97.5 % quantile: 95 % of values are within this many standard deviations."""


def with_interval(name: str, share: float, trials: int) -> dict[str, float]:
    """Return the metrics of a share: itself, and the ends of its confidence interval."""
    low, high = wilson(share, trials)
    return {name: share, f"{name}_low": low, f"{name}_high": high}


def wilson(share: float, trials: int) -> tuple[float, float]:
    """Return low and high end of Wilson's 95 % score interval of a binomial share in `trials` independent trials.

    Unlike the normal approximation, it stays within 0 and 1 and has a width if the share is 0 or 1.
    Source: E. B. Wilson, Probable inference, the law of succession, and statistical inference, JASA 22 (1927).
    """
    if trials < 1:
        return 0.0, 1.0
    shrink = 1 + Z_95**2 / trials
    centre = (share + Z_95**2 / (2 * trials)) / shrink
    half = Z_95 / shrink * math.sqrt(share * (1 - share) / trials + Z_95**2 / (4 * trials**2))
    # At a share of 0 or 1 one bound is the share itself, but for rounding.
    low = 0.0 if share <= 0.0 else max(0.0, centre - half)
    return low, 1.0 if share >= 1.0 else min(1.0, centre + half)
