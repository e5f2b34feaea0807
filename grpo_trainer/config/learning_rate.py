"""Learning rates: the default and the usual range for what is trained, an adapter or all weights, by the model's size.

Large models: 1e-6 for all weights, as in DeepSeekMath, which introduced GRPO (arXiv 2402.03300, section 4.2), and ten
times as much for an adapter, by which the best learning rates of the two differ (Schulman et al., "LoRA Without
Regret", 2025). Smaller models: the runs of docs/learning.md. Above the highest rate of a range policies collapse there,
or come close to it; below the lowest one nothing changes within hundreds of steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from grpo_common.errors import Problem
from grpo_trainer.config.bridge import LoraOptions

if TYPE_CHECKING:
    from grpo_trainer.config.train import TrainConfig

ADAPTER_MODES = ("lora_only", "lora_restart")
SIZES = (50_000_000, 300_000_000)
"""Parameters below which a model counts as small, and as medium."""


@dataclass(frozen=True)
class Rates:
    """The default and the usual range of `--lr`."""

    default: float
    lowest: float
    highest: float


ADAPTER = (Rates(5e-4, 1e-5, 2e-3), Rates(3e-4, 1e-5, 5e-4), Rates(1e-5, 1e-7, 5e-4))
ALL_WEIGHTS = (Rates(1e-4, 1e-6, 2e-4), Rates(3e-5, 1e-6, 5e-5), Rates(1e-6, 1e-8, 2e-5))
"""Of a small, a medium and a large model."""
ADAPTER_LR, ALL_WEIGHTS_LR = ADAPTER[-1].default, ALL_WEIGHTS[-1].default


def usual_rates(mode: str, parameters: int | None = None) -> Rates:
    """Return the learning rates for a `--weight-bridge-mode`.

    Args:
        parameters: the model's; None: unknown, and then it counts as a large one.
    """
    size = len(SIZES) if parameters is None else sum(parameters >= limit for limit in SIZES)
    return (ADAPTER if mode in ADAPTER_MODES else ALL_WEIGHTS)[size]


def unusual(config: TrainConfig, parameters: int | None) -> Problem | None:
    """Return what is wrong with a learning rate out of the usual range; None: it is within.

    Args:
        parameters: as for `usual_rates`.
    """
    rate, mode = config.optimizer.lr, config.bridge.mode
    usual, is_adapter = usual_rates(mode, parameters), isinstance(config.bridge, LoraOptions)
    if usual.lowest <= rate <= usual.highest:
        return None
    suits_adapter = not is_adapter and usual.highest < rate <= usual_rates("lora_only", parameters).highest
    why = "above it policies collapse" if rate > usual.highest else "below it hardly anything is learnt"
    return Problem(
        field="--lr",
        got=f"{rate:g} with --weight-bridge-mode {mode}, which trains {'an adapter' if is_adapter else 'all weights'}",
        wanted=f"{usual.lowest:g} to {usual.highest:g}; {why}",
        fix=f"--lr {usual.default:g}" + (", or --weight-bridge-mode lora_only" if suits_adapter else ""),
    )
