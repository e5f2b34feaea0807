"""What surrounds an optimizer's steps: the learning rate, exploding gradients, and checks of the new weights."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from statistics import median

import torch
from torch import Tensor
from torch.nn import Parameter

from grpo_trainer.config.train import OptimizerConfig
from grpo_trainer.errors import WeightsError

SAMPLED_ENTRIES = 1 << 16


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


class NormHistory:
    """The gradient norms of the last steps, including spikes, so that a lasting new level is no spike.

    A norm above `factor` times the median is a spike; 0: no norm is.
    """

    REMEMBERED = 64
    NEEDED = 8
    """Least number of norms for a median to compare with."""

    def __init__(self, factor: float) -> None:
        self._factor = factor
        self._norms: deque[float] = deque(maxlen=self.REMEMBERED)

    def is_spike(self, norm: float) -> bool:
        """Return whether a norm is a spike, and add it to the history."""
        limit = self._factor * median(self._norms) if len(self._norms) >= self.NEEDED else float("inf")
        self._norms.append(norm)
        return self._factor > 0.0 and norm > limit

    @property
    def norms(self) -> list[float]:
        """The norms, oldest first, for a checkpoint."""
        return list(self._norms)

    def restore(self, norms: Sequence[float]) -> None:
        self._norms = deque(norms, self.REMEMBERED)


def sampled(parameters: Sequence[Parameter]) -> list[Tensor]:
    """Return copies of at most `SAMPLED_ENTRIES` entries spread over each parameter, joined by dtype.

    Copies of all entries would need the memory of a whole model, and comparing each parameter a kernel each.
    """
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for parameter in parameters:
        whole = parameter.detach()
        apart = -(-whole.numel() // SAMPLED_ENTRIES)
        spread = whole.view(-1)[::apart] if whole.is_contiguous() else whole[..., ::apart].reshape(-1)
        by_dtype.setdefault(parameter.dtype, []).append(spread)
    return [torch.cat(entries) for entries in by_dtype.values()]


def changed_fraction(before: Sequence[Tensor], after: Sequence[Tensor]) -> float:
    """Return the share of entries that differ; 0 after an optimizer step means that its updates were lost."""
    changed = torch.stack([(b != a).sum() for b, a in zip(before, after, strict=True)]).sum()
    return float(changed) / sum(tensor.numel() for tensor in after)


@torch.no_grad()
def first_not_finite(values: Sequence[Tensor], targets: Sequence[Tensor]) -> int | None:
    """Return the index of the first tensor with a value that is not finite in its target's dtype, or None.

    The tensors are reduced on their device, and all results are read in one transfer.
    """
    if not values:
        return None
    norms = torch._foreach_norm([each.detach() for each in values], math.inf)  # pyright: ignore
    largest = torch.stack(list(norms)).tolist()  # NaN if the tensor has one
    fits = [size <= torch.finfo(target.dtype).max for size, target in zip(largest, targets, strict=True)]
    return None if all(fits) else fits.index(False)


def not_finite(name: str, when: str) -> WeightsError:
    """Return the error that ends a run whose weights must not be published."""
    return WeightsError(
        "trained weights are not finite: they are not published",
        field=name,
        got=f"nan or inf {when}",
        wanted="finite weights",
        fix="lower --lr, and look at train/grad_norm in metrics.jsonl",
    )
