"""Sums, until something goes wrong: `grpo run --env tests.integration.odd_environment --env.wrong nan`."""

from __future__ import annotations

import os
import time
from typing import Literal

import msgspec

from environments.api import wire
from environments.arithmetic import ArithmeticConfig, ArithmeticEnv, Problem
from environments.scoring import settled


class OddConfig(ArithmeticConfig):
    """What goes wrong after the first step."""

    wrong: Literal["nan", "empty", "crashes", "blocks"]


class OddEnv(ArithmeticEnv):
    """Sums, until something goes wrong."""

    name = "odd"
    env_config_cls = OddConfig
    config: OddConfig  # pyright: ignore[reportIncompatibleVariableOverride]

    async def get_next_item(self) -> Problem | None:  # pyright: ignore[reportIncompatibleMethodOverride]
        if self._is("crashes"):
            os._exit(3)
        return await settled(super().get_next_item())

    def score(self, item: Problem, answer: str) -> float:
        if self._is("blocks"):
            time.sleep(3600)
        return float("nan") if self._is("nan") else super().score(item, answer)

    async def collect_trajectories(self, item: Problem) -> wire.ScoredData | None:
        group = await super().collect_trajectories(item)
        assert group is not None
        if self._is("empty"):
            return msgspec.structs.replace(group, masks=[[wire.IGNORED] * len(row) for row in group.masks])
        return group

    def _is(self, wrong: str) -> bool:
        return self.config.wrong == wrong and self.curr_step > 0


if __name__ == "__main__":
    OddEnv.cli()
