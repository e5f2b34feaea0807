"""Bridge proof: the server generates with the trainer's weights and with no others.

    compare ─▶ change ─▶ compare ─▶ undo ─▶ compare

The server must agree with the trainer's own forward pass on the present weights, on weights with a large synthetic
change, and on the present weights again. The first comparison measures the gap that rounding causes, and so limits the
gaps of later ones. Under the change the server must also differ from what it would say without it. So the proof fails,
before any training step, for a server that ignores what is published, keeps an earlier version, has a parameter in
another one's place, or answers from a stale cache. `Change` says what is changed, how the server gets it, and what a
disagreement means: an adapter (`adapter.py`), rows of all weights (`WeightChange`), or nothing at all.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Final, Literal

import torch
from peft import PeftModel
from torch import Tensor
from torch.distributed.tensor import DTensor

from grpo_common.status import NOTICE
from grpo_trainer.alignment.probes import (
    COMPLETION_TOKENS,
    COMPLETION_TOKENS_COARSE,
    FAILED,
    Probe,
    ask,
    gap,
    logprobs_of,
    offset_of_fp8,
    probe_prompts,
)
from grpo_trainer.errors import BridgeError
from grpo_trainer.model.lora import decoder_layers
from grpo_trainer.parallel.world import World
from grpo_trainer.server_client import ServerClient
from vllm_server.protocol import PROOF_VERSION, BridgeInfo

log = logging.getLogger(__name__)

TOLERANCE = {"float32": 1e-3, "bfloat16": 0.02, "float16": 0.005}
"""Mean |trainer - server| per token in nats that is always accepted, since the two sides round differently."""

NOISE_LIMIT = {"float32": 1e-3, "bfloat16": 0.15, "float16": 0.05}
"""Largest gap on the present weights that rounding can explain. The actual noise depends on the model (bfloat16 on one
H200, random weights: 0.009 for a 0.5B shape, about 0.05 for a 7B shape), so the proof measures it."""

NOISE_LIMIT_QUANTISED = 0.5
"""The same if only one side is quantised, the trainer's base model to 4 bits, or the server's weights or KV cache to 8:
these are two different functions. Measured on a CPU, 4 bits against float32: 0.15 for the quickstart's model of 0.75M
parameters, 0.20 for a random one."""

FP8_MARGIN, FP8_LIMIT = 2.0, 1.0
"""A server with fp8 weights may be this many times as far off as the trainer is from itself when it computes in fp8, up
to a limit in nats. The probes are random tokens, on which a model that has learnt may be sensitive: 0.65 nats on one
H200 for a 7B model that had learnt sums."""

NOISE_MARGIN = 3.0
"""A later gap may be this many times the measured noise."""

GREATEST = NOISE_MARGIN * NOISE_LIMIT_QUANTISED
"""However large the noise was, a later gap may not exceed this, in nats."""

MIN_MOVE = 10.0
"""The synthetic change is at first made large enough to move the trainer's own logprobs by this many allowed gaps."""

FACTORS = (1, 4, 16)
"""How much more a synthetic change is to move the logprobs, tried in turn. A model that has learnt to answer with
certainty moves little: the tokens that it samples stay nearly certain."""

RELATIVE_SIZES = (0.03, 0.06, 0.125, 0.25, 0.5, 1.0, 2.0, 4.0)
"""Sizes to try for the synthetic change, relative to the weights; the first that moves the logprobs enough is used."""

BASE_MODEL: Final = "does not serve the adapter: it answers as the base model does"
OTHER_WEIGHTS: Final = "serves other weights than the trainer's (another base model, a damaged adapter?)"
UNSEEN: Final = "does not see what the trainer writes: it answers as before the change"
MISPLACED: Final = "computes with other weights than the trainer's (a parameter bound to another's place?)"
STALE: Final = "does not return to the old weights, which are restored: a stale cache?"
"""Faults of a server, to follow "the server …"; `adapter.py` has more."""

SAME_MODEL: Final = "use one base model and dtype on both sides; --no-proof trains all the same"

Stage = Literal["present", "synthetic", "restored"]


@dataclass(frozen=True)
class Served:
    """What the server has at a stage of the proof: an adapter by `name`, or all weights as `version`.

    `words` name it in messages.
    """

    stage: Stage
    words: str
    name: str | None = None
    version: int | None = None


