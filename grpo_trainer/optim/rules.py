"""The update rule of each optimizer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import Tensor

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
    """Decoupled weight decay (arXiv 1711.05101), both moments in fp32."""

    name = "adamw, rounded"
    arithmetic = staticmethod(adam)

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


class PreparedAdamW(AdamW):
    """AdamW for fp32 parameters, in two parts. Its states are those of `FusedAdamW`, so that either loads them."""

    name = FusedAdamW.kind

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        for state in self.state.values():
            if "step" in state:  # torch's optimizer counts in a tensor
                state["step"] = int(state["step"])


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


class Adafactor(StochasticRoundingOptimizer):
    """Second moment from its means over rows and columns, no first moment (arXiv 1804.04235).

    This is the algorithm of the paper's section 7 (decay `1 - step ** -0.8`, updates clipped to a root mean square of
    1), but with a plain --lr instead of relative step sizes. Each matrix of a stack, such as experts, is separate.
    """

    name = "adafactor"
    arithmetic = staticmethod(land)
    elementwise = False

    def _new_state(self, parameter: Tensor) -> dict[str, Tensor]:
        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.float32, device=parameter.device)

        if parameter.ndim < 2:
            return {"square": zeros(*parameter.shape)}
        *stack, rows, columns = parameter.shape
        return {"rows": zeros(*stack, rows), "columns": zeros(*stack, columns)}

    def _new_weights(self, job: Job) -> Iterator[Tensor]:
        for weight, update in zip(self.pieces(job.source), self._updates(job), strict=True):
            yield self._arithmetic(weight, update, job.rates, job.rounded)

    def _updates(self, job: Job) -> Iterator[Tensor]:
        """Yield the updates of the pieces."""
        state, gradient = job.state, job.gradient
        decay = 1.0 - state["step"] ** -0.8
        if gradient.ndim < 2:
            square = state["square"].lerp_(gradient.float().square().add_(SQUARE_EPS), 1.0 - decay)
            update = gradient.float() * square.rsqrt()
            yield from self.pieces(update.div_(update.square().mean().sqrt_().clamp_(min=1.0)))
            return
        means = (state["rows"], state["columns"])
        stacks = [tensor.flatten(0, -2) if tensor.ndim > 1 else tensor[None] for tensor in means]
        for matrix, row_means, column_means in zip(_matrices(gradient), *stacks, strict=True):
            yield from self._factored(matrix, row_means, column_means, decay)

    def _factored(self, gradient_RC: Tensor, rows_R: Tensor, columns_C: Tensor, decay: float) -> Iterator[Tensor]:
        """Update a matrix's row and column means, then yield the updates of its pieces."""
        row_means = []
        column_sum_C = torch.zeros_like(columns_C)
        for piece_rC in self.pieces(gradient_RC):
            square_rC = piece_rC.float().square().add_(SQUARE_EPS)
            row_means.append(square_rC.mean(-1))
            column_sum_C += square_rC.sum(0)
        rows_R.lerp_(torch.cat(row_means), 1.0 - decay)
        columns_C.lerp_(column_sum_C / len(gradient_RC), 1.0 - decay)
        by_row_R1 = (rows_R / rows_R.mean()).rsqrt_()[:, None]
        by_column_C = columns_C.rsqrt()
        heights = [len(piece) for piece in self.pieces(gradient_RC)]

        def scaled() -> Iterator[Tensor]:
            for piece_rC, by_row_r1 in zip(self.pieces(gradient_RC), by_row_R1.split(heights), strict=True):
                yield piece_rC.float().mul(by_row_r1).mul_(by_column_C)

        total = torch.stack([update.square().sum() for update in scaled()]).sum()
        clip = (total / gradient_RC.numel()).sqrt_().clamp_(min=1.0)
        for update in scaled():
            yield update.div_(clip)


SQUARE_EPS = 1e-30


def _matrices(tensor: Tensor) -> Iterator[Tensor]:
    if tensor.ndim == 2:
        yield tensor
    else:
        for each in tensor.unbind():
            yield from _matrices(each)
