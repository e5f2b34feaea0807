"""Estimates a run's remaining time from its last steps, and formats durations."""

from __future__ import annotations

from collections.abc import Sequence

RECENT = 50
"""Number of last steps for the estimate."""


def seconds_left(steps: int, recent: Sequence[float]) -> float | None:
    """Return the seconds that `steps` more steps take, each the mean of `recent`.

    The longest of `recent` counts as the second longest. So a single outlier (the first step, which waits for
    the first rollouts and compiles) does not matter, but repeated ones (saves, restarts) do.

    Args:
        recent: seconds of the last steps, from the end of one to the end of the next.

    Returns:
        The seconds; None: `recent` has fewer than two steps.
    """
    if len(recent) < 2:
        return None
    *others, second, _ = sorted(recent)
    return steps * (sum(others) + 2 * second) / len(recent)


def duration(seconds: float) -> str:
    """Return `119 s`, `12 min`, `3.4 h`."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    minutes = seconds / 60
    return f"{minutes:.0f} min" if minutes < 120 else f"{minutes / 60:.1f} h"
