"""Learning rates by hand."""

from __future__ import annotations

import pytest

from grpo_trainer.config.train import OptimizerConfig
from grpo_trainer.optim.schedules import learning_rate


def rates(schedule: str, warmup: int, total: int) -> list[float]:
    config = OptimizerConfig.model_validate({"lr": 1.0, "warmup_steps": warmup, "lr_schedule": schedule})
    return [learning_rate(config, step, total) for step in range(total)]


def test_constant() -> None:
    assert rates("constant", 0, 3) == [1, 1, 1]


def test_warm_up_reaches_the_peak_and_never_starts_at_zero() -> None:
    assert rates("constant", 4, 6) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_linear_falls_to_zero_just_after_the_last_step() -> None:
    assert rates("linear", 2, 6) == [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]


def test_cosine_halves_in_the_middle() -> None:
    # 0.5 (1 + cos(0)) = 1, cos(pi/4), cos(pi/2), cos(3pi/4)
    assert rates("cosine", 0, 4) == pytest.approx([1.0, 0.853553, 0.5, 0.146447], abs=1e-6)
