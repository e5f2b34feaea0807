"""Shared by the optimizers: arithmetic in fp32, piece by piece, with small parameters joined.

16-bit parameters get the result by stochastic rounding: up or down, with probabilities that make it right on average
(arXiv 2010.06192). With `--master-weights` the result is also kept in fp32.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from grpo_trainer.config.train import OptimizerConfig
from grpo_trainer.optim.joining import hand_out, joined

PIECE = 1 << 23
"""Elements of a piece; temporaries are a few times this size, in fp32."""

COMPILED_PIECES = 4
"""Factor of `PIECE` for compiled arithmetic, which has no temporaries, but whose calls cost as much as 1M elements."""


class TwoPartOptimizer(torch.optim.Optimizer, ABC):
    """Interface of the trainer's optimizers.

    Attributes:
        kind: identifies the format of its states, which an optimizer of another kind can't load.
        prepares: between `prepare` and `step` the new weights are in the gradients' memory.
        prepared: they are there now; the states are already those after the step.
    """

    kind: str
    prepares: ClassVar[bool] = False
    prepared: bool = False
    hold: Callable[[], None] | None = None
    """Set while weights and states are copied for a checkpoint: makes later GPU work wait for the copy."""

    def wait_for_copy(self) -> None:
        """Make later GPU work wait until a copy of weights and states is complete; the host does not wait."""
        hold, self.hold = self.hold, None
        if hold is not None:
            hold()

    def prepare(self) -> None:
        """Do the part of the step that does not write the parameters, if there is one."""

    def compile(self) -> None:
        """Compile the arithmetic if that helps."""

    @abstractmethod
    def step(self, closure: Any = None) -> Any:
        """Write the new weights."""


class Rates(NamedTuple):
    """Factors of a step, as numbers or as tensors of one element.

    Attributes:
        shrink: factor of the weights, for weight decay.
        bias1, bias2: divisors of the moments, which correct their start from 0.
    """

    lr: Any
    shrink: Any
    bias1: Any
    bias2: Any


class Job(NamedTuple):
    """Inputs of a rule for one parameter; `source` holds the weights to update."""

    source: Tensor
    gradient: Tensor
    state: dict[str, Any]
    rates: Rates
    betas: tuple[float, float]
    eps: float
    rounded: bool


def land(weight: Tensor, update: Tensor, rates: Rates, rounded: bool) -> Tensor:
    """Return a weight minus its update, in fp32 or stochastically rounded to bfloat16."""
    new = weight.float() * rates.shrink - update * rates.lr
    return round_stochastically(new) if rounded else new


@dataclass(frozen=True)
class Part:
    """One parameter, or several small ones that are updated together.

    Attributes:
        parameters: parameters with the same group, step number, dtype and device.
    """

    group: dict[str, Any]
    parameters: list[Tensor]
    gradients: list[Tensor]
    states: list[dict[str, Any]]

    @property
    def step(self) -> int:
        return self.states[0]["step"]


class StochasticRoundingOptimizer(TwoPartOptimizer):
    """Computes in fp32 whatever the parameters' dtype; a subclass has the update rule.

    Args:
        master_weights: also keep the weights in fp32, at 4 bytes each, and round these to the nearest value.

    Raises:
        TypeError: the parameters have a dtype without stochastic rounding.
    """

    name: ClassVar[str]
    prepares = True
    arithmetic: ClassVar[Callable[..., Any]]
    """The function to compile; call it as `_arithmetic`, which is the function itself or its compiled form."""
    block: ClassVar[int] = 1
    """Number of elements that share a state."""

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
        self._is_compiled = False
        self._arithmetic = self.arithmetic
        self.kind = f"{self.name} with master weights" if master_weights else self.name

    def compile(self) -> None:
        """Compile the arithmetic: one pass over the weights instead of many."""
        self._is_compiled = True
        self._arithmetic = torch.compile(self.arithmetic, dynamic=True)

    @torch.no_grad()
    def prepare(self) -> None:
        """Update the states, and write the new weights into the gradients' memory."""
        assert not self.prepared, "step comes first"
        known: dict[tuple[int, int], Rates] = {}
        for part in self.parts():
            key = (id(part.group), part.step)
            rates = known[key] = known.get(key) or self._rates(part.group, part.step, part.gradients[0].device)
            if len(part.parameters) == 1:
                self._prepare(part, part.parameters[0], part.gradients[0], part.states[0], rates)
            else:
                self._prepare_together(part, rates)
        self.prepared = True

    def _prepare(self, part: Part, parameter: Tensor, gradient: Tensor, state: dict[str, Any], rates: Rates) -> None:
        source = state.get("master", parameter)
        rounded = not self._master_weights and parameter.dtype == torch.bfloat16
        news = self._new_weights(Job(source, gradient, state, rates, part.group["betas"], part.group["eps"], rounded))
        for old, target, new in zip(self.pieces(source), self.pieces(gradient), news, strict=True):
            if self._master_weights:
                old.copy_(new.view(old.shape))
            target.copy_(new.view(target.shape))

    def _prepare_together(self, part: Part, rates: Rates) -> None:
        """Update small parameters as one joined parameter, and copy the results back to each."""
        names = [name for name, value in part.states[0].items() if isinstance(value, Tensor)]
        state: dict[str, Any] = {name: joined([each[name] for each in part.states]) for name in names}
        gradient = joined(part.gradients)
        self._prepare(part, joined(part.parameters), gradient, state | {"step": part.step}, rates)
        for name in names:
            hand_out(state[name], [each[name] for each in part.states])
        hand_out(gradient, part.gradients)

    def parts(self) -> Iterator[Part]:
        """Yield the parameters that have a gradient, after creating their states and counting this step."""
        small: dict[Any, Part] = {}
        for group, parameter, gradient in self._trained():
            state = self.state[parameter]
            if not state:
                state["step"] = 0
                state.update(self._new_state(parameter))
                if self._master_weights:
                    state["master"] = parameter.detach().float().clone()
            state["step"] += 1
            size = parameter.numel()
            whole_blocks = math.prod(parameter.shape[-2:]) % self.block == 0  # no block spans two matrices of a stack
            if not (whole_blocks and size <= PIECE // 2):
                yield Part(group, [parameter], [gradient], [state])
                continue
            key = (id(group), state["step"], parameter.dtype, gradient.dtype, parameter.device)
            part = small.get(key)
            if part is not None and sum(each.numel() for each in part.parameters) + size > PIECE:
                yield part
                part = None
            if part is None:
                part = small[key] = Part(group, [], [], [])
            part.parameters.append(parameter)
            part.gradients.append(gradient)
            part.states.append(state)
        yield from small.values()

    def pieces(self, tensor: Tensor) -> Iterator[Tensor]:
        return pieces(tensor, PIECE * (COMPILED_PIECES if self._is_compiled else 1), self.block)

    def _rates(self, group: dict[str, Any], step: int, device: torch.device) -> Rates:
        """Return the factors of a step; as tensors for compiled code, which would treat numbers as constants."""
        beta1, beta2 = group["betas"]
        values = (group["lr"], 1.0 - group["lr"] * group["weight_decay"], 1.0 - beta1**step, 1.0 - beta2**step)
        return Rates(*(each.clone() for each in torch.tensor(values, device=device)) if self._is_compiled else values)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Write the prepared weights into the parameters, and drop the gradients."""
        if not self.prepared:
            self.prepare()
        parameters = [parameter for _, parameter, _ in self._trained()]
        weights = [gradient for _, _, gradient in self._trained()]
        if parameters:
            torch._foreach_copy_(parameters, weights)  # pyright: ignore[reportPrivateImportUsage]
        for parameter in parameters:
            parameter.grad = None
        self.prepared = False

    def _trained(self) -> Iterator[tuple[dict[str, Any], Tensor, Tensor]]:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    yield group, parameter, parameter.grad

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the states without torch's cast of fp32 states to the parameters' dtype."""
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
        """Update the states, and yield the result of `land` for each of the source's `pieces`, flat or not.

        The caller overwrites a piece of the gradient with the yielded weights before it asks for the next piece.
        """


# ---------------------------------------------------------------- pieces, rounding


def pieces(tensor: Tensor, limit: int, block: int = 1) -> Iterator[Tensor]:
    """Yield views that together make up a tensor, in order, each with at most `limit` elements if rows allow it.

    Splitting by rows and matrices always gives views and never copies, whatever the tensor's strides. That matters for
    shared weights, whose strides are those of the server's memory.

    Args:
        block: the number of elements of each piece of a matrix, except the last, is a multiple of this.
    """
    if tensor.ndim > 2:
        for each in tensor.detach().unbind():
            yield from pieces(each, limit, block)
    elif tensor.ndim == 0:
        yield tensor.detach()
    else:
        row = tensor[0].numel() if len(tensor) else 1
        unit = block // math.gcd(row, block)
        yield from tensor.detach().split(max(1, limit // row // unit) * unit)


def round_stochastically(values: Tensor) -> Tensor:
    """Round fp32 to bfloat16 up or down at random, so that the mean is right; values of bfloat16 stay exact.

    bfloat16 is the upper 16 bits of fp32. The lower 16 bits are the distance to the next value towards 0, in units of
    2^-16 of the spacing. Adding a uniform random 16-bit number carries into the upper bits with exactly that
    probability; masking the lower bits then gives the rounded value.
    """
    bits = values.contiguous().view(torch.int32)
    noise = torch.randint_like(bits, 1 << 16)
    return noise.add_(bits).bitwise_and_(-1 << 16).view(torch.float32).to(torch.bfloat16)
