"""Find what is wrong with a served adapter: its scale, one of its modules, or a layer.

This module answers two questions, both with the trainer's own forward pass on tokens whose logprobs the server gave.
If the gap is too large: which change of the adapter would close it? If the gap is small: does the server serve each
module? One module of hundreds changes the logprobs by less than rounding to 16 bits does on average. But its effect on
each token is known, so a projection on that effect still finds a missing module.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from torch import Tensor

SIGNIFICANCE = 5.0
"""Least significance of a finding, in standard deviations; it is high because hundreds of modules are tested."""

SECONDS = 60.0
"""Time limit for trying modules. It is checked before each forward pass; a large model on a CPU reaches it before its
last module."""

CLEARNESS = 2.5
"""Least ratio of a module's squared effect to the squared difference that its absence leaves unexplained.

Effect and difference are taken from equal forward passes of the trainer, so they share its rounding errors. With 16
bits these alone make a module of almost no effect look half absent, with a ratio of about 1.3: seen with a model of
135M parameters on an H200. Where several modules are absent the ratio is smaller; then `SIGNIFICANCE` must be reached
by the squared errors of the tokens, which are smaller without the module than with it."""

Modules = dict[str, Tensor]
"""Name of each adapted module in the base model -> the module's B, `[out, rank]`."""


def adapted_layers(model: PeftModel) -> dict[str, Any]:
    """Return PEFT's layers of the modules that the adapter changes, by their names in the base model."""
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, LoraLayer)}
    return {name.removeprefix("base_model.model."): layer for name, layer in layers.items()}


def adapted_modules(model: PeftModel) -> Modules:
    """Return the modules that the adapter changes."""
    return {name: layer.lora_B["default"].weight for name, layer in adapted_layers(model).items()}


@contextmanager
def left_out(layers: Sequence[Any]) -> Iterator[None]:
    """In forward passes of `1 + len(layers)` rows, row `i + 1` lacks the adapter's part of `layers[i]`.

    Works without gradients only.
    """

    def leave_out(row: int) -> Callable[[Any, tuple[Any, ...], Tensor], Tensor]:
        def hook(layer: Any, args: tuple[Any, ...], output: Tensor) -> Tensor:
            # A mixture's shared expert gets the tokens of all rows in one dimension.
            rows_BTI, rows_BTO = (each.reshape(1 + len(layers), -1, each.shape[-1]) for each in (args[0], output))
            rows_BTO[row] = layer.base_layer(rows_BTI[row])
            return rows_BTO.view_as(output)

        return hook

    with ExitStack() as stack:
        for row, layer in enumerate(layers, 1):
            stack.callback(layer.register_forward_hook(leave_out(row)).remove)
        yield


@contextmanager
def replaced(modules: Modules, weights: Mapping[str, Tensor]) -> Iterator[None]:
    """Replace B of the named modules within the block; afterwards all weights are restored bit for bit."""
    saved = {name: modules[name].detach().clone() for name in weights}
    try:
        _put(modules, weights)
        yield
    finally:
        _put(modules, saved)


def multiplied(modules: Modules, factors: Mapping[str, float]) -> AbstractContextManager[None]:
    """Multiply the effect of each named module by its factor within the block."""
    return replaced(modules, {name: modules[name].detach() * factor for name, factor in factors.items()})


@torch.no_grad()
def _put(modules: Modules, weights: Mapping[str, Tensor]) -> None:
    for name, b_Or in weights.items():
        modules[name].copy_(b_Or)


@dataclass(frozen=True)
class Presence:
    """Which modules the server serves.

    Attributes:
        modules: number of modules.
        seen: number of modules whose absence would have been detected.
        wrong: up to 3 names, each with the share of the module's effect that is served (0: none, 1: all), the clearest
            finding first.
    """

    modules: int
    seen: int
    wrong: tuple[tuple[str, float], ...]


