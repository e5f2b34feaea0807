"""The optimizers. Their steps land: an update smaller than the spacing of 16-bit weights is not rounded away.

A step has two parts. `prepare` works out the new weights and may take its time; `step` writes them into the parameters,
which is all that a server on the same weights has to be held still for. In between they lie where the gradients were.

Arithmetic is in fp32, piece by piece. Into 16-bit parameters the result goes by stochastic rounding, up or down with
probabilities that make it right on average (arXiv 2010.06192), or it is kept in fp32 as well (`--master-weights`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from grpo_trainer.config import OptimizerConfig
from grpo_trainer.eight_bits import BLOCK, decoded, encoded, levels_of

PIECE = 1 << 23
"""Elements that are worked on at one time: temporaries are a few times this, in fp32."""


class TwoPartOptimizer(torch.optim.Optimizer, ABC):
    """What the trainer asks of an optimizer.

    Attributes:
        kind: its states are of no use to an optimizer of another kind.
    """

    kind: str

    def prepare(self) -> None:
        """The part of the step that leaves the parameters alone, as far as there is one."""

    def compile(self) -> None:
        """Have its arithmetic compiled, as far as that is of use."""

    @abstractmethod
    def step(self, closure: Any = None) -> Any:
        """Write the new weights."""


class FusedAdamW(torch.optim.AdamW, TwoPartOptimizer):  # pyright: ignore[reportIncompatibleMethodOverride]
    """torch's own, for fp32 parameters."""

    kind = "adamw"


class Rates(NamedTuple):
    """Numbers of a step, or tensors of one element.

    Attributes:
        shrink: what weights are multiplied by, for weight decay.
        bias1, bias2: what the moments are divided by, since they began at 0.
    """

    lr: Any
    shrink: Any
    bias1: Any
    bias2: Any


class Job(NamedTuple):
    """What a rule is given for one parameter: the weights to count from, and what becomes of them."""

    source: Tensor
    gradient: Tensor
    state: dict[str, Any]
    rates: Rates
    betas: tuple[float, float]
    eps: float
    rounded: bool


def land(weight: Tensor, update: Tensor, rates: Rates, rounded: bool) -> Tensor:
    """A weight less its update, in fp32, or stochastically rounded to bfloat16."""
    new = weight.float() * rates.shrink - update * rates.lr
    return round_stochastically(new) if rounded else new


