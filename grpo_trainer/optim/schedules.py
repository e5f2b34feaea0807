"""Learning rate schedules: pure functions of the step."""

from __future__ import annotations

import math

from grpo_trainer.config.train import OptimizerConfig


def learning_rate(config: OptimizerConfig, step: int, total_steps: int) -> float:
    """Return the learning rate of optimisation step `step` (from 0).

    Warm-up: steps 0 .. w-1 run at 1/w, 2/w, …, 1 of the peak. Then the rate is `constant`, or falls to 0 just after the
    last step: `linear`, or `cosine` (half a period).
    """
    warmup = config.warmup_steps
    if step < warmup:
        return config.lr * (step + 1) / warmup
    progress = (step - warmup) / max(1, total_steps - warmup)
    match config.lr_schedule:
        case "constant":
            return config.lr
        case "linear":
            return config.lr * max(0.0, 1.0 - progress)
        case "cosine":
            return config.lr * 0.5 * (1.0 + math.cos(math.pi * min(1.0, progress)))
