"""The optimizer, and whether its steps land."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

from grpo_trainer.config import OptimizerConfig


def build_optimizer(parameters: Sequence[Parameter], config: OptimizerConfig) -> torch.optim.Optimizer:
    """AdamW (arXiv 1711.05101) with fp32 states.

    Raises:
        TypeError: a parameter is not fp32. Small updates to 16-bit weights round to nothing: lr 1e-5 on a bf16 weight
            of 0.02 moved it by 0.0 in 20 steps.
    """
    for parameter in parameters:
        if parameter.dtype != torch.float32:
            raise TypeError(f"trained parameters must be fp32, got one of {parameter.dtype}")
    return torch.optim.AdamW(
        parameters,
        lr=config.lr,
        betas=(config.adam_beta1, config.adam_beta2),
        eps=config.adam_epsilon,
        weight_decay=config.weight_decay,
        fused=True,
    )


SAMPLED_ENTRIES = 1 << 16


def sampled(parameter: Parameter) -> Tensor:
    """A view of entries spread over a parameter, at most `SAMPLED_ENTRIES`: a copy of all would cost a whole model."""
    flat = parameter.detach().reshape(-1)
    return flat[:: -(-flat.numel() // SAMPLED_ENTRIES)]


def changed_fraction(before: Sequence[Tensor], after: Sequence[Tensor]) -> float:
    """The share of entries that differ; 0 after an optimizer step means that its updates were lost."""
    changed = torch.stack([(b != a).sum() for b, a in zip(before, after, strict=True)]).sum()
    return float(changed) / sum(tensor.numel() for tensor in after)