class Change:
    """A change that a proof makes. This class makes none: its server was launched on the model's present weights.

    If the model takes all processes of `world`, they make the change and the proof together.
    """

    fix: str = SAME_MODEL
    quantised_margin: float | None = None
    """Under the change, the gap of quantised sides may be this many times the noise. None: as with other sides."""

    def __init__(self, model: Any, version: int, world: World | None = None) -> None:
        self.model = model
        self.version = version
        self.world = world or World()

    def deliver(self, stage: Stage) -> Served:
        """Make the server generate with the model's present weights."""
        return Served(stage, f"version {self.version}", version=self.version)

    def made(self, prompts: list[list[int]], move: float) -> AbstractContextManager[Served]:
        """Change trainer and server within the block so that the trainer's logprobs move by `move` nats a token."""
        raise NotImplementedError

    def distance(self, probes: list[Probe]) -> float:
        """Return mean |server - model without the change|, in nats a token: the base model if there is an adapter."""
        with self.model.disable_adapter() if isinstance(self.model, PeftModel) else nullcontext():
            return common_gap(self.world, self.model, probes)

    def fault(self, served: Served, probes: list[Probe], own: float, allowed: float) -> str:
        """Name the fault of a server whose gap `own` to the trainer is above `allowed`."""
        is_base = isinstance(self.model, PeftModel) and self.distance(probes) <= allowed
        return BASE_MODEL if is_base else OTHER_WEIGHTS

    def hidden_fault(self, served: Served, probes: list[Probe], own: float, *, quantised: bool) -> str | None:
        """Return a fault that shows although the gap is within the limit, or None."""
        return None

    def check_parts(self, prompt: list[int]) -> str:
        """Check on a prompt that the server has each part of the synthetic change; return a note for the log.

        Raises:
            BridgeError: it lacks one.
        """
        return ""

    def close(self) -> None:
        """Free what the proof has left in the server."""


@dataclass(frozen=True)
class Proved:
    """Measurements of a proof, in nats a token."""

    noise: float
    """Mean |server - trainer| on the present weights."""
    synthetic_moved: float
    """Mean |server under the synthetic change - model without it|."""
    synthetic: float
    """Mean |server - trainer| under the synthetic change."""
    restored: float
    """Mean |server - trainer| after the change is undone."""


@dataclass(frozen=True)
class _Asked:
    """What a server sampled, and mean |server - trainer|."""

    url: str
    probes: list[Probe]
    gap: float


def _worst(asked: Sequence[_Asked]) -> _Asked:
    return max(asked, key=lambda one: math.inf if math.isnan(one.gap) else one.gap)


