"""Are replayed experts those of these tokens? Those of another request or another layer would train silently worse."""

from __future__ import annotations

import logging
from typing import Literal

from grpo_common.errors import Problem
from grpo_trainer.engine.routing import CHANGED_MAX
from grpo_trainer.errors import DriftError
from grpo_trainer.metrics.types import Metrics
from vllm_server.protocol.routed_experts import RoutedShape

log = logging.getLogger(__name__)

SAY_EVERY = 20
"""Least number of steps between two log lines."""


def largest_share(shape: RoutedShape) -> float:
    """Return the largest share of changed experts that is no fault: half of what a choice by chance would give."""
    return 0.5 * (1.0 - shape.top_k / shape.experts)


def check_routing(metrics: Metrics, shape: RoutedShape, on_drift: Literal["warn", "stop"], step: int) -> None:
    """Check that the trainer would choose most of the replayed experts itself, in each layer and each sequence.

    Near-ties that the server breaks differently are a few of a hundred choices.

    Raises:
        DriftError: it would not, and `--on-drift` is stop.
    """
    changed = metrics[CHANGED_MAX].value() if CHANGED_MAX in metrics else 0.0
    if changed <= (limit := largest_share(shape)):
        return
    problem = Problem(
        field="routed_experts",
        got=f"a layer or a sequence in which the trainer would not choose {changed:.0%} of the experts",
        wanted=f"at most {limit:.0%}",
        fix="let the environment send each completion's experts with its tokens, and serve the trainer's model; if the "
        "policy has moved far since, lower --max-staleness",
        summary="replayed experts do not fit their tokens",
    )
    if on_drift == "stop":
        raise DriftError.of([problem])
    if step % SAY_EVERY == 0:
        log.warning("%s", problem)
