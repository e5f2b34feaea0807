"""Activation memory: measure what layers keep for the backward pass; keep or recompute it as memory allows."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from functools import partial
from itertools import pairwise

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

log = logging.getLogger(__name__)


class Kept(IntEnum):
    """What a layer keeps for its backward pass; the backward pass recomputes the rest.

    Each level keeps less than the one before and recomputes more: `PRODUCTS` hardly any of a layer's forward pass,
    `NARROW` about half of it, `INPUT` most of it.
    """

    ALL = 0
    """Everything that its operations save."""
    PRODUCTS = 1
    """Results of matrix products and attention, but not of norms, rotary embeddings and activation functions."""
    NARROW = 2
    """Results of attention, and of matrix products that do not widen: the MLP's inner ones are recomputed."""
    INPUT = 3
    """The layer's input alone."""


@dataclass(frozen=True)
class Recomputation:
    """What a decoder's layers keep: the first `count` of them `less`, the others `more`."""

    count: int = 0
    less: Kept = Kept.INPUT
    more: Kept = Kept.ALL

    def of(self, layer: int) -> Kept:
        """Return what a layer keeps; layers count from 0."""
        return self.less if layer < self.count else self.more


_COMPUTED_AGAIN = {
    Kept.PRODUCTS: "norms and activations",
    Kept.NARROW: "norms, activations and the matrix products that widen",
    Kept.INPUT: "all",
}


def describe(plan: Recomputation, layers: int) -> str:
    """Describe what is recomputed, and in how many layers."""
    counts = {plan.less: plan.count, plan.more: layers - plan.count}
    again = [(_COMPUTED_AGAIN[kept], count) for kept, count in counts.items() if count and kept is not Kept.ALL]
    parts = [f"{what} of {count}" for what, count in again]
    return f"recomputing {' and '.join(parts) or 'nothing'} of {layers} layers"


@dataclass(frozen=True)
class LayerMemory:
    """Memory that a forward pass keeps for its backward pass."""

    layers: int  # number of the decoder's layers
    token_bytes: Mapping[Kept, float]  # of one layer for each token, by what is kept; has `ALL` and `INPUT` at least
    fixed_bytes: Mapping[Kept, float] = field(default_factory=dict)
    """Of one layer for any number of tokens, such as its weights in another dtype."""

    def needed(self, tokens: int, plan: Recomputation) -> float:
        """Return the bytes at the peak of a pass.

        During its backward pass a layer holds all of its activations and about as many bytes of gradients. There are
        two candidates for the peak. When the backward pass begins, the last layer holds these on top of what all layers
        keep. When it reaches the last recomputing layer, that layer holds them on top of what the first `count` keep.
        """
        whole, less, more = (
            tokens * self.token_bytes[kept] + self.fixed_bytes.get(kept, 0.0)
            for kept in (Kept.ALL, plan.less, plan.more)
        )
        gradients = tokens * self.token_bytes[Kept.ALL]
        first, rest = plan.count * less, (self.layers - plan.count) * more
        peaks = []
        if plan.count < self.layers:
            peaks.append(first + rest + (0 if plan.more is Kept.ALL else whole) + gradients)
        if plan.count:
            peaks.append(first + whole + gradients)
        return max(peaks)

    def plan(self, tokens: int, free: float) -> Recomputation:
        """Return the plan with the least recomputation that fits; if none fits, all layers keep only their input."""
        plans = (
            Recomputation(count, less, more)
            for more, less in pairwise(sorted(self.token_bytes))
            for count in range(self.layers + 1)
        )
        least = Recomputation(self.layers)
        return next((plan for plan in plans if self.needed(tokens, plan) <= free), least)


class _Saved:
    """Counts the bytes that autograd saves: each storage once, and no weights.

    Sharded weights are gathered into new memory for each use, so their addresses are looked up at each call.
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
        return tensor.detach()  # an output that its own node kept would never be freed


MEASURED = (128, 384)
"""Tokens of the two measured passes; the fixed part cancels in their difference."""


def measure(model: nn.Module, run: Callable[[int], Tensor]) -> tuple[float, float]:
    """Return the bytes that a pass keeps for each token, and the bytes that it keeps for any number of tokens.

    `run` makes a forward pass with gradient over a given number of tokens.
    """
    totals = []
    alive: list[Tensor] = []
    for tokens in MEASURED:
        saved = _Saved(model)
        with saved_tensors_hooks(saved.add, lambda tensor: tensor):
            alive.append(run(tokens))  # keeps the storages alive, so that no two of them share an address
        totals.append(saved.total)
    few, many = MEASURED
    slope = (totals[1] - totals[0]) / (many - few)
    return slope, max(0.0, totals[0] - slope * few)


def known_layers(decoder: nn.Module | None) -> nn.ModuleList | None:
    """Return a decoder's layers if transformers can checkpoint them, else None."""
    found = getattr(decoder, "layers", None)
    is_known = isinstance(found, nn.ModuleList) and all(isinstance(one, GradientCheckpointingLayer) for one in found)
    return found if is_known else None


def recompute(layers: nn.ModuleList, count: int) -> None:
    """Make the first `count` layers keep only their input (torch's activation checkpoints), the others everything."""
    again = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)  # layers draw no random numbers
    for number, layer in enumerate(layers):
        layer.gradient_checkpointing = number < count  # type: ignore[assignment]  # transformers' own flag
        layer._gradient_checkpointing_func = again  # type: ignore[assignment]
