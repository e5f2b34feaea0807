"""Sums whose scores take a while, so that a run of small steps lasts long enough for its processes to be ended."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from environments.arithmetic import Problem
from environments.arithmetic_server import ArithmeticEnv
from environments.peers.inference import Completion

SECONDS = 2.0


class PacedEnv(ArithmeticEnv):
    """Sums; waiting takes no CPU time from the other processes."""

    name = "paced"

    async def score_group(self, item: Problem, completions: Sequence[Completion]) -> list[float]:
        await asyncio.sleep(SECONDS)
        return [self.score(item, self.decode(completion)) for completion in completions]


if __name__ == "__main__":
    PacedEnv.cli()
