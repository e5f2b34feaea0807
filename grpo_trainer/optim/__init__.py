"""The optimizers. They do not lose updates that are smaller than the spacing of 16-bit weights.

A step has two parts. `prepare` computes the new weights into the memory of the gradients; this may be slow. `step`
copies them into the parameters, so a server that shares the weights must pause only for the copy.

    landing.py      shared by all: pieces, joined small parameters, stochastic rounding, master weights
    rules.py        adamw, adamw_8bit
    eight_bits.py   states in 8 bits
    landed.py       the share of weights that a step has changed
    schedules.py, spikes.py     the learning rate; exploding gradients
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import Parameter

from grpo_trainer.config.train import OptimizerConfig
from grpo_trainer.optim.landing import TwoPartOptimizer
from grpo_trainer.optim.rules import AdamW, AdamW8bit, FusedAdamW


def build_optimizer(
    parameters: Sequence[Parameter],
    config: OptimizerConfig,
    *,
    master_weights: bool = False,
    in_two_parts: bool = False,
) -> TwoPartOptimizer:
    """Return the optimizer that `--optimizer` names.

    Args:
        master_weights: see `StochasticRoundingOptimizer`; fp32 parameters need none.
        in_two_parts: the optimizer must prepare an update before it writes it, also in fp32.

    Raises:
        TypeError: see `StochasticRoundingOptimizer`.
    """
    in_fp32 = all(parameter.dtype == torch.float32 for parameter in parameters)
    if config.optimizer == "adamw" and in_fp32 and not in_two_parts:
        return FusedAdamW(
            parameters,
            lr=config.lr,
            betas=(config.adam_beta1, config.adam_beta2),
            eps=config.adam_epsilon,
            weight_decay=config.weight_decay,
            fused=True,
        )
    rule = AdamW if config.optimizer == "adamw" else AdamW8bit
    return rule(parameters, config, master_weights=master_weights and not in_fp32)
