"""torch.compile of a model's decoder layers: norms, rotary embedding and activations become few kernels.

Each layer is compiled by itself, for any number of tokens; all of them share the graph of the first. It is tried,
forward and backward, before it is used: a model that torch can't compile is trained without.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from grpo_trainer.errors import ConfigError
from grpo_trainer.model import attention
from grpo_trainer.model.activations import Kept, Recomputation

log = logging.getLogger(__name__)

# torch says of selective checkpoints that they go wrong with operations in place, which layers of all weights lack.
logging.getLogger("torch._higher_order_ops.wrap").addFilter(lambda record: "context_fn" not in record.getMessage())

GRAPHS = 64
"""Variants of a layer's graph, before torch gives up compiling: with and without gradient, adapter on and off, …"""


class CompiledLayers:
    """Layers that are compiled within a block, and as they were outside: other passes of a run, such as the bridge's
    proof, are few and of other kinds, for each of which there would be a minute of compiling.

    Attributes:
        plan: what they keep. What else their backward passes need is in the graphs of these: unlike a checkpoint
            around a layer, it costs no second way through Python, and nothing is computed that nobody needs.
    """

    def __init__(self, layers: nn.ModuleList) -> None:
        self.plan = Recomputation()
        self._layers = list(layers)
        self._whole = [
            torch.compile(getattr(layer, inside), dynamic=True, fullgraph=True)
            for layer in layers
            for _, inside in [_places(layer)]
        ]
        self._recomputing: dict[Kept, Callable[..., Any]] = {}
        self._tried: set[Kept] = set()

    def try_out(self, plan: Recomputation, trial: Callable[[], Tensor]) -> str | None:
        """Keep so much from now on, if torch can compile that; else why not.

        Args:
            trial: a forward pass, with gradient; its backward pass leaves gradients behind.
        """
        before, self.plan = self.plan, plan
        levels = {plan.of(number) for number in range(len(self._layers))}
        if levels <= self._tried:
            return None
        try:
            with self.active():
                trial().float().square().mean().backward()
        except Exception as error:  # whatever torch's compiler, Triton or a host compiler may raise
            self.plan = before
            reason = "; ".join(line.strip() for line in str(error).splitlines()[:3] if line.strip())
            return f"{type(error).__name__}: {reason}"
        self._tried |= levels
        return None

    @contextmanager
    def active(self) -> Iterator[None]:
        """Of a forward pass and the backward pass of it, which may compute layers again."""
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
            self._recomputing[kept] = torch.compile(_recomputing(kept), dynamic=True, fullgraph=True)
        return partial(self._recomputing[kept], layer)


def _recomputing(kept: Kept) -> Callable[..., Any]:
    """A layer's call that keeps so much; torch's compiler takes the checkpoint apart, it makes one graph of all."""
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
    """What torch asks of each operation of a layer: `PRODUCTS` keeps those of matrices and attention, `NARROW` of those
    of matrices the ones that do not widen."""
    is_kept = operation in _ATTENTION or operation in _MATRICES
    if operation in _MATRICES and kept is Kept.NARROW:
        inputs, outputs = args[-1].shape  # of the second factor
        is_kept = outputs <= inputs
    return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE


def _places(layer: nn.Module) -> tuple[str, str]:
    """Where a module looks for its compiled call (as `Module.compile` has it), and what is compiled for it.

    A layer whose weights are cut brings them together in hooks, which stay outside.
    """
    return ("forward", "forward") if isinstance(layer, FSDPModule) else ("_compiled_call_impl", "_call_impl")


def compile_layers(
    layers: nn.ModuleList, trial: Callable[[], Tensor], plan: Recomputation | None = None
) -> CompiledLayers | None:
    """Compile; None if torch can't.

    Args:
        trial: a forward pass, with gradient.
        plan: what they keep, if that is known already.

    Raises:
        ConfigError: torch can't, and the weights are cut: a pass that all compute can't be abandoned.
    """
    config = torch._dynamo.config  # pyright: ignore[reportPrivateImportUsage]
    config.cache_size_limit = max(GRAPHS, config.cache_size_limit)
    compiled = CompiledLayers(layers)
    if plan is not None and compiled.try_out(plan, trial) is None:
        return compiled
    reason = compiled.try_out(Recomputation(), trial)
    if reason is None:
        return compiled
    if isinstance(layers[0], FSDPModule):
        raise ConfigError(reason, field="--compile", got="on", fix="leave it out")
    log.warning("decoder layers are not compiled: %s", reason)
    return None
