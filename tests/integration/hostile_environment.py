"""Sums with all that an environment can do wrong to its run: `grpo run --env tests.integration.hostile_environment`."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from environments.arithmetic import ArithmeticConfig, ArithmeticEnv, Problem

TITLE = "\x1b]0;the title of a window\x07"


class HostileConfig(ArithmeticConfig):
    """Where it notes that an evaluation blocked."""

    blocked_once: Path


class HostileEnv(ArithmeticEnv):
    """Sums whose scores write 3 MB and raise interrupts, and whose first evaluation never returns."""

    name = "hostile"
    env_config_cls = HostileConfig
    config: HostileConfig  # pyright: ignore[reportIncompatibleVariableOverride]
    score_in_thread = True

    def score(self, item: Problem, answer: str) -> float:
        if self.curr_step > 0:  # and not in the trial before the run
            if item.right % 4 == 0:  # not for each: that takes a core alone
                print(f"WARNING {TITLE}\x1b[2J\rStep 9/9:" + "x" * 3_000_000, file=sys.stderr, flush=True)
            if item.left % 4 == 0:
                raise KeyboardInterrupt
        return super().score(item, answer)

    async def evaluate(self) -> dict[str, float]:
        if not self.config.blocked_once.exists():
            self.config.blocked_once.touch()
            time.sleep(3600)
        return await super().evaluate()


if __name__ == "__main__":
    HostileEnv.cli()
