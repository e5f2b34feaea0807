"""Bridge proof: the server generates with the published adapter and with no other weights.

The proof publishes a large synthetic adapter. The server's per-token logprobs under it must differ from the base
model's and agree with the trainer's own forward pass. Then the proof publishes the trainer's true adapter again, and
the logprobs must agree again. The proof fails, before any training step, for a server that accepts an adapter but
still serves the base model, serves the adapter at a wrong scale, or lacks a module.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any, Final
from uuid import uuid4

import torch
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn

from grpo_trainer.alignment.diagnosis import (
    Presence,
    adapted_layers,
    adapted_modules,
    explain,
    left_out,
    look_for_each_module,
    missing_modules,
    replaced,
    wrong_scales,
)
from grpo_trainer.alignment.probes import (
    FAILED,
    Probe,
    allowed_in_fp8,
    ask,
    completion_tokens,
    gap,
    gap_of_base,
    logprobs_of,
    logprobs_of_copies,
    probe_prompts,
)
from grpo_trainer.errors import BridgeError
from grpo_trainer.model.load import weights_of
from grpo_trainer.server_client import ServerClient
from vllm_server.protocol import BridgeInfo

log = logging.getLogger(__name__)

TOLERANCE = {"float32": 1e-3, "bfloat16": 0.02, "float16": 0.005}
"""Mean |trainer - server| per token in nats that is always accepted, since the two sides round differently."""

NOISE_LIMIT = {"float32": 1e-3, "bfloat16": 0.15, "float16": 0.05}
"""Largest gap on the present weights that rounding can explain. The actual noise depends on the model (bfloat16 on one
H200, random weights: 0.009 for a 0.5B shape, about 0.05 for a 7B shape), so the proof measures it."""

NOISE_LIMIT_QUANTISED = 0.5
"""The same if only one side is quantised, the trainer's base model to 4 bits, or the server's weights or KV cache to 8:
these are two different functions. Measured on a CPU, 4 bits against float32: 0.15 for the quickstart's model of 0.75M
parameters, 0.20 for a random one. With fp8 weights more may be allowed (`probes.allowed_in_fp8`)."""

SYNTHETIC_MARGIN_QUANTISED = 2.0
"""Under the synthetic adapter the gap of quantised sides may be this many times the measured noise: the effect of
quantisation does not grow with the adapter (measured: 0.4 to 1.2 times)."""

NOISE_MARGIN = 3.0
"""A later gap may be this many times the measured noise."""

GREATEST = NOISE_MARGIN * NOISE_LIMIT_QUANTISED
"""However large the noise was, a later gap may not exceed this, in nats."""

NEARER = 0.75
"""Under the synthetic adapter a quantised server is refused if another scale of the adapter explains its logprobs with
less than this share of the gap. (Tried on a small model with noise of 0.2 to 0.7 nats: at least 1.56 for a server that
is right, at most 0.58 for one with 0.25 to 4 times the scale.)"""

MIN_MOVE = 10.0
"""The synthetic adapter is at first made large enough to move the trainer's own logprobs by this many allowed gaps."""

FACTORS = (1, 4, 16)
"""How much more a synthetic change is to move the logprobs, tried in turn. A model that has learnt to answer with
certainty moves little: the tokens that it samples stay nearly certain."""

RELATIVE_SIZES = (0.03, 0.06, 0.125, 0.25, 0.5, 1.0, 2.0, 4.0)
"""Norms to try for the synthetic adapter, relative to the norm of each module's weights; the first that moves the
logprobs enough is used."""

LOGITS_AT_ONCE = 1 << 30
TOKENS_AT_ONCE = 4096
"""Bytes of fp32 logits, and tokens, of a forward pass that leaves out several modules, each in its own row."""

BASE_MODEL: Final = "does not serve the adapter: it answers as the base model does"
EARLIER: Final = "still serves the adapter that was published before"
STALE_CACHE: Final = "answers the long prompt alone with other weights than the published ones: a stale prefix cache"
OTHER_WEIGHTS: Final = "serves other weights than the trainer's (another base model, a damaged adapter?)"
"""Faults of a server, to follow "the server …"; `diagnosis.explain` finds further ones."""

SAME_MODEL: Final = "use one base model and dtype on both sides; --no-proof trains all the same"


