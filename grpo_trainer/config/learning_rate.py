"""Learning rates that suit what is trained: an adapter, or all weights.

All weights: 1e-6, as in DeepSeekMath, which introduced GRPO (arXiv 2402.03300, section 4.2). An adapter: ten times as
much, by which the best learning rates of the two differ (Schulman et al., "LoRA Without Regret", 2025).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from grpo_common.errors import Problem
from grpo_trainer.config.bridge import LoraOptions

if TYPE_CHECKING:
    from grpo_trainer.config.train import TrainConfig

ALL_WEIGHTS_LR, ADAPTER_LR = 1e-6, 1e-5
ADAPTER_MODES = ("lora_only", "lora_restart")
SMALL = 50_000_000
"""Parameters."""
SMALL_LR = 1e-4
"""For all weights of a model below `SMALL`: the rate with which docs/learning.md shows one to learn."""
HIGHEST, HIGHEST_OF_SMALL = 2e-5, 2e-4
"""All weights are trained with no more than this: twenty times the default; or, of a model below `SMALL`, a little more
than what docs/learning.md shows to learn (1.5e-4), and less than what collapses there (5e-4)."""


def default_lr(mode: str) -> float:
    """Return the peak learning rate for a `--weight-bridge-mode`."""
    return ADAPTER_LR if mode in ADAPTER_MODES else ALL_WEIGHTS_LR


def too_high(config: TrainConfig, parameters: int | None) -> Problem | None:
    """Return what is wrong with an adapter's learning rate where all weights are trained; None: nothing is.

    Args:
        parameters: the model's; None: unknown, and then it counts as a large one.
    """
    is_small = parameters is not None and parameters < SMALL
    limit, better = (HIGHEST_OF_SMALL, SMALL_LR) if is_small else (HIGHEST, ALL_WEIGHTS_LR)
    if isinstance(config.bridge, LoraOptions) or config.optimizer.lr <= limit:
        return None
    mode = f"--weight-bridge-mode {config.bridge.mode}"
    return Problem(
        field="--lr",
        got=f"{config.optimizer.lr:g} with {mode}, which trains all weights",
        wanted=f"at most {limit:g}; policies collapse above it, only adapters (LoRA) bear more",
        fix=f"--lr {better:g}, or --weight-bridge-mode lora_only",
    )
