"""The proof's change of an adapter, and what is wrong with a served adapter: its scale, one of its modules, or a layer.

The trainer's own forward pass on tokens whose logprobs the server gave answers two questions. If the gap is too large:
which change of the adapter would close it? If the gap is small: does the server serve each module? One module of
hundreds changes the logprobs by less than rounding to 16 bits does on average. But its effect on each token is known,
so a projection on that effect still finds a missing module.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, Final
from uuid import uuid4

import torch
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from torch import Tensor

from grpo_trainer.alignment.probes import FAILED, Probe, gap, logprobs_of, trainer_logprobs
from grpo_trainer.alignment.proof import BASE_MODEL, OTHER_WEIGHTS, SAME_MODEL, Change, Served, Stage, enlarge
from grpo_trainer.errors import BridgeError
from grpo_trainer.model.load import weights_of
from grpo_trainer.server_client import ServerClient
from vllm_server.protocol import BridgeInfo

NEARER = 0.75
"""Under the synthetic adapter a quantised server is refused if another scale of the adapter explains its logprobs with
less than this share of the gap. (Tried on a small model with noise of 0.2 to 0.7 nats: at least 1.56 for a server that
is right, at most 0.58 for one with 0.25 to 4 times the scale.)"""

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

ALIKE, NEARER_MEAN, FEW = 8, 0.9, 0.02
"""The trainer's own rounding errors are in the server's difference and in each module's effect alike, so a module of
small effect looks half absent. So the mean of the `ALIKE` passes that differ least from the pass with all modules
stands for it if the server differs from that mean by less than `NEARER_MEAN` times as much.

A token near a tie has two values, and many a module's absence tips it over. If the server is on the other side, that
module looks absent: seen with 135M parameters in bfloat16, where 246 differences had a mean of 0.07 nats and one was
6.9. So the share `FEW` of the tokens is left out: those where the effect of the `ALIKE`th module is the largest. That
says nothing of the server, and an expert's three matrices, whose effect may be on few tokens, are fewer."""

LOGITS_AT_ONCE = 1 << 30
TOKENS_AT_ONCE = 4096
"""Bytes of fp32 logits, and tokens, of a forward pass that leaves out several modules, each in its own row."""

EARLIER: Final = "still serves the adapter that was published before"
STALE_CACHE: Final = "answers the long prompt alone with other weights than the published ones: a stale prefix cache"
"""Faults of a server, to follow "the server …"."""

Modules = dict[str, Tensor]
"""Name of each adapted module in the base model -> the module's B, `[out, rank]`."""


