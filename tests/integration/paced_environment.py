"""Sums whose scores take a while, so that a run of small steps lasts long enough for its processes to be ended."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from environments.arithmetic import ArithmeticEnv, Problem
from environments.peers.inference import Completion

SECONDS = 2.0
FAST = "fast"
"""File in the run's folder: scores take no time any more."""


class PacedEnv(ArithmeticEnv):
    """Sums; waiting takes no CPU time from the other processes."""

    name = "paced"

    async def score_group(self, item: Problem, completions: Sequence[Completion]) -> list[float]:
        assert self.config.metrics_path is not None
        if not (self.config.metrics_path.parents[1] / FAST).exists():
            await asyncio.sleep(SECONDS)
        return [self.score(item, self.decode(completion)) for completion in completions]


if __name__ == "__main__":
    PacedEnv.cli()
