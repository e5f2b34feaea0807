"""torch.compile of a model's decoder layers: norms, rotary embedding and activation functions become few kernels.

Each layer is compiled by itself, for any number of tokens, and all layers share the graph of the first. A trial runs
forward and backward first. A model that torch can't compile is trained uncompiled.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo import config as dynamo_config
from torch.distributed.fsdp import FSDPModule
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from grpo_trainer.engine import attention
from grpo_trainer.engine.recompute import Kept, Recomputation

log = logging.getLogger(__name__)

# torch warns that selective checkpoints fail with in-place operations; the layers that use them here have none.
logging.getLogger("torch._higher_order_ops.wrap").addFilter(lambda record: "context_fn" not in record.getMessage())

GRAPHS = 64
"""Most variants of a layer's graph that torch may compile: with and without gradient, adapter on and off, …"""

ANY_LENGTH = "triton.mix_order_reduction_non_strict_mode"
"""Option of torch's compiler. Without it a graph is valid for few or for many tokens only, and torch compiles again in
a step with the other kind."""


class CompiledLayers:
    """Layers that are compiled within the block of `active` and uncompiled outside it.

    Other passes of a run, such as the bridge's proof, are rare and of other kinds, and each kind would take a minute to
    compile. What the layers do not keep is recomputed as part of the backward graph. Unlike a checkpoint around a
    layer, that needs no second Python call, and it skips results that the backward pass does not use.
    """

    def __init__(self, layers: nn.ModuleList) -> None:
        self.plan = Recomputation()
        self._layers = list(layers)
        self._whole = [_whole(layer) for layer in layers]
        self._recomputing: dict[Kept, Callable[..., Any]] = {}
        self._tried: set[Kept] = set()

    def try_out(self, plan: Recomputation, trial: Callable[[], None]) -> str | None:
        """Adopt a plan if torch can compile it and return None; otherwise keep the old plan and return the reason.

        `trial` makes a forward and a backward pass, which leave gradients on the parameters.
        """
        before, self.plan = self.plan, plan
        levels = {plan.of(number) for number in range(len(self._layers))}
        if levels <= self._tried:
            return None
        try:
            with self.active():
                trial()
        except Exception as error:  # any error of torch's compiler, Triton or a host compiler
            self.plan = before
            reason = "; ".join(line.strip() for line in str(error).splitlines()[:3] if line.strip())
            return f"{type(error).__name__}: {reason}"
        self._tried |= levels
        return None

    @contextmanager
    def active(self) -> Iterator[None]:
        """Use the compiled layers within the block, which must hold a forward pass and its backward pass.

        The backward pass may recompute layers, and must recompute them in the same way.
        """
        for number, layer in enumerate(self._layers):
            vars(layer)[_places(layer)[0]] = self._call(number, layer)
        try:
            yield
        finally:
            for layer in self._layers:
                del vars(layer)[_places(layer)[0]]

    def _call(self, number: int, layer: nn.Module) -> Callable[..., Any]:
        kept = self.plan.of(number)
        if kept is Kept.ALL:
            return self._whole[number]
        if kept not in self._recomputing:
            self._recomputing[kept] = _compiled(_recomputing(kept))
        return partial(self._recomputing[kept], layer)


@cache
def _options() -> dict[str, str | int | bool | Callable[..., Any]] | None:
    return {ANY_LENGTH: True} if ANY_LENGTH in torch._inductor.list_options() else None


def _compiled(call: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(call, dynamic=True, fullgraph=True, options=_options())


def _recomputing(kept: Kept) -> Callable[..., Any]:
    """Return a layer's call with a checkpoint that keeps `kept`; torch's compiler turns all of it into one graph."""
    selective = partial(create_selective_checkpoint_contexts, partial(_policy, kept))
    more = {} if kept is Kept.INPUT else {"context_fn": selective}

    def call(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
        inside = layer._call_impl
        return checkpoint(inside, *args, use_reentrant=False, preserve_rng_state=False, **more, **kwargs)

    return call


_MATRICES = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
_ATTENTION = (
    attention.OPERATION,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
)


def _policy(kept: Kept, _: Any, operation: Any, *args: Any, **__: Any) -> CheckpointPolicy:
    """Decide for torch whether an operation's result is kept or recomputed.

    `PRODUCTS` keeps results of attention and of all matrix products; `NARROW` recomputes those products that widen.
    """
    is_kept = operation in _ATTENTION or operation in _MATRICES
    if operation in _MATRICES and kept is Kept.NARROW:
        inputs, outputs = args[-1].shape  # shape of the second factor
        is_kept = outputs <= inputs
    return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE


def _places(layer: nn.Module) -> tuple[str, str]:
    """Return the attribute in which a module looks for its compiled call, and the method to compile for it.

    By default both are those of `Module.compile`. A sharded layer gathers its weights in hooks; these stay outside the
    graph, so only its `forward` is compiled.
    """
    return ("forward", "forward") if isinstance(layer, FSDPModule) else ("_compiled_call_impl", "_call_impl")


def _whole(layer: nn.Module) -> Callable[..., Any]:
    """Return a layer's compiled call, which keeps everything for the backward pass."""
    compiled = _compiled(getattr(layer, _places(layer)[1]))
    if not isinstance(layer, FSDPModule):
        return compiled

    def call(hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        # FSDP passes a view. A checkpoint that recomputes the layer does not, and torch would compile again for it.
        return compiled(hidden.view_as(hidden), *args, **kwargs)

    return call


def learn(hidden: Tensor) -> None:
    """Compute gradients of some function of a result, if it has any."""
    if hidden.requires_grad:
        hidden.float().square().mean().backward()


@dataclass(frozen=True)
class LayerCall:
    """A call of a sharded layer within a pass, with tensors that have no history."""

    layer: FSDPModule
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    autocast: torch.autocast

    @classmethod
    def of(cls, layer: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], device: str) -> LayerCall:
        def apart(value: Any) -> Any:
            return value.detach().requires_grad_(value.requires_grad) if isinstance(value, Tensor) else value

        assert isinstance(layer, FSDPModule)
        autocast = torch.autocast(device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device))
        return cls(layer, tuple(map(apart, args)), {key: apart(value) for key, value in kwargs.items()}, autocast)

    def repeat(self) -> Exception | None:
        """Repeat the call without FSDP's hooks, forward and backward; return the error that it raised.

        The weights are gathered for it, so all processes call this.
        """
        layer: Any = self.layer
        layer.unshard()
        try:
            with self.autocast:
                made = layer.forward(*self.args, **self.kwargs)
            learn(made[0] if isinstance(made, tuple) else made)
        except Exception as error:  # any error of torch's compiler, Triton or a host compiler
            return error
        finally:
            for parameter in layer.parameters():
                parameter.grad = None
            layer.reshard()


def compile_layers(
    layers: nn.ModuleList, trial: Callable[[], None], plan: Recomputation | None = None
) -> CompiledLayers | None:
    """Return the compiled layers; None if torch can't compile them. `plan` is what they keep, if that is known."""
    dynamo_config.cache_size_limit = max(GRAPHS, dynamo_config.cache_size_limit)
    compiled = CompiledLayers(layers)
    if plan is not None and compiled.try_out(plan, trial) is None:
        return compiled
    reason = compiled.try_out(Recomputation(), trial)
    if reason is None:
        return compiled
    log.warning("decoder layers are not compiled: %s", reason)
    return None