class AdapterChange(Change):
    """Every adapted module's B random and large. Adapters are loaded under names that only the proof's requests use.

    `load` loads the model's present adapter into the server under a name, without making it the served version.
    """

    fix = f"nothing was trained; {SAME_MODEL}"
    quantised_margin = 2.0  # measured: 0.4 to 1.2 times the noise

    def __init__(self, model: PeftModel, server: ServerClient, load: Callable[[str], object], info: BridgeInfo) -> None:
        super().__init__(model, info.policy_version)
        self._server = server
        self._load = load
        self._lora_name = info.lora_name
        self._layers = adapted_layers(model)
        self._modules: Modules = {name: layer.lora_B["default"].weight for name, layer in self._layers.items()}
        self._loaded: dict[Stage, tuple[str, Modules]] = {}  # name in the server, weights

    def deliver(self, stage: Stage) -> Served:
        if stage in self._loaded:
            self._server.unload_adapter(self._loaded.pop(stage)[0])
        name = f"{self._lora_name}-proof-{stage}-{uuid4().hex[:8]}"
        self._load(name)
        self._loaded[stage] = name, {key: b_Or.detach().clone() for key, b_Or in self._modules.items()}
        return Served(stage, f"{stage} adapter", name=name)

    @contextmanager
    def made(self, prompts: list[list[int]], move: float) -> Iterator[Served]:
        """Load the synthetic adapter; the base model is what it moves the logprobs from."""

        def write(size: float) -> None:
            for index, layer in enumerate(self._layers.values()):
                _set_random_b(layer, size, seed=index)

        with replaced(self._modules, self._modules):
            with self.model.disable_adapter():
                base = logprobs_of(self.model, prompts)
            enlarge(self.model, prompts, base, move, write)
            yield self.deliver("synthetic")

    def fault(self, served: Served, probes: list[Probe], own: float, allowed: float) -> str:
        with self._having(served.stage):
            if (what := super().fault(served, probes, own, allowed)) == BASE_MODEL:
                return what
            if earlier := self._nearer_stage(served.stage, probes, min(own, allowed)):
                return f"{EARLIER} ({earlier})"
            if len(probes) > 1 and gap(self.model, probes[:1]) <= allowed:
                return STALE_CACHE
            known = self._explain(probes, allowed, chain(wrong_scales(self.model), missing_parts(self._modules)))
            return known or OTHER_WEIGHTS

    def hidden_fault(self, served: Served, probes: list[Probe], own: float, *, quantised: bool) -> str | None:
        with self._having(served.stage):
            if earlier := self._nearer_stage(served.stage, probes, own):
                return f"{EARLIER} ({earlier})"
            if quantised and served.stage == "synthetic":
                return self._explain(probes, NEARER * own, wrong_scales(self.model))
            return None

    def _having(self, stage: Stage) -> AbstractContextManager[None]:
        return replaced(self._modules, self._loaded[stage][1])

    def _nearer_stage(self, stage: Stage, probes: list[Probe], least: float) -> Stage | None:
        """Return the earlier stage whose adapter, another one, leaves a gap below `least`, or None."""
        present = self._loaded[stage][1]
        for earlier, (_, weights) in self._loaded.items():
            if any(not torch.equal(b_Or, present[name]) for name, b_Or in weights.items()):
                with replaced(self._modules, weights):
                    if gap(self.model, probes) < least:
                        return earlier
        return None

    def _explain(self, probes: list[Probe], allowed: float, suspicions: Iterator[Suspicion]) -> str | None:
        """Return the suspicion under which the trainer's logprobs are nearest to the server's; None: none is near."""
        deadline = time.monotonic() + SECONDS
        best, smallest = None, allowed
        for what, factors in suspicions:
            if time.monotonic() > deadline:
                break
            with multiplied(self._modules, factors):
                left = gap(self.model, probes)
            if left <= smallest:
                best, smallest = what, left
        return best

    def check_parts(self, prompt: list[int]) -> str:
        name, _ = self._loaded["synthetic"]
        answer = self._server.generate(prompt, model=name, max_tokens=1, temperature=1.0, prompt_logprobs=0, seed=0)
        assert answer.prompt_logprobs is not None, "asked with prompt_logprobs"
        later = zip(prompt[1:], answer.prompt_logprobs[1:], strict=True)
        text = Probe(prompt, 1, torch.tensor([entry[token] for token, entry in later if entry is not None]))

        def logprobs_without(names: Sequence[str]) -> Tensor:
            with left_out([self._layers[name] for name in names]):
                return trainer_logprobs(self.model, text, 1 + len(names)).view(1 + len(names), -1)

        row_bytes = 4 * len(prompt) * self.model.config.vocab_size
        at_once = max(1, min(LOGITS_AT_ONCE // row_bytes, TOKENS_AT_ONCE // len(prompt)) - 1)
        with self._having("synthetic"):
            found = look_for_each_module(list(self._layers), text.server_logprobs, logprobs_without, at_once)
        if found.wrong:
            raise BridgeError(
                "the server does not serve the whole adapter",
                field=f"{FAILED} (synthetic adapter)",
                got=" and ".join(f"{100 * served:.0f} % of {module}" for module, served in found.wrong),
                wanted="100 %",
                fix="nothing was trained; --no-proof trains all the same",
            )
        return f" (one module of {found.modules} missing would have shown for {found.seen})"

    def close(self) -> None:
        for name, _ in self._loaded.values():
            self._server.unload_adapter(name)


@torch.no_grad()
def _set_random_b(layer: Any, size: float, seed: int) -> None:
    """Make B random, so that the adapter's change to the module has `size` times the norm of the module's weights."""
    a_rI, b_Or = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    b_Or.copy_(torch.randn(b_Or.shape, generator=torch.Generator().manual_seed(seed)))
    # |B A|_F^2 = trace((B^T B)(A A^T)), which needs only [rank, rank] matrices, none of the module's own size.
    norm = ((b_Or.T @ b_Or) * (a_rI @ a_rI.T)).sum().sqrt() * layer.scaling["default"]
    b_Or.mul_(size * weights_of(layer.get_base_layer()).norm() / norm)


# ---------------------------------------------------------------- the trainer's model with another adapter


def adapted_layers(model: PeftModel) -> dict[str, Any]:
    """Return PEFT's layers of the modules that the adapter changes, by their names in the base model."""
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, LoraLayer)}
    return {name.removeprefix("base_model.model."): layer for name, layer in layers.items()}


