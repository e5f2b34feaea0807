"""Whether a step has landed: how much of the weights it has changed, and whether they are numbers still."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

from grpo_trainer.distributed import CommonWeightsError

SAMPLED_ENTRIES = 1 << 16


def sampled(parameters: Sequence[Parameter]) -> list[Tensor]:
    """Copies of entries spread over each parameter, at most `SAMPLED_ENTRIES`; those of one dtype end to end.

    A copy of all would cost a whole model, and one for each parameter a kernel each.
    """
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for parameter in parameters:
        by_dtype.setdefault(parameter.dtype, []).append(_spread(parameter.detach()))
    return [torch.cat(entries) for entries in by_dtype.values()]


def _spread(whole: Tensor) -> Tensor:
    apart = -(-whole.numel() // SAMPLED_ENTRIES)
    if whole.is_contiguous():
        return whole.view(-1)[::apart]
    return whole[..., ::apart].reshape(-1)


def changed_fraction(before: Sequence[Tensor], after: Sequence[Tensor]) -> float:
    """The share of entries that differ; 0 after an optimizer step means that its updates were lost."""
    changed = torch.stack([(b != a).sum() for b, a in zip(before, after, strict=True)]).sum()
    return float(changed) / sum(tensor.numel() for tensor in after)


@torch.no_grad()
def first_not_finite(values: Sequence[Tensor], targets: Sequence[Tensor]) -> int | None:
    """The index of the first tensor of values with one that is not finite in its target's dtype; None: there is none.

    All are reduced on their device, which is asked once.
    """
    if not values:
        return None
    norms = torch._foreach_norm([each.detach() for each in values], math.inf)  # pyright: ignore
    largest = torch.stack(list(norms)).tolist()  # NaN of a tensor that has some
    fits = [size <= torch.finfo(target.dtype).max for size, target in zip(largest, targets, strict=True)]
    return None if all(fits) else fits.index(False)


def not_finite(name: str, when: str) -> CommonWeightsError:
    """The end of a run whose weights must not be published."""
    return CommonWeightsError(
        "trained weights are not finite: they are not published",
        field=name,
        got=f"nan or inf {when}",
        wanted="finite weights",
        fix="lower --lr, and look at train/grad_norm in metrics.jsonl",
    )
