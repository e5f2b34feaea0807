"""What all optimizers share: arithmetic in fp32, piece by piece; small parameters together where that is the same.

Into 16-bit parameters the result goes by stochastic rounding, up or down with probabilities that make it right on
average (arXiv 2010.06192), or it is kept in fp32 as well (`--master-weights`).
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

PIECE = 1 << 23
"""Elements that are worked on at one time: temporaries are a few times this, in fp32."""

COMPILED_PIECES = 4
"""As many at one time where arithmetic is compiled: it has no temporaries, and a call costs as much as a million."""


class TwoPartOptimizer(torch.optim.Optimizer, ABC):
    """What the trainer asks of an optimizer.

    Attributes:
        kind: its states are of no use to an optimizer of another kind.
        prepares: between `prepare` and `step` the new weights lie where the gradients were.
    """

    kind: str
    prepares: ClassVar[bool] = False
    hold: Callable[[], None] | None = None
    """Set while weights and states are being copied: makes what the GPU does next wait for the copy."""

    def wait_for_copy(self) -> None:
        """Let nothing that follows change weights or states before a copy of them is whole; the host does not wait."""
        hold, self.hold = self.hold, None
        if hold is not None:
            hold()

    def prepare(self) -> None:
        """The part of the step that leaves the parameters alone, as far as there is one."""

    def compile(self) -> None:
        """Have its arithmetic compiled, as far as that is of use."""

    @abstractmethod
    def step(self, closure: Any = None) -> Any:
        """Write the new weights."""


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


@dataclass(frozen=True)
class Part:
    """Of the parameters: one, or some small ones that go together.

    Attributes:
        parameters: whose group, step number, dtype and device are the same.
    """

    group: dict[str, Any]
    parameters: list[Tensor]
    gradients: list[Tensor]
    states: list[dict[str, Any]]

    @property
    def step(self) -> int:
        return self.states[0]["step"]


class LandingOptimizer(TwoPartOptimizer):
    """Computes in fp32 whatever the parameters are; a subclass says by which rule.

    Args:
        master_weights: keep the weights in fp32, too, and round those to the nearest; 4 bytes a weight.

    Raises:
        TypeError: parameters of a dtype that can't be rounded stochastically.
    """

    name: ClassVar[str]
    prepares = True
    arithmetic: ClassVar[Callable[..., Any]]
    """What is worth compiling; to be called as `_arithmetic`, which is that or compiled."""
    elementwise: ClassVar[bool] = True
    """A weight's update depends on nothing but its own state and gradient, or that of its block."""
    block: ClassVar[int] = 1
    """Elements that share a state."""

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
        self._is_compiled = False
        self._arithmetic = self.arithmetic
        self.kind = f"{self.name} with master weights" if master_weights else self.name

    def compile(self) -> None:
        """Have the arithmetic compiled: one pass over the weights instead of many."""
        self._is_compiled = True
        self._arithmetic = torch.compile(self.arithmetic, dynamic=True)

    @torch.no_grad()
    def prepare(self) -> None:
        """Update the states, and put the new weights where the gradients are."""
        assert not self._prepared, "step comes first"
        known: dict[tuple[int, int], Rates] = {}
        for part in self.parts():
            key = (id(part.group), part.step)
            rates = known[key] = known.get(key) or self._rates(part.group, part.step, part.gradients[0].device)
            if len(part.parameters) == 1:
                self._prepare(part, part.parameters[0], part.gradients[0], part.states[0], rates)
            else:
                self._prepare_together(part, rates)
        self._prepared = True

    def _prepare(self, part: Part, parameter: Tensor, gradient: Tensor, state: dict[str, Any], rates: Rates) -> None:
        source = state.get("master", parameter)
        rounded = not self._master_weights and parameter.dtype == torch.bfloat16
        news = self._new_weights(Job(source, gradient, state, rates, part.group["betas"], part.group["eps"], rounded))
        for old, target, new in zip(self.pieces(source), self.pieces(gradient), news, strict=True):
            if self._master_weights:
                old.copy_(new.view(old.shape))
            target.copy_(new.view(target.shape))

    def _prepare_together(self, part: Part, rates: Rates) -> None:
        """End to end, as if they were one parameter; what came of it goes back to each."""
        names = [name for name, value in part.states[0].items() if isinstance(value, Tensor)]
        state: dict[str, Any] = {name: _joined([each[name] for each in part.states]) for name in names}
        gradient = _joined(part.gradients)
        self._prepare(part, _joined(part.parameters), gradient, state | {"step": part.step}, rates)
        for name in names:
            _hand_out(state[name], [each[name] for each in part.states])
        _hand_out(gradient, part.gradients)

    def parts(self) -> Iterator[Part]:
        """All that have a gradient; their states are there, and count this step."""
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
            whole_blocks = math.prod(parameter.shape[-2:]) % self.block == 0  # a stack's matrices have their own
            if not (self.elementwise and whole_blocks and size <= PIECE // 2):
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
        if parameters:
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
        """What `land` makes of each of the source's `pieces`, flat or not; the states are brought up to date.

        A piece of the gradient is overwritten once its weights were taken.
        """


# ---------------------------------------------------------------- pieces, rounding


def pieces(tensor: Tensor, limit: int, block: int = 1) -> Iterator[Tensor]:
    """Views of a tensor that make it up, in order, each with at most `limit` elements where rows allow it.

    Row by row, matrix by matrix: whatever its strides, which are those of another engine's memory, views they are.

    Args:
        block: all pieces of a matrix but its last have a multiple of so many elements.
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


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


def _hand_out(joined: Tensor, targets: Sequence[Tensor]) -> None:
    parts = joined.split([target.numel() for target in targets])
    torch._foreach_copy_(  # pyright: ignore[reportPrivateImportUsage]
        list(targets), [part.view(target.shape) for part, target in zip(parts, targets, strict=True)]
    )


def round_stochastically(values: Tensor) -> Tensor:
    """fp32 as bfloat16, up or down at random, so that the mean is right; what bfloat16 can say comes back exactly.

    The 16 bits that bfloat16 lacks are the distance to the neighbour below in units of 2^-16 of the spacing: adding a
    uniform random number of 16 bits carries over with just that probability.
    """
    bits = values.contiguous().view(torch.int32)
    noise = torch.randint_like(bits, 1 << 16)
    return noise.add_(bits).bitwise_and_(-1 << 16).view(torch.float32).to(torch.bfloat16)