@contextmanager
def left_out(layers: Sequence[Any]) -> Iterator[None]:
    """In forward passes of `1 + len(layers)` rows, row `i + 1` lacks the adapter's part of `layers[i]`.

    Works without gradients only.
    """

    def leave_out(row: int, layer: Any, args: tuple[Any, ...], output: Tensor) -> Tensor:
        # A mixture's shared expert gets the tokens of all rows in one dimension.
        rows_BTI, rows_BTO = (each.reshape(1 + len(layers), -1, each.shape[-1]) for each in (args[0], output))
        rows_BTO[row] = layer.base_layer(rows_BTI[row])
        return rows_BTO.view_as(output)

    with ExitStack() as stack:
        for row, layer in enumerate(layers, 1):
            stack.callback(layer.register_forward_hook(partial(leave_out, row)).remove)
        yield


@contextmanager
def replaced(modules: Modules, weights: Mapping[str, Tensor]) -> Iterator[None]:
    """Replace B of the named modules within the block; afterwards all weights are restored bit for bit."""

    @torch.no_grad()
    def put(weights: Mapping[str, Tensor]) -> None:
        for name, b_Or in weights.items():
            modules[name].copy_(b_Or)

    saved = {name: modules[name].detach().clone() for name in weights}
    try:
        put(weights)
        yield
    finally:
        put(saved)


def multiplied(modules: Modules, factors: Mapping[str, float]) -> AbstractContextManager[None]:
    """Multiply the effect of each named module by its factor within the block."""
    return replaced(modules, {name: modules[name].detach() * factor for name, factor in factors.items()})


# ---------------------------------------------------------------- what a server may do wrong with a whole adapter

Suspicion = tuple[str, Mapping[str, float]]
"""A fault of the server, to follow "the server …", and the factor by which it then serves each named module."""


def wrong_scales(model: PeftModel) -> Iterator[Suspicion]:
    layers = adapted_layers(model)
    scaling, rank = next((layer.scaling["default"], layer.r["default"]) for layer in layers.values())
    factors: dict[str, float] = {"applied twice": scaling, "not applied": 1 / scaling, "rank-stabilised": rank**0.5}
    factors |= {"not rank-stabilised": rank**-0.5, "lora_alpha?": 2.0, "alpha?": 0.5}
    for reason, factor in factors.items():
        if factor != 1.0:
            yield f"serves the adapter at {factor:.4g} times its scale ({reason})", dict.fromkeys(layers, factor)


def missing_parts(modules: Modules) -> Iterator[Suspicion]:
    """Yield the suspicion that a kind of modules, a layer or a module is missing."""
    parts: dict[str, list[str]] = {}
    for name in modules:
        parts.setdefault(f"every {name.rpartition('.')[2]}", []).append(name)
    for name in modules:
        if layer := re.search(r"\.(\d+)\.", name):
            parts.setdefault(f"its layer {layer[1]}", []).append(name)
    for part, names in (parts | {name: [name] for name in modules}).items():
        yield f"serves the adapter without {part}", dict.fromkeys(names, 0.0)