@dataclass(frozen=True)
class Gaps:
    """Mean |difference| of the server's logprobs from the trainer's and from the base model's, in nats a token."""

    trainer: float
    base: float


@dataclass(frozen=True)
class Proved:
    """Measurements of a proof, in nats a token.

    Attributes:
        noise: mean |server - trainer| on the present weights.
        synthetic_moved: mean change of the server's logprobs by the synthetic change.
        synthetic: mean |server - trainer| under the synthetic change.
        restored: mean |server - trainer| after the change is undone; for shared weights, mean |server - server before|.
    """

    noise: float
    synthetic_moved: float
    synthetic: float
    restored: float


def prove_lora(model: PeftModel, server: ServerClient, load: Callable[[str], object], info: BridgeInfo) -> Proved:
    """Prove a LoRA bridge: the present adapter, a synthetic one, and the present one again.

    Args:
        load: loads the model's present adapter into the server under a name, without making it the served version, so
            that only the proof's own requests use it.
        info: the server.

    Raises:
        BridgeError: the server's logprobs do not agree with the published weights; the message names the fault.
    """
    proof = _Proof(model, server, load, info)
    noise_limit = NOISE_LIMIT_QUANTISED if proof.quantised else NOISE_LIMIT[proof.precision]
    try:
        noise = proof.probe("present", noise_limit, in_fp8=info.quantization == "fp8").trainer
        allowed = allowed_later(noise, proof.precision)
        # In 16 bits, rounding errors grow with the adapter. Quantisation errors do not.
        larger = max(proof.tolerance, SYNTHETIC_MARGIN_QUANTISED * noise) if proof.quantised else 2 * allowed
        # A server without the adapter is as far from the base model as the noise, which is half of `larger` there.
        least = larger if proof.quantised else 2 * larger
        synthetic = Gaps(0.0, 0.0)
        for factor in FACTORS:
            with _synthetic_adapter(model, proof.prompts, factor * MIN_MOVE / 2 * larger):
                synthetic = proof.probe("synthetic", larger, least=least)
                if synthetic.base >= least:
                    presence = proof.look_for_each_module()
                    break
        else:
            fix = "nothing was trained; leave quantisation out, use one dtype on both sides, or --no-proof"
            raise inconclusive("a synthetic adapter", synthetic.base, least, fix)
        restored = proof.probe("restored", allowed)
    finally:
        proof.leave()
    log.info(
        "bridge proved: the server is within %.2g nats a token of the trainer; a synthetic adapter moved it by %.3g "
        "and it stayed within %.2g (one module of %d missing would have shown for %d); restored, it is within %.2g",
        *(noise, synthetic.base, synthetic.trainer, presence.modules, presence.seen, restored.trainer),
    )
    return Proved(noise, synthetic.base, synthetic.trainer, restored.trainer)