def look_for_each_module(
    modules: Sequence[str], server_N: Tensor, logprobs_without: Callable[[Sequence[str]], Tensor], at_once: int
) -> Presence:
    """Check whether the server's logprobs contain each module's effect.

    If module m is missing, the server differs from the trainer as the trainer without m differs from itself. So the
    difference is projected on that effect. The result is 0 if the module is served and 1 if it is missing, up to noise,
    which is spread over all tokens.

    Args:
        server_N: the server's logprobs.
        logprobs_without: returns the trainer's logprobs of the same tokens, `[1 + modules, N]`: with the present
            adapter, and without each of the given modules.
        at_once: number of modules in one call.
    """
    deadline = time.monotonic() + SECONDS
    effects: dict[str, Tensor] = {}
    rest_N = torch.empty(0)
    for start in range(0, len(modules), at_once):
        if start and time.monotonic() > deadline:
            break
        names = modules[start : start + at_once]
        full_N, *without = logprobs_without(names)
        effects |= {name: each_N - full_N for name, each_N in zip(names, without, strict=True)}
        if not start:
            rest_N = server_N - full_N
    least = max(SIGNIFICANCE / len(rest_N) ** 0.5, CLEARNESS**0.5) * float(rest_N.norm())
    seen = sum(float(effect_N.norm()) > least for effect_N in effects.values())
    wrong: list[tuple[str, float]] = []
    # Effects resemble each other (q and k of a layer), so the part that one module explains is subtracted before the
    # search for the next.
    while len(wrong) < 3 and (found := _clearest(rest_N, effects)) is not None:
        name, absent = found
        wrong.append((name, max(0.0, round(1 - absent, 2))))
        rest_N = rest_N - absent * effects.pop(name)
    return Presence(len(modules), seen, tuple(wrong))


def _clearest(rest_N: Tensor, effects: Mapping[str, Tensor]) -> tuple[str, float] | None:
    """Return the module whose absence explains most of the difference, and the absent share of its effect."""
    found = {
        name: share for name, effect_N in effects.items() if (share := _absent_share(rest_N, effect_N)) is not None
    }
    if not found:
        return None
    name = max(found, key=lambda each: abs(found[each]) * float(effects[each].norm()))
    return name, found[name]


def _absent_share(rest_N: Tensor, effect_N: Tensor) -> float | None:
    """Return which share of a module's effect the server lacks; None if it serves most of it, or if that is not sure.

    Args:
        rest_N: the server's logprobs minus the trainer's.
        effect_N: the trainer's logprobs without the module minus those with it.
    """
    square, projection = float(effect_N @ effect_N), float(rest_N @ effect_N)
    chance = float(rest_N.norm()) / len(rest_N) ** 0.5  # one standard deviation of a projection on a unit vector
    if abs(projection) <= max(SIGNIFICANCE * chance * square**0.5, 0.5 * square):
        return None
    absent = projection / square
    left_N = rest_N - absent * effect_N
    if square > CLEARNESS * float(left_N @ left_N):
        return absent
    gain_N = rest_N**2 - (rest_N - effect_N) ** 2
    sure = float(gain_N.mean()) > SIGNIFICANCE * float(gain_N.std()) / len(gain_N) ** 0.5
    return absent if sure else None


Suspicions = Iterable[tuple[str, Mapping[str, float]]]
"""What a server may do wrong, and the factor by which it then serves each named module."""


def explain(modules: Modules, gap: Callable[[], float], allowed: float, suspicions: Suspicions) -> str | None:
    """Describe the change of the adapter that makes the trainer's logprobs equal the server's; None: no change does.

    Args:
        gap: returns mean |server - trainer| with the present adapter.
        allowed: the gap that rounding explains.
    """
    deadline = time.monotonic() + SECONDS
    best, smallest = None, allowed
    for what, factors in suspicions:
        if time.monotonic() > deadline:
            break
        with multiplied(modules, factors):
            left = gap()
        if left <= smallest:
            best, smallest = what, left
    return best


def wrong_scales(modules: Modules, scalings: Mapping[str, float]) -> Suspicions:
    """Yield the suspicion of each wrong scale; `scalings`: reason -> factor by which the served scale may be wrong."""
    for reason, factor in scalings.items():
        yield f"serves the adapter at {factor:.4g} times its scale ({reason})", dict.fromkeys(modules, factor)


def missing_modules(modules: Modules) -> Suspicions:
    """Yield the suspicion that a kind of modules, a layer or a module is missing."""
    kinds: dict[str, list[str]] = {}
    layers: dict[str, list[str]] = {}
    for name in modules:
        kinds.setdefault(name.rpartition(".")[2], []).append(name)
        layer = re.search(r"\.(\d+)\.", name)
        layers.setdefault(layer[1] if layer else name, []).append(name)
    for kind, names in kinds.items():
        yield f"serves the adapter without every {kind}", dict.fromkeys(names, 0.0)
    for layer, names in layers.items():
        yield f"serves the adapter without its layer {layer}", dict.fromkeys(names, 0.0)
    for name in modules:
        yield f"serves the adapter without {name}", {name: 0.0}