# ---------------------------------------------------------------- one module among hundreds


@dataclass(frozen=True)
class Presence:
    """Which modules the server serves."""

    modules: int
    seen: int
    """Number of modules of which the proof would have detected the absence; too small if all effects are equal."""
    wrong: tuple[tuple[str, float], ...]
    """Up to 3 names, the clearest finding first, each with the share of the module's effect that is served."""


def look_for_each_module(
    modules: Sequence[str], server_N: Tensor, logprobs_without: Callable[[Sequence[str]], Tensor], at_once: int
) -> Presence:
    """Check whether the server's logprobs contain each module's effect.

    If module m is missing, the server differs from the trainer as the trainer without m differs from itself. So the
    difference is projected on that effect. The result is 0 if the module is served and 1 if it is missing, up to noise,
    which is spread over all tokens.

    `logprobs_without` returns the trainer's logprobs of the same tokens, `[1 + modules, N]`: with the present adapter,
    and without each of the given modules, of which it takes `at_once`.
    """
    deadline = time.monotonic() + SECONDS
    rows: dict[str, Tensor] = {}
    effects: dict[str, Tensor] = {}
    rest_N = whole_N = torch.empty(0)
    for start in range(0, len(modules), at_once):
        if start and time.monotonic() > deadline:
            break
        names = modules[start : start + at_once]
        whole_N, *without = logprobs_without(names)
        rows |= zip(names, without, strict=True)
        effects |= {name: row_N - whole_N for name, row_N in zip(names, without, strict=True)}
        if not start:
            rest_N = server_N - whole_N
    # Modules whose effects stand for the rounding of one pass. Where they have effects of their own, `seen` is smaller.
    rounding: list[str] = []
    if len(rows) >= 2 * ALIKE:  # of fewer, each would be much of the mean, and have much of the tokens
        alike = sorted(rows, key=lambda name: float(effects[name].abs().median()))[:ALIKE]
        mean_N = torch.stack([rows[name] for name in alike]).mean(0)
        if (server_N - mean_N).abs().median() < NEARER_MEAN * rest_N.abs().median():
            rest_N, effects = server_N - mean_N, {name: row_N - mean_N for name, row_N in rows.items()}
            rounding = alike
        eighth_N = torch.stack(list(effects.values())).abs().topk(ALIKE, 0).values[-1]
        kept_N = eighth_N.argsort()[: len(eighth_N) - int(FEW * len(eighth_N))]
        rest_N, effects = rest_N[kept_N], {name: effect_N[kept_N] for name, effect_N in effects.items()}
    least = max(SIGNIFICANCE / len(rest_N) ** 0.5, CLEARNESS**0.5) * float(rest_N.norm())
    # The server lacks only what is not rounding in an effect, and that must be more than half (`_absent_share`).
    variance = sum(float(effects[name].norm()) ** 2 for name in rounding) / (ALIKE - 1)
    least = max(least, (2 * variance) ** 0.5)
    seen = sum(float(effect_N.norm()) > least for effect_N in effects.values())
    wrong: list[tuple[str, float]] = []
    # Effects resemble each other (q and k of a layer), so the part that one module explains is subtracted before the
    # search for the next.
    while len(wrong) < 3:
        absent = {name: share for name, effect_N in effects.items() if (share := _absent_share(rest_N, effect_N))}
        if not absent:
            break
        name = max(absent, key=lambda each: abs(absent[each]) * float(effects[each].norm()))
        wrong.append((name, max(0.0, round(1 - absent[name], 2))))
        rest_N = rest_N - absent[name] * effects.pop(name)
    return Presence(len(modules), seen, tuple(wrong))


def _absent_share(rest_N: Tensor, effect_N: Tensor) -> float | None:
    """Return which share of a module's effect the server lacks; None if it serves most of it, or if that is not sure.

    `rest_N` is the server's logprobs minus the trainer's, `effect_N` the trainer's without the module minus those with
    it.
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
