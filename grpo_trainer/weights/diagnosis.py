"""What is wrong with an adapter that the server serves: its scale, a module of it, a layer?

Two questions, both answered with the trainer's own forward pass on the tokens that the server gave logprobs of. When a
gap is too large: under which change of the adapter would it vanish? And when it is not: is each module there? One of
hundreds changes the logprobs by less than 16 bits of rounding do on average, but it changes each token's in a way that
is known.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from torch import Tensor

SIGNIFICANCE = 5.0
"""Standard deviations that a finding must be away from chance: there are hundreds of modules."""

SECONDS = 60.0
"""Modules are tried one after the other for so long; a large model on a CPU has to leave some out."""

Modules = dict[str, Tensor]
"""Each adapted module's name in the base model, and its B: `[out, rank]`."""


def adapted_modules(model: PeftModel) -> Modules:
    """The modules that the adapter changes."""
    layers: dict[str, Any] = {name: layer for name, layer in model.named_modules() if isinstance(layer, LoraLayer)}
    return {
        name.removeprefix("base_model.model."): layer.lora_B["default"].weight
        for name, layer in layers.items()
    }  # fmt: skip


@contextmanager
def replaced(modules: Modules, weights: Mapping[str, Tensor]) -> Iterator[None]:
    """Within the block the named modules have these B; afterwards all is bit for bit as before."""
    saved = {name: modules[name].detach().clone() for name in weights}
    try:
        _put(modules, weights)
        yield
    finally:
        _put(modules, saved)


def multiplied(modules: Modules, factors: Mapping[str, float]) -> AbstractContextManager[None]:
    """Within the block the effect of each named module is so many times as large."""
    return replaced(modules, {name: modules[name].detach() * factor for name, factor in factors.items()})


@torch.no_grad()
def _put(modules: Modules, weights: Mapping[str, Tensor]) -> None:
    for name, b_Or in weights.items():
        modules[name].copy_(b_Or)


@dataclass(frozen=True)
class Presence:
    """Which modules are served.

    Attributes:
        modules: how many there are.
        seen: how many of them would have been missed, had they not been there.
        wrong: names, with how much of the module's effect is there (0: nothing, 1: all), the clearest first; at most 3.
    """

    modules: int
    seen: int
    wrong: tuple[tuple[str, float], ...]


def look_for_each_module(modules: Modules, server_N: Tensor, logprobs: Callable[[], Tensor]) -> Presence:
    """Whether each module's effect is in the server's logprobs.

    Were module m missing, the server would differ from the trainer as the trainer without m does. So the difference is
    projected on that: 0 when the module is there, 1 when it is not, up to the noise, which is spread over all tokens.

    Args:
        server_N: the server's logprobs.
        logprobs: the trainer's of the same tokens with the adapter as it is now, `[N]`.
    """
    full_N = logprobs()
    rest_N = server_N - full_N
    deadline = time.monotonic() + SECONDS
    effects: dict[str, Tensor] = {}
    for name in modules:
        if time.monotonic() > deadline:
            break
        with multiplied(modules, {name: 0.0}):
            effects[name] = logprobs() - full_N
    chance = _chance(rest_N)
    seen = sum(float(effect_N.norm()) > SIGNIFICANCE * chance for effect_N in effects.values())
    wrong: list[tuple[str, float]] = []
    # Effects resemble each other (q and k of a layer): what one explains is taken out before the next is looked for.
    while len(wrong) < 3 and (found := _clearest(rest_N, effects)) is not None:
        name, absent = found
        wrong.append((name, abs(round(1 - absent, 2))))
        rest_N = rest_N - absent * effects.pop(name)
    return Presence(len(modules), seen, tuple(wrong))


def _chance(rest_N: Tensor) -> float:
    """What noise alone contributes to a projection of the difference: one standard deviation."""
    return float(rest_N.norm()) / len(rest_N) ** 0.5


def _clearest(rest_N: Tensor, effects: Mapping[str, Tensor]) -> tuple[str, float] | None:
    """The module whose absence explains most of the difference, and how much of its effect is absent."""
    best = None
    for name, effect_N in effects.items():
        size, projection = float(effect_N.norm()), float(rest_N @ effect_N)
        significant = abs(projection) > SIGNIFICANCE * _chance(rest_N) * size and abs(projection) > 0.5 * size**2
        if significant and (best is None or abs(projection) / size > best[0]):
            best = abs(projection) / size, name, projection / size**2
    return None if best is None else best[1:]


def explain(modules: Modules, gap: Callable[[], float], allowed: float, scalings: Mapping[str, float]) -> str | None:
    """The change of the adapter under which the server's logprobs are the trainer's, in words; None if none is known.

    Args:
        gap: mean |server - trainer| with the adapter as it is now.
        allowed: what rounding explains.
        scalings: factors that a scale may be off by, each with the reason.
    """
    deadline = time.monotonic() + SECONDS
    best, smallest = None, allowed
    for what, factors in _suspicions(modules, scalings):
        if time.monotonic() > deadline:
            break
        with multiplied(modules, factors):
            left = gap()
        if left <= smallest:
            best, smallest = what, left
    return best


def _suspicions(modules: Modules, scalings: Mapping[str, float]) -> Iterator[tuple[str, dict[str, float]]]:
    for reason, factor in scalings.items():
        yield f"serves the adapter at {factor:.4g} times its scale ({reason})", dict.fromkeys(modules, factor)
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
