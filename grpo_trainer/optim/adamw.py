"""AdamW (arXiv 1711.05101) that does not lose updates smaller than the spacing of 16-bit weights.

A step has two parts. `prepare` computes the new weights into the memory of the gradients; this may be slow. `step`
copies them into the parameters, so a server that shares the weights must pause only for the copy.

Arithmetic is in fp32, piece by piece, with small parameters joined. 16-bit parameters get the result by stochastic
rounding: up or down, with probabilities that make it right on average (arXiv 2010.06192). With `--master-weights` the
result is also kept in fp32. The moments are in fp32, or with `adamw_8bit` in 8 bits (arXiv 2110.02861).

Parameters in fp32 that no server shares need none of this: torch's fused kernel updates them in one part.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim.adamw import adamw

from grpo_trainer.config.train import OptimizerConfig
from grpo_trainer.optim.eight_bits import BLOCK, SCALE, SIGNED, decoded, encoded, levels_of

PIECE = 1 << 23
"""Elements of a piece; temporaries are a few times this size, in fp32."""

COMPILED_PIECES = 4
"""Factor of `PIECE` for compiled arithmetic, which has no temporaries, but whose calls cost as much as 1M elements."""


class Rates(NamedTuple):
    """Factors of a step, as numbers or as tensors of one element."""

    lr: Any
    shrink: Any
    """Factor of the weights, for weight decay."""
    bias1: Any
    """Divisor of the first moment, which corrects its start from 0; `bias2` is the second's."""
    bias2: Any


@dataclass(frozen=True)
class Part:
    """One parameter, or several small ones with the same group, step number, dtype and device, updated together."""

    group: dict[str, Any]
    parameters: list[Tensor]
    gradients: list[Tensor]
    states: list[dict[str, Any]]


