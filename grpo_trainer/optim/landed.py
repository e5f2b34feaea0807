"""Whether a step has landed: how much of the weights it has changed."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

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
def are_finite(parameters: Sequence[Parameter]) -> bool:
    """Whether no entry is infinite or no number; one parameter's worth of booleans at a time."""
    return all(bool(parameter.detach().isfinite().all()) for parameter in parameters)