class Proof:
    """Compares servers with the trainer. The first comparison measures the noise, also for servers relaunched later.

    Several servers, by URL, get the same weights in the same way. Rank 0 alone asks them. `dtype` is that of the
    trainer's forward pass; None: that of the model's weights.
    """

    def __init__(
        self,
        model: Any,
        servers: ServerClient | Mapping[str, ServerClient],
        dtype: str | None = None,
        world: World | None = None,
    ) -> None:
        self.model = model
        self._servers = servers if isinstance(servers, Mapping) else {"": servers}
        self._world = world or World()
        self._dtype = dtype or str(model.dtype).removeprefix("torch.")
        self._noise: float | None = None

    def prove(self, info: BridgeInfo, change: Change) -> Proved:
        """Prove the present weights, a synthetic change, and the present weights again.

        Raises:
            BridgeError: the server's logprobs do not agree with the trainer's; the message names the fault.
        """
        with closing(change):
            noise, _ = self.compare(info, change)
            allowed = self._allowed(info)
            # In 16 bits rounding errors grow with the change. Quantisation errors do not, and a server that ignores
            # the change is as far from the unchanged model as the noise, which is half of `larger` then.
            larger, least = 2 * allowed, 4 * allowed
            if change.quantised_margin is not None and self._is_quantised(info):
                larger = least = max(TOLERANCE[self._precision(info)], change.quantised_margin * noise)
            moved = own = 0.0
            for factor in FACTORS:
                with change.made(self._prompts(info), factor * MIN_MOVE / 2 * larger) as served:
                    asked = self._ask(info, served)
                moved = min(change.distance(one.probes) for one in asked)
                worst = _worst(asked)
                own = worst.gap
                if own <= larger and moved < least:
                    continue
                self._check(info, change, served, worst, larger)
                note = change.check_parts(self._prompts(info)[-1])
                break
            else:
                raise BridgeError(
                    "a synthetic change moves this model too little: a server that does not use it would go unseen",
                    field="bridge proof impossible",
                    got=f"{moved:.3g} nats a token",
                    wanted=f"at least {least:.2g}, beyond what the two sides differ by anyway",
                    fix="nothing was trained; leave quantisation out, use one dtype on both sides, or --no-proof",
                )
            restored, _ = self.compare(info, change, "restored")
        log.info(
            "bridge proved: the server is within %.2g nats a token of the trainer; a %s moved it by %.3g and it stayed "
            "within %.2g%s; undone, it is within %.2g",
            *(noise, served.words, moved, own, note, restored),
            extra=NOTICE if self._world.leads else {},
        )
        return Proved(noise, moved, own, restored)

    def compare(self, info: BridgeInfo, change: Change, stage: Stage = "present") -> tuple[float, float]:
        """Return mean |server - trainer| on the model's present weights, and its limit, in nats a token.

        Raises:
            BridgeError: the gap is above the limit, or another model or version answered.
        """
        served = change.deliver(stage)
        worst = _worst(self._ask(info, served))
        own, allowed = worst.gap, self._allowed(info)
        if self._noise is None and info.quantization == "fp8" and own > allowed:
            of_rank = offset_of_fp8(self.model, worst.probes)
            offset = self._world.lead(lambda: of_rank)
            log.info("the server is %.2g nats a token from the trainer, which is %.2g from itself in fp8", own, offset)
            allowed = max(allowed, min(FP8_MARGIN * offset, FP8_LIMIT))
        self._check(info, change, served, worst, allowed)
        if self._noise is None:
            self._noise = own
        return own, allowed

    def _check(self, info: BridgeInfo, change: Change, served: Served, asked: _Asked, allowed: float) -> None:
        """Raise a `BridgeError` if a server's logprobs are not those of the weights that it should have."""
        own, probes = asked.gap, asked.probes
        if own <= allowed:  # a gap that is not a number is not within the limit
            what = change.hidden_fault(served, probes, own, quantised=self._is_quantised(info))
        else:
            what = change.fault(served, probes, own, allowed)
        if what is None:
            return
        other, without = change.distance(probes), "base model" if isinstance(change.model, PeftModel) else "old weights"
        raise BridgeError(
            f"the server {what}",
            field=": ".join(filter(None, [asked.url and f"server {asked.url}", f"{FAILED} ({served.words})"])),
            got=f"mean |server - trainer| of {own:.3g} nats a token"
            + ("" if other == own else f", |server - {without}| {other:.3g}"),
            wanted=f"at most {allowed:.2g}",
            fix=change.fix,
        )

    def _ask(self, info: BridgeInfo, served: Served) -> list[_Asked]:
        """Ask all servers, and compare what each sampled with the trainer's own logprobs."""
        prompts, tokens = self._prompts(info), self._completion(info)
        several = len(self._servers) > 1
        probes = self._world.lead(
            lambda: {
                url if several else "": ask(server, prompts, tokens, name=served.name, version=served.version)
                for url, server in self._servers.items()
            }
        )
        return [_Asked(url, its, common_gap(self._world, self.model, its)) for url, its in probes.items()]

    def _prompts(self, info: BridgeInfo) -> list[list[int]]:
        return probe_prompts(self.model.config.vocab_size, info.max_model_len - self._completion(info))

    def _completion(self, info: BridgeInfo) -> int:
        is_fine = self._precision(info) == "float32" and not self._is_quantised(info)
        return COMPLETION_TOKENS if is_fine else COMPLETION_TOKENS_COARSE

    def _allowed(self, info: BridgeInfo) -> float:
        """Return the largest gap that rounding explains, in nats a token."""
        precision = self._precision(info)
        if self._noise is None:
            return NOISE_LIMIT_QUANTISED if self._is_quantised(info) else NOISE_LIMIT[precision]
        return max(TOLERANCE[precision], min(NOISE_MARGIN * self._noise, GREATEST))

    def _precision(self, info: BridgeInfo) -> str:
        """Return the coarser dtype of the two sides."""
        return max(info.dtype, self._dtype, key=TOLERANCE.__getitem__)

    def _is_quantised(self, info: BridgeInfo) -> bool:
        return info.in_8_bits or bool(getattr(self.model, "is_loaded_in_4bit", False))


