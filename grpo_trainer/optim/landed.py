"""Checks after a step: the share of weights that it changed, and whether all weights are finite."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

from grpo_trainer.errors import CommonWeightsError

SAMPLED_ENTRIES = 1 << 16


def sampled(parameters: Sequence[Parameter]) -> list[Tensor]:
    """Return copies of at most `SAMPLED_ENTRIES` entries spread over each parameter, joined by dtype.

    Copies of all entries would need the memory of a whole model, and comparing each parameter a kernel each.
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


def not_finite(name: str, when: str) -> CommonWeightsError:
    """Return the error that ends a run whose weights must not be published."""
    return CommonWeightsError(
        "trained weights are not finite: they are not published",
        field=name,
        got=f"nan or inf {when}",
        wanted="finite weights",
        fix="lower --lr, and look at train/grad_norm in metrics.jsonl",
    )