class LandingOptimizer(TwoPartOptimizer):
    """Computes in fp32 whatever the parameters are; a subclass says by which rule.

    Args:
        master_weights: keep the weights in fp32, too, and round those to the nearest; 4 bytes a weight.

    Raises:
        TypeError: parameters of a dtype that can't be rounded stochastically.
    """

    name: ClassVar[str]

    def __init__(self, parameters: Sequence[Parameter], config: OptimizerConfig, *, master_weights: bool) -> None:
        for parameter in parameters:
            if parameter.dtype not in (torch.float32, torch.bfloat16) and not master_weights:
                raise TypeError(
                    f"trained parameters: got one of {parameter.dtype}, wanted float32, bfloat16, or --master-weights"
                )
        defaults = {
            "lr": config.lr,
            "betas": (config.adam_beta1, config.adam_beta2),
            "eps": config.adam_epsilon,
            "weight_decay": config.weight_decay,
        }
        super().__init__(parameters, defaults)
        self._master_weights = master_weights
        self._prepared = False
        self._land = land
        self._is_compiled = False
        self.kind = f"{self.name} with master weights" if master_weights else self.name

    @torch.no_grad()
    def prepare(self) -> None:
        """Update the states, and put the new weights where the gradients are."""
        assert not self._prepared, "step comes first"
        known: dict[tuple[int, int], Rates] = {}
        for group, parameter, gradient in self._trained():
            state = self.state[parameter]
            if not state:
                state["step"] = 0
                state.update(self._new_state(parameter))
                if self._master_weights:
                    state["master"] = parameter.detach().float().clone()
            state["step"] += 1
            key = (id(group), state["step"])
            rates = known[key] = known.get(key) or self._rates(group, state["step"], parameter.device)
            source = state.get("master", parameter)
            rounded = not self._master_weights and parameter.dtype == torch.bfloat16
            news = self._new_weights(Job(source, gradient, state, rates, group["betas"], group["eps"], rounded))
            for old, target, new in zip(pieces(source), pieces(gradient), news, strict=True):
                if self._master_weights:
                    old.copy_(new)
                target.copy_(new)
        self._prepared = True

    def compile(self) -> None:
        """Have the arithmetic compiled: few passes over the weights instead of many."""
        self._land = torch.compile(land, dynamic=True)
        self._is_compiled = True

    def _rates(self, group: dict[str, Any], step: int, device: torch.device) -> Rates:
        """What changes from step to step; compiled code takes numbers for constants, so there it is tensors."""
        beta1, beta2 = group["betas"]
        values = (group["lr"], 1.0 - group["lr"] * group["weight_decay"], 1.0 - beta1**step, 1.0 - beta2**step)
        return Rates(*(each.clone() for each in torch.tensor(values, device=device)) if self._is_compiled else values)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Write what `prepare` left; the gradients are used up."""
        if not self._prepared:
            self.prepare()
        parameters = [parameter for _, parameter, _ in self._trained()]
        weights = [gradient for _, _, gradient in self._trained()]
        torch._foreach_copy_(parameters, weights)  # pyright: ignore[reportPrivateImportUsage]
        for parameter in parameters:
            parameter.grad = None
        self._prepared = False

    def _trained(self) -> Iterator[tuple[dict[str, Any], Tensor, Tensor]]:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    yield group, parameter, parameter.grad

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As saved: torch's own would cast fp32 states to the parameters' dtype."""
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group.update({key: value for key, value in saved.items() if key != "params"})
            for parameter, index in zip(group["params"], saved["params"], strict=True):
                self.state[parameter] = {
                    key: value.to(parameter.device, copy=True) if isinstance(value, Tensor) else value
                    for key, value in state_dict["state"].get(index, {}).items()
                }

    @abstractmethod
    def _new_state(self, parameter: Tensor) -> dict[str, Tensor]: ...

    @abstractmethod
    def _new_weights(self, job: Job) -> Iterator[Tensor]:
        """What `land` makes of each of the source's `pieces`; the states are brought up to date.

        A piece of the gradient is overwritten once its weights were taken.
        """
        raise NotImplementedError


class AdamW(LandingOptimizer):
    """Decoupled weight decay (arXiv 1711.05101), both moments in fp32."""

    name = "adamw, rounded"

    def _new_state(self, parameter: Tensor) -> dict[str, Tensor]:
        return {
            name: torch.zeros(parameter.shape, dtype=torch.float32, device=parameter.device)
            for name in ("exp_avg", "exp_avg_sq")
        }

    def _new_weights(self, job: Job) -> Iterator[Tensor]:
        moments = pieces(job.state["exp_avg"]), pieces(job.state["exp_avg_sq"])
        for weight, g, mean, square in zip(pieces(job.source), pieces(job.gradient), *moments, strict=True):
            update = _adam(g.float(), mean, square, job.rates, job.betas, job.eps)
            yield self._land(weight, update, job.rates, job.rounded)


def _adam(g: Tensor, mean: Tensor, square: Tensor, rates: Rates, betas: tuple[float, float], eps: float) -> Tensor:
    """Bring both moments up to date, in place; the update that follows from them."""
    beta1, beta2 = betas
    mean.lerp_(g, 1.0 - beta1)
    square.mul_(beta2).addcmul_(g, g, value=1.0 - beta2)
    spread = (square / rates.bias2).sqrt_().add_(eps)
    return (mean / rates.bias1).div_(spread)


