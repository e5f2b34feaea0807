"""torch.compile of a model's decoder layers: norms, rotary embedding and activations become few kernels.

Each layer is compiled by itself, for any number of tokens; all of them share the graph of the first. It is tried,
forward and backward, before it is used: a model that torch can't compile is trained without.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch
from torch import Tensor, nn

log = logging.getLogger(__name__)

GRAPHS = 64
"""Variants of a layer's graph, before torch gives up compiling: with and without gradient, adapter on and off, …"""


def compile_layers(layers: nn.ModuleList, trial: Callable[[], Tensor]) -> bool:
    """Compile; False if torch can't.

    Args:
        trial: a forward pass, with gradient.
    """
    torch._dynamo.config.cache_size_limit = max(GRAPHS, torch._dynamo.config.cache_size_limit)  # pyright: ignore[reportPrivateImportUsage]
    for layer in layers:
        layer.compile(dynamic=True, fullgraph=True)
    try:
        trial().float().square().mean().backward()
    except Exception as error:  # whatever torch's compiler, Triton or a host compiler may raise
        for layer in layers:
            layer._compiled_call_impl = None  # type: ignore[assignment]  # what Module.compile sets
        reason = "; ".join(line.strip() for line in str(error).splitlines()[:3] if line.strip())
        log.warning("decoder layers are not compiled: %s: %s", type(error).__name__, reason)
        return False
    return True
