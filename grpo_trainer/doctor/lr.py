"""Does the learning rate suit what is trained?"""

from __future__ import annotations

import logging

from grpo_trainer.config.learning_rate import too_high
from grpo_trainer.config.train import TrainConfig
from grpo_trainer.doctor.findings import Finding, ok, warn
from grpo_trainer.doctor.model import ModelShape, shape_of

log = logging.getLogger(__name__)


def warn_of_lr(config: TrainConfig) -> None:
    """Warn before the start of a learning rate at which policies collapse."""
    found = check_lr(config, shape_of(config.model.name))
    if found.status == "warn":
        log.warning("--lr: got %s, wanted %s; %s", found.got, found.wanted, found.fix)


def check_lr(config: TrainConfig, shape: ModelShape | None) -> Finding:
    """Is it one that only an adapter bears, though all weights are trained?"""
    problem = too_high(config, shape.parameters if shape else None)
    if problem is None:
        return ok("learning rate", f"{config.optimizer.lr:g}")
    return warn("learning rate", problem.got, problem.wanted, problem.fix)