class AdamW8bit(LandingOptimizer):
    """AdamW whose moments rest in 8 bits, blocks of 256 with a scale each (arXiv 2110.02861).

    The second moment is kept as its root: so both span the same seven decades, and none is 0 where the other is not.
    """

    name = "adamw_8bit"

    def __init__(self, parameters: Sequence[Parameter], config: OptimizerConfig, *, master_weights: bool) -> None:
        super().__init__(parameters, config, master_weights=master_weights)
        self._adam_8bit: Callable[..., tuple[Tensor, ...]] = adam_8bit

    def compile(self) -> None:
        super().compile()
        self._adam_8bit = torch.compile(adam_8bit, dynamic=True)

    def _new_state(self, parameter: Tensor) -> dict[str, Tensor]:
        blocks = sum(-(-piece.numel() // BLOCK) for piece in pieces(parameter))
        state = {}
        for name in ("exp_avg", "exp_avg_sq_root"):
            state[name] = torch.zeros(parameter.numel(), dtype=torch.uint8, device=parameter.device)
            state[f"{name}_scale"] = torch.zeros(blocks, dtype=torch.float32, device=parameter.device)
        return state  # with a scale of 0 every code means 0

    def _new_weights(self, job: Job) -> Iterator[Tensor]:
        tables = [each for signed in (True, False) for each in levels_of(signed, job.gradient.device)]
        names = ("exp_avg", "exp_avg_sq_root")
        start = block = 0
        for weight, g in zip(pieces(job.source), pieces(job.gradient), strict=True):
            codes, scales = slice(start, start + g.numel()), slice(block, block - (-g.numel() // BLOCK))
            start, block = codes.stop, scales.stop
            kept = [each for name in names for each in (job.state[name][codes], job.state[f"{name}_scale"][scales])]
            new, *states = self._adam_8bit(weight, g, *kept, *tables, job.rates, job.betas, job.eps, job.rounded)
            torch._foreach_copy_(kept, states)  # pyright: ignore[reportPrivateImportUsage]
            yield new


def adam_8bit(
    weight: Tensor,
    g: Tensor,
    mean_codes: Tensor,
    mean_scales: Tensor,
    root_codes: Tensor,
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
    """What `land` makes of the weights, and their states in 8 bits after it."""
    mean = decoded(mean_codes, mean_scales, signed_levels)
    square = decoded(root_codes, root_scales, levels).square()
    update = _adam(g.float().reshape(-1), mean, square, rates, betas, eps)
    new = land(weight, update.view(g.shape), rates, rounded)
    return new, *encoded(mean, signed_midpoints), *encoded(square.sqrt(), midpoints)


class Adafactor(LandingOptimizer):
    """Second moment from its means over rows and columns, no first moment (arXiv 1804.04235).

    As the paper's section 7 has it (decay `1 - step ** -0.8`, updates clipped to a root mean square of 1), but with
    --lr as it is given instead of relative steps. The matrices of a stack, such as experts, are apart.
    """

    name = "adafactor"

    def _new_state(self, parameter: Tensor) -> dict[str, Tensor]:
        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.float32, device=parameter.device)

        if parameter.ndim < 2:
            return {"square": zeros(*parameter.shape)}
        *stack, rows, columns = parameter.shape
        return {"rows": zeros(*stack, rows), "columns": zeros(*stack, columns)}

    def _new_weights(self, job: Job) -> Iterator[Tensor]:
        for weight, update in zip(pieces(job.source), _adafactor(job.gradient, job.state), strict=True):
            yield self._land(weight, update, job.rates, job.rounded)


def _adafactor(gradient: Tensor, state: dict[str, Any]) -> Iterator[Tensor]:
    """The updates of the pieces."""
    decay = 1.0 - state["step"] ** -0.8
    if gradient.ndim < 2:
        square = state["square"].lerp_(gradient.float().square().add_(SQUARE_EPS), 1.0 - decay)
        update = gradient.float() * square.rsqrt()
        yield from pieces(update.div_(update.square().mean().sqrt_().clamp_(min=1.0)))
        return
    means = (state["rows"], state["columns"])
    stacks = [tensor.flatten(0, -2) if tensor.ndim > 1 else tensor[None] for tensor in means]
    for matrix, row_means, column_means in zip(_matrices(gradient), *stacks, strict=True):
        yield from _factored(matrix, row_means, column_means, decay)


SQUARE_EPS = 1e-30


def _matrices(tensor: Tensor) -> Iterator[Tensor]:
    if tensor.ndim == 2:
        yield tensor
    else:
        for each in tensor.unbind():
            yield from _matrices(each)


def _factored(gradient_RC: Tensor, rows_R: Tensor, columns_C: Tensor, decay: float) -> Iterator[Tensor]:
    """The updates of a matrix's pieces; its row and column means are brought up to date first."""
    row_means = []
    column_sum_C = torch.zeros_like(columns_C)
    for piece_rC in pieces(gradient_RC):
        square_rC = piece_rC.float().square().add_(SQUARE_EPS)
        row_means.append(square_rC.mean(-1))
        column_sum_C += square_rC.sum(0)
    rows_R.lerp_(torch.cat(row_means), 1.0 - decay)
    columns_C.lerp_(column_sum_C / len(gradient_RC), 1.0 - decay)
    by_row_R1 = (rows_R / rows_R.mean()).rsqrt_()[:, None]
    by_column_C = columns_C.rsqrt()
    heights = [len(piece) for piece in pieces(gradient_RC)]

    def scaled() -> Iterator[Tensor]:
        for piece_rC, by_row_r1 in zip(pieces(gradient_RC), by_row_R1.split(heights), strict=True):
            yield piece_rC.float().mul(by_row_r1).mul_(by_column_C)

    total = torch.stack([update.square().sum() for update in scaled()]).sum()
    clip = (total / gradient_RC.numel()).sqrt_().clamp_(min=1.0)
    for update in scaled():
        yield update.div_(clip)


# ---------------------------------------------------------------- pieces, rounding


def pieces(tensor: Tensor) -> Iterator[Tensor]:
    """Views of a tensor that make it up, in order, each with at most `PIECE` elements where rows allow it.

    Row by row, matrix by matrix: whatever its strides, which are those of another engine's memory, views they are.
    """
    if tensor.ndim > 2:
        for each in tensor.detach().unbind():
            yield from pieces(each)
    elif tensor.ndim == 0:
        yield tensor.detach()
    else:
        row = tensor[0].numel() if len(tensor) else 1
        yield from tensor.detach().split(max(1, PIECE // row))


def round_stochastically(values: Tensor) -> Tensor:
    """fp32 as bfloat16, up or down at random, so that the mean is right; what bfloat16 can say comes back exactly.

    The 16 bits that bfloat16 lacks are the distance to the neighbour below in units of 2^-16 of the spacing: adding a
    uniform random number of 16 bits carries over with just that probability.
    """
    bits = values.contiguous().view(torch.int32)
    noise = torch.randint_like(bits, 1 << 16)
    return noise.add_(bits).bitwise_and_(-1 << 16).view(torch.float32).to(torch.bfloat16)


# ---------------------------------------------------------------- which one, and whether its steps land


def build_optimizer(
    parameters: Sequence[Parameter], config: OptimizerConfig, *, master_weights: bool = False
) -> TwoPartOptimizer:
    """The optimizer that `--optimizer` names.

    Args:
        master_weights: see `LandingOptimizer`; fp32 parameters need none.

    Raises:
        TypeError: see `LandingOptimizer`.
    """
    in_fp32 = all(parameter.dtype == torch.float32 for parameter in parameters)
    if config.optimizer == "adamw" and in_fp32:
        return FusedAdamW(
            parameters,
            lr=config.lr,
            betas=(config.adam_beta1, config.adam_beta2),
            eps=config.adam_epsilon,
            weight_decay=config.weight_decay,
            fused=True,
        )
    rule = {"adamw": AdamW, "adamw_8bit": AdamW8bit, "adafactor": Adafactor}[config.optimizer]
    return rule(parameters, config, master_weights=master_weights and not in_fp32)


SAMPLED_ENTRIES = 1 << 16


def sampled(parameter: Parameter) -> Tensor:
    """Entries spread over a parameter, at most `SAMPLED_ENTRIES`: a copy of all would cost a whole model."""
    whole = parameter.detach()
    if whole.is_contiguous():
        flat = whole.view(-1)
        return flat[:: -(-flat.numel() // SAMPLED_ENTRIES)]
    return whole[..., :: -(-whole.numel() // SAMPLED_ENTRIES)]


def changed_fraction(before: Sequence[Tensor], after: Sequence[Tensor]) -> float:
    """The share of entries that differ; 0 after an optimizer step means that its updates were lost."""
    changed = torch.stack([(b != a).sum() for b, a in zip(before, after, strict=True)]).sum()
    return float(changed) / sum(tensor.numel() for tensor in after)
