"""What layers keep for the backward pass: measured on a few tokens, then kept, recomputed or moved as memory allows."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

log = logging.getLogger(__name__)


class Kept(IntEnum):
    """What a layer keeps for its backward pass; what else that needs is computed again.

    From one to the next it is less, for more work: for the second hardly any, for the third about half of a layer's
    forward pass, for the last most of it.
    """

    ALL = 0
    """Whatever its operations ask for."""
    PRODUCTS = 1
    """Results of matrix products and of attention: not of norms, rotations and activations."""
    NARROW = 2
    """Of these, none that is wider than what it was made of: not the MLP's inner ones."""
    INPUT = 3
    """What goes in."""


@dataclass(frozen=True)
class Recomputation:
    """What the layers of a decoder keep: the first `count` of them `less`, the others `more`."""

    count: int = 0
    less: Kept = Kept.INPUT
    more: Kept = Kept.ALL

    def of(self, layer: int) -> Kept:
        """What this one keeps, counted from 0."""
        return self.less if layer < self.count else self.more


@dataclass(frozen=True)
class LayerMemory:
    """What a pass keeps for its backward pass.

    Attributes:
        layers: of the decoder.
        token_bytes: of one layer, for each token, by what it keeps; `ALL` and `INPUT` at least.
        fixed_bytes: of one layer, whatever the tokens, such as its weights in another dtype; by the same.
    """

    layers: int
    token_bytes: Mapping[Kept, float]
    fixed_bytes: Mapping[Kept, float] = field(default_factory=dict)

    def of_layer(self, tokens: int, kept: Kept) -> float:
        """What a layer keeps, in bytes."""
        return tokens * self.token_bytes[kept] + self.fixed_bytes.get(kept, 0.0)

    def needed(self, tokens: int, plan: Recomputation) -> float:
        """Bytes at the peak of a pass.

        A layer in its backward pass has all that it needs, and gradients beside, about as much again. The last layer
        has them while all is there still; the last of those that keep less, when only theirs is.
        """
        whole, less, more = (self.of_layer(tokens, kept) for kept in (Kept.ALL, plan.less, plan.more))
        gradients = tokens * self.token_bytes[Kept.ALL]
        first, rest = plan.count * less, (self.layers - plan.count) * more
        peaks = []
        if plan.count < self.layers:
            peaks.append(first + rest + (0 if plan.more is Kept.ALL else whole) + gradients)
        if plan.count:
            peaks.append(first + whole + gradients)
        return max(peaks)

    def plan(self, tokens: int, free: float) -> Recomputation:
        """The least work that lets a pass fit: as many layers as possible keep as much as possible; if nothing fits,
        all of them keep the least."""
        plans = (
            Recomputation(count, less, more)
            for more, less in pairwise(sorted(self.token_bytes))
            for count in range(self.layers + 1)
        )
        least = Recomputation(self.layers)
        return next((plan for plan in plans if self.needed(tokens, plan) <= free), least)


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


def measure(model: nn.Module, run: Callable[[int], Tensor]) -> tuple[float, float]:
    """What passes keep: bytes for each token, and besides.

    Args:
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
    return slope, max(0.0, totals[0] - slope * few)


def known_layers(decoder: nn.Module | None) -> nn.ModuleList | None:
    """A decoder's layers, if transformers knows how to checkpoint them."""
    found = getattr(decoder, "layers", None)
    is_known = isinstance(found, nn.ModuleList) and all(isinstance(one, GradientCheckpointingLayer) for one in found)
    return found if is_known else None


def recompute(layers: nn.ModuleList, count: int, *, offload: bool, random: bool) -> None:
    """Have the first `count` layers keep their input alone, the others all: by torch's checkpoints around layers.

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
