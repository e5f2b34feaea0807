"""How long a run still takes, by its last steps; seconds in words."""

from __future__ import annotations

from collections.abc import Sequence

RECENT = 50
"""Steps by which the rest is judged."""


def seconds_left(steps: int, recent: Sequence[float]) -> float | None:
    """Return what so many more steps take, in seconds: each the mean of `recent`.

    The longest of `recent` counts as the second longest. So one step that is like no other (the first, with the start
    of the server and the compiling in it) does not matter, and what comes again and again does: saves, restarts.

    Args:
        recent: seconds of the last steps, from the end of one to the end of the next.

    Returns:
        None: there are fewer than two to judge by.
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
