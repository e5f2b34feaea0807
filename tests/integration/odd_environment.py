"""Sums that take their time, or go wrong: `grpo run --env tests.integration.odd_environment --env.how nan`."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from environments.arithmetic import ArithmeticConfig, ArithmeticEnv, Problem
from environments.peers.inference import Completion
from environments.scoring import settled

NAME = "tests.integration.odd_environment"
PACE_SECONDS = 3.0
FAST = "fast"
"""File in the run's folder: scores take no time any more."""
TITLE = "\x1b]0;the title of a window\x07"


class OddConfig(ArithmeticConfig):
    """What is odd about it after the first step.

    `paced` scores take a while, so that a run of small steps lasts long enough for its processes to be ended.
    `hostile` scores write 3 MB and raise interrupts; the first evaluation never returns, which `blocked_once` notes.
    """

    how: Literal["paced", "nan", "crashes", "hostile"] = "paced"
    blocked_once: Path | None = None


class OddEnv(ArithmeticEnv):
    """Sums with an oddity."""

    name = "odd"
    env_config_cls = OddConfig
    config: OddConfig  # pyright: ignore[reportIncompatibleVariableOverride]

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.score_in_thread = self.config.how == "hostile"  # pyright: ignore[reportAttributeAccessIssue]

    async def get_next_item(self) -> Problem | None:  # pyright: ignore[reportIncompatibleMethodOverride]
        if self._is("crashes"):
            os._exit(3)
        return await settled(super().get_next_item())

    def score(self, item: Problem, answer: str) -> float:
        if self._is("hostile"):
            if item.right % 4 == 0:  # not for each: that takes a core alone
                print(f"WARNING {TITLE}\x1b[2J\rStep 9/9:" + "x" * 3_000_000, file=sys.stderr, flush=True)
            if item.left % 4 == 0:
                raise KeyboardInterrupt
        return float("nan") if self._is("nan") else super().score(item, answer)

    async def score_group(self, item: Problem, completions: Sequence[Completion]) -> Sequence[float | None]:
        if self.config.how == "paced":
            assert self.config.metrics_path is not None
            if not (self.config.metrics_path.parents[1] / FAST).exists():
                await asyncio.sleep(PACE_SECONDS)  # which takes no CPU time from the other processes
        return await super().score_group(item, completions)

    async def evaluate(self) -> dict[str, float]:
        blocked_once = self.config.blocked_once
        if self._is("hostile") and blocked_once is not None and not blocked_once.exists():
            blocked_once.touch()
            time.sleep(3600)
        return await super().evaluate()

    def _is(self, how: str) -> bool:
        return self.config.how == how and self.curr_step > 0  # not in the trial before the run


if __name__ == "__main__":
    OddEnv.cli()