def common_gap(world: World, model: Any, probes: list[Probe]) -> float:
    """Return `gap` as rank 0 has it, so that all processes decide alike; all make the passes."""
    own = gap(model, probes)
    return world.lead(lambda: own)


def enlarge(
    model: Any,
    prompts: list[list[int]],
    before: Tensor,
    move: float,
    change: Callable[[float], None],
    world: World | None = None,
) -> None:
    """Make a synthetic change so large that it moves the trainer's own logprobs by `move` nats a token on average.

    `before` are the logprobs without the change. `change` makes it of a size in `RELATIVE_SIZES`, of which the largest
    is used if none is enough.
    """
    for size in RELATIVE_SIZES:
        change(size)
        moved = float((logprobs_of(model, prompts) - before).abs().mean())
        if (world or World()).lead(lambda moved=moved: moved >= move):
            return


# ---------------------------------------------------------------- all weights: shared memory, or sent


class WeightChange(Change):
    """Half the rows of two matrices, of attention and of the MLP, in the first, middle and last layer.

    The server shares the trainer's memory, or is sent all weights: after the context that `writing` returns, in which
    the weights are changed, it has them as the given version. If the weights are sharded over processes, each process
    changes half of the rows that it has.
    """

    fix = f"nothing was trained, and the weights are those of before: restart the server, or {SAME_MODEL}"

    def __init__(
        self,
        model: Any,
        version: int,
        writing: Callable[[int], AbstractContextManager[None]],
        world: World | None = None,
    ) -> None:
        super().__init__(model, version, world)
        self._writing = writing
        self._saved: list[tuple[Tensor, Tensor]] = []  # a changed place, and a copy of its old content

    def deliver(self, stage: Stage) -> Served:
        """Return the present weights, which the server has since `made` ended."""
        served = super().deliver(stage)
        return served if stage == "present" else Served(stage, "change undone", version=self.version)

    @contextmanager
    def made(self, prompts: list[list[int]], move: float) -> Iterator[Served]:
        try:
            with self._writing(PROOF_VERSION):
                before = logprobs_of(self.model, prompts)
                enlarge(self.model, prompts, before, move, self._add_noise, self.world)
            yield Served("synthetic", "synthetic change", version=PROOF_VERSION)
        except BaseException as error:
            if self.world.is_common(error):  # the server may have ended: a run may go on with others
                self._undo()
            raise  # a process that fails alone ends: the others are in another operation than that of `_writing`
        self._undo()

    def _undo(self) -> None:
        """Restore the old weights bit for bit."""
        with self._writing(self.version), torch.no_grad():
            for place, saved in self._saved:
                place.copy_(saved)
            self._saved = []

    def fault(self, served: Served, probes: list[Probe], own: float, allowed: float) -> str:
        if served.stage == "synthetic":
            return UNSEEN if self.distance(probes) <= allowed else MISPLACED
        return STALE if served.stage == "restored" else OTHER_WEIGHTS

    @torch.no_grad()
    def _add_noise(self, size: float) -> None:
        """Add noise of `size` times the matrices' own to the old weights."""
        self._saved = self._saved or [(place, place.clone()) for place in self._places()]
        for index, (place, saved) in enumerate(self._saved):
            generator = torch.Generator(place.device).manual_seed(index)
            noise = torch.randn(saved.shape, generator=generator, device=place.device)
            place.copy_(saved.float() + noise.mul_(size * saved.float().square().mean().sqrt()))

    def _places(self) -> list[Tensor]:
        """Return views of half the rows of the first and last matrix of some layers; of stacked experts, the first.

        Of a sharded matrix a process may have no row.
        """
        found = decoder_layers(self.model)
        layers = self.model.get_submodule(found.name)
        chosen = []
        for index in sorted({0, found.count // 2, found.count - 1}):
            parameters = (each.detach() for each in layers.get_submodule(str(index)).parameters() if each.ndim >= 2)
            matrices = [each.to_local() if isinstance(each, DTensor) else each for each in parameters]
            for matrix in (matrices[0], matrices[-1]):
                rows = matrix.flatten(0, -3)[:1].flatten(0, 1) if matrix.ndim > 2 else matrix
                chosen.append(rows[: -(-len(rows) // 2)])
        return chosen