class AdamW(torch.optim.Optimizer):
    """The optimizer that `--optimizer` names.

    Args:
        master_weights: also keep 16-bit weights in fp32, at 4 bytes each, and round these to the nearest value.
        in_two_parts: prepare an update before it is written, also for parameters in fp32.

    Raises:
        TypeError: the parameters have a dtype without stochastic rounding.
    """

    def __init__(
        self,
        parameters: Sequence[Parameter],
        config: OptimizerConfig,
        *,
        master_weights: bool = False,
        in_two_parts: bool = False,
    ) -> None:
        in_fp32 = all(parameter.dtype == torch.float32 for parameter in parameters)
        self._master_weights = master_weights and not in_fp32
        for parameter in parameters:
            if parameter.dtype not in (torch.float32, torch.bfloat16) and not self._master_weights:
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
        self._in_8_bits = config.optimizer == "adamw_8bit"
        self.prepares = in_two_parts or self._in_8_bits or not in_fp32
        """Between `prepare` and `step` the new weights are in the gradients' memory."""
        self.prepared = False
        """They are there now; the states are already those after the step."""
        self.hold: Callable[[], None] | None = None
        """Set while weights and states are copied for a checkpoint: makes later GPU work wait for the copy."""
        name = "adamw_8bit" if self._in_8_bits else "adamw" if in_fp32 else "adamw, rounded"
        self.kind = f"{name} with master weights" if self._master_weights else name
        """The format of the states, which an optimizer of another kind can't load."""
        self._is_compiled = False
        self._arithmetic: Callable[..., Any] = adam_8bit if self._in_8_bits else adam

    def wait_for_copy(self) -> None:
        """Make later GPU work wait until a copy of weights and states is complete; the host does not wait."""
        hold, self.hold = self.hold, None
        if hold is not None:
            hold()

    def compile(self) -> None:
        """Compile the arithmetic: one pass over the weights instead of many. The fused kernel needs no compiling."""
        if self.prepares:
            self._is_compiled = True
            self._arithmetic = torch.compile(self._arithmetic, dynamic=True)

    @torch.no_grad()
    def prepare(self) -> None:
        """Update the states, and write the new weights into the gradients' memory, if the optimizer `prepares`."""
        if not self.prepares:
            return
        assert not self.prepared, "step comes first"
        known: dict[tuple[int, int], Rates] = {}
        for part in self.parts():
            key = (id(part.group), part.states[0]["step"])
            rates = known[key] = known.get(key) or self._rates(part)
            if len(part.parameters) == 1:
                self._prepare(part.group, part.parameters[0], part.gradients[0], part.states[0], rates)
            else:
                self._prepare_together(part, rates)
        self.prepared = True

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Write the new weights into the parameters, and drop prepared gradients."""
        if not self.prepares:
            self._step_fused()
            return
        if not self.prepared:
            self.prepare()
        parameters = [parameter for _, parameter, _ in self._trained()]
        weights = [gradient for _, _, gradient in self._trained()]
        if parameters:
            torch._foreach_copy_(parameters, weights)  # pyright: ignore[reportPrivateImportUsage]
        for parameter in parameters:
            parameter.grad = None
        self.prepared = False

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the states without torch's cast of fp32 states to the parameters' dtype."""
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group.update({key: value for key, value in saved.items() if key != "params"})
            for parameter, index in zip(group["params"], saved["params"], strict=True):
                state = {
                    key: value.to(parameter.device, copy=True) if isinstance(value, Tensor) else value
                    for key, value in state_dict["state"].get(index, {}).items()
                }
                if "step" in state:  # a tensor for the fused kernel, a number otherwise; either loads the other's
                    state["step"] = self._count(int(state["step"]), parameter)
                self.state[parameter] = state

    def _count(self, steps: int, parameter: Tensor) -> int | Tensor:
        return steps if self.prepares else torch.tensor(float(steps), dtype=torch.float32, device=parameter.device)

    def _step_fused(self) -> None:
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            states = [self._state_of(parameter) for parameter in parameters]
            adamw(
                parameters,
                [parameter.grad for parameter in parameters],
                [state["exp_avg"] for state in states],
                [state["exp_avg_sq"] for state in states],
                [],
                [state["step"] for state in states],
                fused=True,
                amsgrad=False,
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                maximize=False,
            )

    def _state_of(self, parameter: Tensor) -> dict[str, Any]:
        """Return a parameter's states, which begin as zeros."""
        state = self.state[parameter]
        if state:
            return state
        state["step"] = self._count(0, parameter)
        if self._in_8_bits:
            blocks = sum(-(-piece.numel() // BLOCK) for piece in self.pieces(parameter))
            for name in SIGNED:
                state[name] = torch.zeros(parameter.numel(), dtype=torch.uint8, device=parameter.device)
                state[name + SCALE] = torch.zeros(blocks, dtype=torch.float32, device=parameter.device)
        else:
            layout = torch.contiguous_format if self.prepares else torch.preserve_format
            for name in ("exp_avg", "exp_avg_sq"):
                state[name] = torch.zeros_like(parameter, dtype=torch.float32, memory_format=layout)
        if self._master_weights:
            state["master"] = parameter.detach().float().clone()
        return state

    # ------------------------------------------------------------------------------------------ the first part

    def parts(self) -> Iterator[Part]:
        """Yield the parameters that have a gradient, after creating their states and counting this step."""
        block = BLOCK if self._in_8_bits else 1
        small: dict[Any, Part] = {}
        for group, parameter, gradient in self._trained():
            state = self._state_of(parameter)
            state["step"] += 1
            size = parameter.numel()
            whole_blocks = math.prod(parameter.shape[-2:]) % block == 0  # no block spans two matrices of a stack
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
        limit = PIECE * (COMPILED_PIECES if self._is_compiled else 1)
        return pieces(tensor, limit, BLOCK if self._in_8_bits else 1)

    def _trained(self) -> Iterator[tuple[dict[str, Any], Tensor, Tensor]]:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    yield group, parameter, parameter.grad

    def _rates(self, part: Part) -> Rates:
        """Return the factors of a step; as tensors for compiled code, which would treat numbers as constants."""
        group, step, device = part.group, part.states[0]["step"], part.gradients[0].device
        beta1, beta2 = group["betas"]
        values = (group["lr"], 1.0 - group["lr"] * group["weight_decay"], 1.0 - beta1**step, 1.0 - beta2**step)
        return Rates(*(each.clone() for each in torch.tensor(values, device=device)) if self._is_compiled else values)

    def _prepare_together(self, part: Part, rates: Rates) -> None:
        """Update small parameters as one joined parameter, and copy the results back to each."""
        names = [name for name, value in part.states[0].items() if isinstance(value, Tensor)]
        state: dict[str, Any] = {name: joined([each[name] for each in part.states]) for name in names}
        gradient = joined(part.gradients)
        self._prepare(part.group, joined(part.parameters), gradient, state, rates)
        for name in names:
            hand_out(state[name], [each[name] for each in part.states])
        hand_out(gradient, part.gradients)

    def _prepare(
        self, group: dict[str, Any], parameter: Tensor, gradient: Tensor, state: dict[str, Any], rates: Rates
    ) -> None:
        source = state.get("master", parameter)
        rounded = not self._master_weights and parameter.dtype == torch.bfloat16
        news = self._new_weights(source, gradient, state, (rates, group["betas"], group["eps"], rounded))
        for old, target, new in zip(self.pieces(source), self.pieces(gradient), news, strict=True):
            if self._master_weights:
                old.copy_(new.view(old.shape))
            target.copy_(new.view(target.shape))

    def _new_weights(
        self, source: Tensor, gradient: Tensor, state: dict[str, Any], options: tuple[Any, ...]
    ) -> Iterator[Tensor]:
        """Update the states, and yield the new weights of each of the source's `pieces`, flat.

        The caller overwrites a piece of the gradient with them before it asks for the next piece.
        """
        if not self._in_8_bits:
            tensors = (source, gradient, state["exp_avg"], state["exp_avg_sq"])
            for weight, g, mean, square in zip(*map(self.pieces, tensors), strict=True):
                flat = weight.reshape(-1), g.reshape(-1), mean.view(-1), square.view(-1)
                yield self._arithmetic(*without_bases(*flat), *options)
            return
        tables = [each for signed in SIGNED.values() for each in levels_of(signed, gradient.device)]
        start = block = 0
        for weight, g in zip(self.pieces(source), self.pieces(gradient), strict=True):
            codes, scales = slice(start, start + g.numel()), slice(block, block - (-g.numel() // BLOCK))
            start, block = codes.stop, scales.stop
            kept = [each for name in SIGNED for each in (state[name][codes], state[name + SCALE][scales])]
            inputs = without_bases(weight.reshape(-1), g.reshape(-1), *kept)
            new, *states = self._arithmetic(*inputs, *tables, *options)
            torch._foreach_copy_(kept, states)  # pyright: ignore[reportPrivateImportUsage]
            yield new


# ---------------------------------------------------------------- arithmetic, which may be compiled


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
    """Update both moments in place, and return the new weights, in fp32 or stochastically rounded to bfloat16."""
    beta1, beta2 = betas
    g = g_n.float()
    mean_n.lerp_(g, 1.0 - beta1)
    square_n.mul_(beta2).addcmul_(g, g, value=1.0 - beta2)
    spread = (square_n / rates.bias2).sqrt_().add_(eps)
    update = (mean_n / rates.bias1).div_(spread)
    new = weight_n.float() * rates.shrink - update * rates.lr
    return round_stochastically(new) if rounded else new


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
    """Return the new weights, and the new states in 8 bits.

    The second moment is stored as its square root. So both moments have the same range of seven decades, and the second
    does not underflow to 0 where the first is not 0.
    """
    mean_n = decoded(mean_codes_n, mean_scales, signed_levels)
    square_n = decoded(root_codes_n, root_scales, levels).square()
    new_n = adam(weight_n, g_n, mean_n, square_n, rates, betas, eps, rounded)
    return new_n, *encoded(mean_n, signed_midpoints), *encoded(square_n.sqrt(), midpoints)


def round_stochastically(values: Tensor) -> Tensor:
    """Round fp32 to bfloat16 up or down at random, so that the mean is right; values of bfloat16 stay exact.

    bfloat16 is the upper 16 bits of fp32. The lower 16 bits are the distance to the next value towards 0, in units of
    2^-16 of the spacing. Adding a uniform random 16-bit number carries into the upper bits with exactly that
    probability; masking the lower bits then gives the rounded value. A NaN would become 0 if all its bits are 1, as
    those of a GPU's are, so it is put back.
    """
    bits = values.contiguous().view(torch.int32)
    noise = torch.randint_like(bits, 1 << 16)
    rounded = noise.add_(bits).bitwise_and_(-1 << 16).view(torch.float32)
    return torch.where(values.isnan(), values, rounded).to(torch.bfloat16)


# ---------------------------------------------------------------- pieces of tensors, and several tensors as one


def without_bases(*views: Tensor) -> list[Tensor]:
    """Return the same memory as tensors that count as no views: compiled code is valid for one kind of base only."""
    return [view.detach() for view in views]


def pieces(tensor: Tensor, limit: int, block: int = 1) -> Iterator[Tensor]:
    """Yield views that together make up a tensor, in order, each with at most `limit` elements if rows allow it.

    Splitting by rows and matrices always gives views and never copies, whatever the tensor's strides. That matters for
    shared weights, whose strides are those of the server's memory. The number of elements of each piece of a matrix,
    except the last, is a multiple of `block`.
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


def joined(tensors: Sequence[Tensor]) -> Tensor:
    """Return the tensors' values in one flat tensor: the memory of a single contiguous one, or else a copy."""
    if len(tensors) == 1 and tensors[0].is_contiguous():
        return tensors[0].detach().view(-1)
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


@torch.no_grad()
def hand_out(flat: Tensor, tensors: Sequence[Tensor]) -> None:
    """Write the values of `joined(tensors)` back into the tensors, unless they are their memory."""
    if flat.data_ptr() == tensors[0].data_ptr():
        return
    parts = flat.split([tensor.numel() for tensor in tensors])
    torch._foreach_copy_(  # pyright: ignore[reportPrivateImportUsage]
        list(tensors), [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]
    )
