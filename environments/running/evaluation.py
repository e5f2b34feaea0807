"""Evaluations: ask a policy the rows, a limited number at once, where a row that fails does not lose the others; and
the confidence intervals of shares and means."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any, Final, TypeVar

from environments.config import ConfigError
from environments.peers.http import PeerError
from environments.running.groups import LOSSES, EnvironmentFailed
from environments.scoring import OF_CODE, error_of_code

if TYPE_CHECKING:
    from environments.base import BaseEnv

AT_ONCE: Final = 256
"""Rows that are generated and scored at the same time."""
Z_95: Final = 1.959963984540054
"""The normal distribution's 97.5 % quantile: 95 % of values are within this many standard deviations."""

Row = TypeVar("Row")
Found = TypeVar("Found")


async def examine_each(
    env: BaseEnv[Any, Any], rows: Sequence[Row], examine: Callable[[Row], Awaitable[Found]]
) -> tuple[list[Found], dict[str, float]]:
    """Return the results of the rows that did not fail, in their order, and as metrics how many failed: `rows_failed`.

    Raise EnvironmentFailed if every row failed. A ConfigError or a PeerError cancels the other rows.
    """
    found: dict[int, Found] = {}
    waiting = iter(enumerate(rows))
    last: Exception | None = None

    async def work() -> None:
        nonlocal last
        for place, row in waiting:
            try:
                found[place] = await examine(row)
            except OF_CODE as raised:  # it loses one row
                last = error_of_code(raised)
                if isinstance(last, PeerError | ConfigError) and not isinstance(last, tuple(LOSSES)):
                    raise
                env.failures.log(env.name, row, last)

    workers = [asyncio.create_task(work()) for _ in range(min(len(rows), AT_ONCE))]
    try:
        await asyncio.gather(*workers)
    finally:
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)
    if last is not None and not found:
        summary = f"all {len(rows)} rows of the evaluation failed"
        raise EnvironmentFailed(summary, field=env.name, got=repr(last), fix="see the log") from last
    return [found[place] for place in sorted(found)], {"rows_failed": len(rows) - len(found)}


def with_interval(name: str, share: float, trials: int) -> dict[str, float]:
    """Return the metrics of a share: itself, and the ends of its confidence interval."""
    low, high = wilson(share, trials)
    return {name: share, f"{name}_low": low, f"{name}_high": high}


def mean_with_interval(name: str, values: Sequence[float]) -> dict[str, float]:
    """Return the mean of one or more values, and the ends of its 95 % confidence interval.

    Values that are all 0 or 1 are a share, with Wilson's interval. Others have that of the normal approximation.
    """
    mean, count = fmean(values), len(values)
    if set(values) <= {0.0, 1.0}:
        return with_interval(name, mean, count)
    half = Z_95 * stdev(values) / math.sqrt(count) if count > 1 else 0.0
    return {name: mean, f"{name}_low": mean - half, f"{name}_high": mean + half}


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
