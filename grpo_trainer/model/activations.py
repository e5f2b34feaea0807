"""What layers keep for the backward pass: measured on a few tokens, then kept, recomputed or moved as memory allows."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class LayerMemory:
    """What a pass keeps for its backward pass.

    Attributes:
        layers: of the decoder.
        token_bytes: of one layer, for each token.
        input_bytes: of a layer's input alone, for each token.
        fixed_bytes: of the whole pass, whatever its tokens, such as weights in another dtype.
    """

    layers: int
    token_bytes: float
    input_bytes: float
    fixed_bytes: float = 0.0

    def needed(self, tokens: int, recomputed: int) -> float:
        """Bytes at the peak of a pass, where the first so many layers are recomputed.

        A layer in its backward pass has gradients beside what it kept, about as much again. The last layer has them
        while all is there still; the last of those that are recomputed, when only their inputs are.
        """
        inputs = recomputed * self.input_bytes
        kept = self.layers - recomputed
        peaks = [(kept + (1 if kept else 0)) * self.token_bytes + inputs]
        if recomputed:
            peaks.append(2 * self.token_bytes + inputs)
        return self.fixed_bytes + tokens * max(peaks)

    def recomputed(self, tokens: int, free: float) -> int:
        """The fewest layers that have to be recomputed for a pass to fit; all of them if none suffices."""
        fitting = (count for count in range(self.layers + 1) if self.needed(tokens, count) <= free)
        return next(fitting, self.layers)


class _Saved:
    """Bytes that autograd keeps, each storage counted once; weights are not counted.

    Those that are cut over processes come together, somewhere, for the time that they are used.
    """

    def __init__(self, without: nn.Module) -> None:
        self._model = without
        self._moves = isinstance(without, FSDPModule)
        self._seen = self._weights()
        self.total = 0

    def _weights(self) -> set[int]:
        parameters = (one for one in self._model.parameters() if not isinstance(one, DTensor))
        return {parameter.untyped_storage().data_ptr() for parameter in parameters}

    def add(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._seen and not (self._moves and storage.data_ptr() in self._weights()):
            self._seen.add(storage.data_ptr())
            self.total += storage.nbytes()
        return tensor


MEASURED = (128, 384)
"""Tokens of the two passes that are measured: their difference has no fixed part in it."""


def measure(model: nn.Module, layers: int, hidden_bytes: int, run: Callable[[int], Tensor]) -> LayerMemory:
    """Measure what passes keep.

    Args:
        hidden_bytes: of a token's hidden state.
        run: a forward pass over so many tokens, with gradient.
    """
    totals = []
    alive: list[Tensor] = []
    for tokens in MEASURED:
        saved = _Saved(model)
        with saved_tensors_hooks(saved.add, lambda tensor: tensor):
            alive.append(run(tokens))  # what is kept stays, so that no two storages share an address
        totals.append(saved.total)
    few, many = MEASURED
    slope = (totals[1] - totals[0]) / (many - few)
    return LayerMemory(layers, slope / layers, hidden_bytes, max(0.0, totals[0] - slope * few))


def known_layers(decoder: nn.Module | None) -> nn.ModuleList | None:
    """A decoder's layers, if transformers knows how to checkpoint them."""
    found = getattr(decoder, "layers", None)
    is_known = isinstance(found, nn.ModuleList) and all(isinstance(one, GradientCheckpointingLayer) for one in found)
    return found if is_known else None


def recompute(layers: nn.ModuleList, count: int, *, offload: bool, random: bool) -> None:
    """Recompute the first `count` layers in the backward pass, keep the others.

    Args:
        offload: keep the recomputed layers' inputs in main memory.
        random: layers draw random numbers (dropout), which have to be the same again.
    """
    plain = partial(checkpoint, use_reentrant=False, preserve_rng_state=random)

    def moved(function: Callable[..., Any], *args: Any) -> Any:
        with save_on_cpu(pin_memory=torch.cuda.is_available()):
            return plain(function, *args)

    for number, layer in enumerate(layers):
        layer.gradient_checkpointing = number < count  # type: ignore[assignment]  # transformers' own flag
        layer._gradient_checkpointing_func = moved if offload else plain  # type: ignore[assignment]