class _Proof:
    """Tries adapters on the server, one after the other; `leave` unloads them."""

    def __init__(self, model: PeftModel, server: ServerClient, load: Callable[[str], object], info: BridgeInfo) -> None:
        self.quantised = info.in_8_bits or bool(getattr(model, "is_loaded_in_4bit", False))
        dtypes = (str(dtype).removeprefix("torch.") for dtype in (info.dtype, model.dtype))
        self.precision = max(dtypes, key=TOLERANCE.__getitem__)  # the coarser of the two sides
        self.tolerance = TOLERANCE[self.precision]
        self._completion = completion_tokens(self.precision, quantised=self.quantised)
        self.prompts = probe_prompts(model.config.vocab_size, info.max_model_len - self._completion)
        self._model = model
        self._server = server
        self._load = load
        self._lora_name = info.lora_name
        self._modules = adapted_modules(model)
        self._tried: dict[str, tuple[str, dict[str, Tensor]]] = {}  # stage -> its name in the server, its weights

    def probe(self, stage: str, allowed: float, least: float = 0.0, *, in_fp8: bool = False) -> Gaps:
        """Publish the model's present adapter and compare; raise a `BridgeError` if the gap is above `allowed`.

        Args:
            stage: if it was probed before, its earlier adapter is unloaded.
            least: an adapter that moves the server less than this from the base model shows nothing else.
            in_fp8: allow as much as follows from fp8 weights (`allowed_in_fp8`).
        """
        if stage in self._tried:
            self._server.unload_adapter(self._tried.pop(stage)[0])
        name = f"{self._lora_name}-proof-{stage}-{uuid4().hex[:8]}"
        self._load(name)
        earlier = {tried: weights for tried, (_, weights) in self._tried.items()}
        self._tried[stage] = name, {key: b_Or.detach().clone() for key, b_Or in self._modules.items()}
        probes = ask(self._server, self.prompts, self._completion, name=name)
        gaps = Gaps(trainer=gap(self._model, probes), base=gap_of_base(self._model, probes))
        if gaps.trainer <= allowed and gaps.base < least:
            return gaps
        if in_fp8:
            allowed = allowed_in_fp8(allowed, gaps.trainer, self._model, probes)
        # `not <=` also catches NaN
        if not gaps.trainer <= allowed or self._still(probes, gaps.trainer, earlier):
            what, base = self._what_is_wrong(probes, gaps, allowed, earlier), f"|server - base model| {gaps.base:.3g}"
            raise disagreement(
                what, f"{stage} adapter", gaps.trainer, allowed, base, f"nothing was trained; {SAME_MODEL}"
            )
        if self.quantised and least and (what := self._wrong_scale(probes, NEARER * gaps.trainer)):
            nearer = f"with that scale less than {NEARER:g} times as much"
            raise disagreement(
                what, f"{stage} adapter", gaps.trainer, allowed, nearer, f"nothing was trained; {SAME_MODEL}"
            )
        return gaps

    def _wrong_scale(self, probes: list[Probe], least: float) -> str | None:
        """Return the wrong scale of the adapter that leaves a gap below `least`, or None."""
        scales = wrong_scales(self._modules, _scalings(self._model))
        return explain(self._modules, lambda: gap(self._model, probes), least, scales)

    def _still(self, probes: list[Probe], least: float, earlier: Mapping[str, Mapping[str, Tensor]]) -> str | None:
        """Return the earlier stage whose weights leave a gap below `least`, or None."""
        for stage, weights in earlier.items():
            if all(torch.equal(b_Or, self._modules[name]) for name, b_Or in weights.items()):
                continue  # the same weights again
            with replaced(self._modules, weights):
                if gap(self._model, probes) < least:
                    return stage
        return None

    def look_for_each_module(self) -> Presence:
        """Check each module of the adapter that was probed last; raise a `BridgeError` if the server lacks one.

        The model must still have that adapter.
        """
        name, _ = list(self._tried.values())[-1]
        prompt = self.prompts[-1]
        answer = self._server.generate(prompt, model=name, max_tokens=1, temperature=1.0, prompt_logprobs=0, seed=0)
        assert answer.prompt_logprobs is not None, "asked with prompt_logprobs"
        later = zip(prompt[1:], answer.prompt_logprobs[1:], strict=True)
        text = Probe(prompt, 1, torch.tensor([entry[token] for token, entry in later if entry is not None]))
        layers = adapted_layers(self._model)

        def logprobs_without(names: Sequence[str]) -> Tensor:
            with left_out([layers[name] for name in names]):
                return logprobs_of_copies(self._model, text, 1 + len(names))

        row_bytes = 4 * len(prompt) * self._model.config.vocab_size
        at_once = max(1, min(LOGITS_AT_ONCE // row_bytes, TOKENS_AT_ONCE // len(prompt)) - 1)
        presence = look_for_each_module(list(layers), text.server_logprobs, logprobs_without, at_once)
        if presence.wrong:
            raise BridgeError(
                "the server does not serve the whole adapter",
                field=f"{FAILED} (synthetic adapter)",
                got=" and ".join(f"{100 * served:.0f} % of {module}" for module, served in presence.wrong),
                wanted="100 %",
                fix="nothing was trained; --no-proof trains all the same",
            )
        return presence

    def _what_is_wrong(
        self, probes: list[Probe], gaps: Gaps, allowed: float, earlier: Mapping[str, Mapping[str, Tensor]]
    ) -> str:
        if gaps.base <= allowed and gaps.base < gaps.trainer:
            return BASE_MODEL
        if stage := self._still(probes, min(gaps.trainer, allowed), earlier):
            return f"{EARLIER} ({stage})"
        if len(probes) > 1 and gap(self._model, probes[:1]) <= allowed:
            return STALE_CACHE
        suspicions = chain(wrong_scales(self._modules, _scalings(self._model)), missing_modules(self._modules))
        known = explain(self._modules, lambda: gap(self._model, probes), allowed, suspicions)
        return known or OTHER_WEIGHTS

    def leave(self) -> None:
        """Unload the adapters that were tried."""
        for name, _ in self._tried.values():
            self._server.unload_adapter(name)


def _scalings(model: PeftModel) -> dict[str, float]:
    """Return the factors by which an adapter's served scale may be wrong, by reason."""
    scaling, rank = next(
        (layer.scaling["default"], layer.r["default"]) for layer in model.modules() if isinstance(layer, LoraLayer)
    )
    found = {"applied twice": scaling, "not applied": 1 / scaling}
    found |= {"rank-stabilised": rank**0.5, "not rank-stabilised": rank**-0.5, "lora_alpha?": 2.0, "alpha?": 0.5}
    return {reason: factor for reason, factor in found.items() if factor != 1.0}


def allowed_later(noise: float, precision: str) -> float:
    """Return the largest gap after the first, in nats a token, for the noise that the first one showed."""
    return max(TOLERANCE[precision], min(NOISE_MARGIN * noise, GREATEST))


def disagreement(what: str, stage: str, own: float, allowed: float, other: str, fix: str) -> BridgeError:
    """Return the error of a server whose logprobs are not the trainer's.

    Args:
        what: one of the faults above.
        own: mean |server - trainer|, in nats a token.
        other: a second distance, for the message; may be empty.
    """
    distances = ", ".join(filter(None, [f"mean |server - trainer| of {own:.3g} nats a token", other]))
    field, wanted = f"{FAILED} ({stage})", f"at most {allowed:.2g}"
    return BridgeError(f"the server {what}", field=field, got=distances, wanted=wanted, fix=fix)


def inconclusive(what: str, moved: float, least: float, fix: str) -> BridgeError:
    """Return the error of a synthetic change that moves the logprobs too little to prove anything."""
    return BridgeError(
        f"{what} moves this model too little: a server that does not use it would go unseen",
        field="bridge proof impossible",
        got=f"{moved:.3g} nats a token",
        wanted=f"at least {least:.2g}, beyond what the two sides differ by anyway",
        fix=fix,
    )


def enlarge(
    model: nn.Module, prompts: list[list[int]], before: Tensor, move: float, change: Callable[[float], None]
) -> None:
    """Make a synthetic change so large that it moves the trainer's own logprobs by `move` nats a token on average.

    Args:
        prompts: texts on which the effect is measured.
        before: logprobs of these texts without the change.
        change: makes the change of a size in `RELATIVE_SIZES`, of which the largest is used if none is enough.
    """
    for size in RELATIVE_SIZES:
        change(size)
        if float((logprobs_of(model, prompts) - before).abs().mean()) >= move:
            return


@contextmanager
def _synthetic_adapter(model: PeftModel, prompts: list[list[int]], move: float) -> Iterator[None]:
    """Make every adapted module's B random and large within the block; restore all weights bit for bit afterwards.

    Args:
        prompts, move: see `enlarge`.
    """
    layers: list[Any] = [module for module in model.modules() if isinstance(module, LoraLayer)]
    modules = adapted_modules(model)

    def write(size: float) -> None:
        for index, layer in enumerate(layers):
            _set_random_b(layer, size, seed=index)

    with replaced(modules, modules):
        with model.disable_adapter():
            base = logprobs_of(model, prompts)
        enlarge(model, prompts, base, move, write)
        yield


@torch.no_grad()
def _set_random_b(layer: Any, size: float, seed: int) -> None:
    """Make B random, so that the adapter's change to the module has `size` times the norm of the module's weights."""
    a_rI, b_Or = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    b_Or.copy_(torch.randn(b_Or.shape, generator=torch.Generator().manual_seed(seed)))
    # |B A|_F^2 = trace((B^T B)(A A^T)), which needs only [rank, rank] matrices, none of the module's own size.
    norm = ((b_Or.T @ b_Or) * (a_rI @ a_rI.T)).sum().sqrt() * layer.scaling["default"]
    b_Or.mul_(size * weights_of(layer.get_base_layer()).norm() / norm)
