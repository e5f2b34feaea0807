"""torch.compile of a model's decoder layers: norms, rotary embedding and activations become few kernels.

Each layer is compiled by itself, for any number of tokens; all of them share the graph of the first. It is tried,
forward and backward, before it is used: a model that torch can't compile is trained without.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from grpo_trainer.errors import ConfigError

log = logging.getLogger(__name__)

GRAPHS = 64
"""Variants of a layer's graph, before torch gives up compiling: with and without gradient, adapter on and off, …"""


class CompiledLayers:
    """Layers that are compiled within a block, and as they were outside: other passes of a run, such as the bridge's
    proof, are few and of other kinds, for each of which there would be a minute of compiling."""

    def __init__(self, layers: nn.ModuleList) -> None:
        self._calls = [
            (layer, name, torch.compile(getattr(layer, inside), dynamic=True, fullgraph=True))
            for layer in layers
            for name, inside in [_places(layer)]
        ]

    @contextmanager
    def active(self) -> Iterator[None]:
        """Of a forward pass and the backward pass of it, which may compute layers again."""
        for layer, name, call in self._calls:
            vars(layer)[name] = call
        try:
            yield
        finally:
            for layer, name, _ in self._calls:
                del vars(layer)[name]


def _places(layer: nn.Module) -> tuple[str, str]:
    """Where a module looks for its compiled call (as `Module.compile` has it), and what is compiled for it.

    A layer whose weights are cut brings them together in hooks, which stay outside.
    """
    return ("forward", "forward") if isinstance(layer, FSDPModule) else ("_compiled_call_impl", "_call_impl")


def compile_layers(layers: nn.ModuleList, trial: Callable[[], Tensor]) -> CompiledLayers | None:
    """Compile; None if torch can't.

    Args:
        trial: a forward pass, with gradient.

    Raises:
        ConfigError: torch can't, and the weights are cut: a pass that all compute can't be abandoned.
    """
    config = torch._dynamo.config  # pyright: ignore[reportPrivateImportUsage]
    config.cache_size_limit = max(GRAPHS, config.cache_size_limit)
    compiled = CompiledLayers(layers)
    try:
        with compiled.active():
            trial().float().square().mean().backward()
    except Exception as error:  # whatever torch's compiler, Triton or a host compiler may raise
        reason = "; ".join(line.strip() for line in str(error).splitlines()[:3] if line.strip())
        if isinstance(layers[0], FSDPModule):
            raise ConfigError(f"--compile on: {type(error).__name__}: {reason}; leave it out") from None
        log.warning("decoder layers are not compiled: %s: %s", type(error).__name__, reason)
        return None
    return compiled
