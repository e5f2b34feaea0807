"""The update rule of each optimizer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import Parameter

from grpo_trainer.config.train import OptimizerConfig
from grpo_trainer.optim.eight_bits import BLOCK, SCALE, decoded, encoded, levels_of
from grpo_trainer.optim.landing import Job, Rates, StochasticRoundingOptimizer, TwoPartOptimizer, land


class FusedAdamW(torch.optim.AdamW, TwoPartOptimizer):  # pyright: ignore[reportIncompatibleMethodOverride]
    """torch's own AdamW, for fp32 parameters."""

    kind = "adamw"


def without_bases(*views: Tensor) -> list[Tensor]:
    """Return the same memory as tensors that count as no views.

    Compiled code is valid only for views of bases of the same rank and size.
    """
    return [view.detach() for view in views]


def adam(
    weight_n: Tensor,
    g_n: Tensor,
    mean_n: Tensor,
    square_n: Tensor,
    rates: Rates,
    betas: tuple[float, float],
    eps: float,
    rounded: bool,
) -> Tensor:
    """Update both moments in place, and return the result of `land`."""
    return land(weight_n, _adam_update(g_n.float(), mean_n, square_n, rates, betas, eps), rates, rounded)


def _adam_update(
    g: Tensor, mean: Tensor, square: Tensor, rates: Rates, betas: tuple[float, float], eps: float
) -> Tensor:
    """Update both moments in place, and return the weights' update."""
    beta1, beta2 = betas
    mean.lerp_(g, 1.0 - beta1)
    square.mul_(beta2).addcmul_(g, g, value=1.0 - beta2)
    spread = (square / rates.bias2).sqrt_().add_(eps)
    return (mean / rates.bias1).div_(spread)


def adam_8bit(
    weight_n: Tensor,
    g_n: Tensor,
    mean_codes_n: Tensor,
    mean_scales: Tensor,
    root_codes_n: Tensor,
    root_scales: Tensor,
    signed_levels: Tensor,
    signed_midpoints: Tensor,
    levels: Tensor,
    midpoints: Tensor,
    rates: Rates,
    betas: tuple[float, float],
    eps: float,
    rounded: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the result of `land`, and the new states in 8 bits."""
    mean_n = decoded(mean_codes_n, mean_scales, signed_levels)
    square_n = decoded(root_codes_n, root_scales, levels).square()
    new_n = adam(weight_n, g_n, mean_n, square_n, rates, betas, eps, rounded)
    return new_n, *encoded(mean_n, signed_midpoints), *encoded(square_n.sqrt(), midpoints)


class AdamW(StochasticRoundingOptimizer):
    """Decoupled weight decay (arXiv 1711.05101), both moments in fp32.

    For fp32 parameters its states are those of `FusedAdamW`, so that either loads them.
    """

    name = "adamw, rounded"
    arithmetic = staticmethod(adam)

    def __init__(self, parameters: Sequence[Parameter], config: OptimizerConfig, *, master_weights: bool) -> None:
        super().__init__(parameters, config, master_weights=master_weights)
        if all(parameter.dtype == torch.float32 for parameter in parameters):
            self.kind = FusedAdamW.kind

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        for state in self.state.values():
            if "step" in state:  # torch's optimizer counts in a tensor
                state["step"] = int(state["step"])

    def _new_state(self, parameter: Tensor) -> dict[str, Tensor]:
        return {
            name: torch.zeros(parameter.shape, dtype=torch.float32, device=parameter.device)
            for name in ("exp_avg", "exp_avg_sq")
        }

    def _new_weights(self, job: Job) -> Iterator[Tensor]:
        tensors = (job.source, job.gradient, job.state["exp_avg"], job.state["exp_avg_sq"])
        for weight, g, mean, square in zip(*map(self.pieces, tensors), strict=True):
            flat = weight.reshape(-1), g.reshape(-1), mean.view(-1), square.view(-1)
            yield self._arithmetic(*without_bases(*flat), job.rates, job.betas, job.eps, job.rounded)


class AdamW8bit(StochasticRoundingOptimizer):
    """AdamW whose moments are stored in 8 bits, in blocks of 256 with a scale each (arXiv 2110.02861).

    The second moment is stored as its square root. So both moments have the same range of seven decades, and the second
    does not underflow to 0 where the first is not 0.
    """

    name = "adamw_8bit"
    arithmetic = staticmethod(adam_8bit)
    block = BLOCK
    signed: ClassVar[Mapping[str, bool]] = MappingProxyType({"exp_avg": True, "exp_avg_sq_root": False})
    """State in 8 bits -> whether it has signs; its scales are the state NAME + `SCALE`."""

    def _new_state(self, parameter: Tensor) -> dict[str, Tensor]:
        blocks = sum(-(-piece.numel() // BLOCK) for piece in self.pieces(parameter))
        state = {}
        for name in self.signed:
            state[name] = torch.zeros(parameter.numel(), dtype=torch.uint8, device=parameter.device)
            state[name + SCALE] = torch.zeros(blocks, dtype=torch.float32, device=parameter.device)
        return state  # with a scale of 0 every code means 0

    def _new_weights(self, job: Job) -> Iterator[Tensor]:
        tables = [each for signed in self.signed.values() for each in levels_of(signed, job.gradient.device)]
        start = block = 0
        for weight, g in zip(self.pieces(job.source), self.pieces(job.gradient), strict=True):
            codes, scales = slice(start, start + g.numel()), slice(block, block - (-g.numel() // BLOCK))
            start, block = codes.stop, scales.stop
            kept = [each for name in self.signed for each in (job.state[name][codes], job.state[name + SCALE][scales])]
            inputs = without_bases(weight.reshape(-1), g.reshape(-1), *kept)
            new, *states = self._arithmetic(*inputs, *tables, job.rates, job.betas, job.eps, job.rounded)
            torch._foreach_copy_(kept, states)  # pyright: ignore[reportPrivateImportUsage]
            yield new
