"""Drift alarm: check at each step that the samples come from the policy version that they name.

The proof checks the server once, before training. After that, each step compares the samples' logprobs with
those of the forward pass that trains on them. On samples of the present version they differ by rounding only, so
any other fault of the server or of the environment shows there as a gap. Older samples may differ by as much as the
policy has moved since. The comparison needs no extra forward pass, except to find the cause of a large gap.
Replayed experts are checked too: those of another request or another layer would train silently worse.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from grpo_common.errors import Problem
from grpo_trainer.alignment.proof import NOISE_LIMIT
from grpo_trainer.batch.microbatches import MicroBatch, split
from grpo_trainer.config.train import TrainConfig
from grpo_trainer.engine.forward import Forward, evaluating
from grpo_trainer.engine.routing import CHANGED_MAX
from grpo_trainer.errors import DriftError
from grpo_trainer.metrics.types import Mean, Metric, Metrics
from grpo_trainer.model.load import computing_dtype
from grpo_trainer.rollouts.groups import Sample
from vllm_server.protocol.routed_experts import RoutedShape

log = logging.getLogger(__name__)

MARGIN = 5.0
"""The limit is this many times the noise of the proof, which was measured on only tens of tokens of random text."""

MARGIN_QUANTISED = 2.0
"""The same if a side is quantised: its noise is large, and was measured on more tokens."""

CEILING_QUANTISED = 0.5
"""Greatest limit that is derived from the noise if a side is quantised, in nats. With a larger gap the samples are too
far off-policy to learn from, however large the noise was on the proof's random tokens."""

FLOOR = {torch.float32: 0.01, torch.float16: 0.03, torch.bfloat16: 0.1}
"""Least limit that is derived from the noise, in nats. Mean gaps of a healthy run: 1e-6 in float32 on a CPU, 0.004 to
0.02 in bfloat16 on one H200 (0.5B parameters, 150 steps)."""

STALE_LIMIT = 0.3
"""Limit for older samples, in nats: at 0.3 a token's ratio is off by a third, beyond the loss's clip range."""

SAY_EVERY = 20
"""Least number of steps between two log lines about the same cause."""

RECHECKED = 8
RECHECKED_TOKENS = 8192
"""Most sequences, and most tokens in all, that are computed again to find a cause."""


class Cause(Enum):
    """Likely cause of a gap: what it means, and the fix."""

    NOT_FINITE = (
        "logprobs of the samples are not finite",
        "look at train/loss and logprobs/ in metrics.jsonl; lower --lr if they are the trainer's, restart the server "
        "if they are the server's",
    )
    BASE_MODEL = (
        "the samples have the base model's logprobs: the server does not apply the adapter",
        "let the environment ask for the served model's name or `policy_version`; if it does, restart the server",
    )
    TEMPERATURE = (
        "the samples fit at temperature 1: the server's logprobs are raw, or the environment reports a temperature "
        "that it does not sample with",
        "start the server with --logprobs-mode processed_logprobs, and send the temperature that is sampled with",
    )
    ONE_VERSION = (
        "samples of older versions agree with the trainer: the server holds other weights under this one",
        "look at the server's log around the publish of this version; restart the server",
    )
    FRESH = (
        "the server generates with other weights or in another precision than the trainer's, or the environment trains "
        "on tokens that the server did not sample",
        "compare --model-name, --dtype and --seq-len of both sides, and the environment's masks; run the proof again "
        "by restarting the trainer",
    )
    QUANTISATION = (
        "the trainer's base model in 4 bits and the server's now differ too much: the adapter learns to correct "
        "quantisation errors that only the trainer has",
        "omit --load-in-4bit, lower --lr, or raise --drift-limit if the reward still rises",
    )
    COARSE_SERVER = (
        "the server computes in 8 bits, and its samples have moved away from the trainer since the start",
        "lower --lr, leave out --server.quantization and --server.kv-cache-dtype, or raise --drift-limit if the reward "
        "still rises",
    )
    STALE = (
        "the policy has moved away from the older version that sampled",
        "lower --lr, or --max-staleness where the policy moves slowly",
    )
    ROUTING = (
        "replayed experts do not fit their tokens",
        "let the environment send each completion's experts with its tokens, and serve the trainer's model; if the "
        "policy has moved far since, lower --max-staleness",
    )

    def __init__(self, meaning: str, fix: str) -> None:
        self.meaning = meaning
        self.fix = fix


@dataclass(frozen=True)
class SampleGap:
    """One sequence: |trainer - rollout| and KL(rollout, trainer) summed over its trained tokens, in nats.

    `version` None: it names none.
    """

    version: int | None
    tokens: int
    total: float
    divergence: float = 0.0


@dataclass(frozen=True)
class Recheck:
    """Mean |rollout - X| of the rechecked samples."""

    own: float
    """X is the trainer."""
    base: float | None
    """X is the trainer's base model; None: it has no adapter."""
    raw: float | None
    """X is the trainer at temperature 1; None: all samples are at temperature 1."""


UNKNOWN = Recheck(math.inf, None, None)
"""No recheck was possible, so the cause is unknown."""


def row_gaps(microbatch: MicroBatch, trainer_logprobs_N: Tensor) -> Tensor:
    """Return `[B, 4]`: per sequence its version, its number of tokens with a rollout logprob, their gap and KL, summed.

    The result stays on the device; `sample_gaps` reads it once a step.
    """
    known_N = microbatch.has_rollout_N
    gap_N = torch.where(known_N, trainer_logprobs_N.detach() - microbatch.rollout_logprobs_N, 0.0).double()
    rows_B4 = torch.zeros(len(microbatch.versions_B), 4, dtype=torch.float64, device=gap_N.device)
    rows_B4[:, 0] = microbatch.versions_B
    rows_B4[:, 1].index_add_(0, microbatch.rows_N, known_N.double())
    rows_B4[:, 2].index_add_(0, microbatch.rows_N, gap_N.abs())
    divergence_N = gap_N.clamp(max=20.0).expm1() - gap_N  # k3; bounded, since e^800 is no number
    rows_B4[:, 3].index_add_(0, microbatch.rows_N, divergence_N)
    return rows_B4


def sample_gaps(rows: Sequence[Tensor]) -> list[SampleGap]:
    """Return the gap of each sequence that has rollout logprobs, over all microbatches."""
    return [
        SampleGap(None if version < 0 else int(version), int(tokens), total, divergence)
        for version, tokens, total, divergence in (torch.cat(list(rows)).tolist() if rows else ())
        if tokens
    ]


def mean_gap(gaps: Sequence[SampleGap]) -> float:
    """Return the mean gap of all samples, in nats a token; NaN if there are none."""
    tokens = sum(gap.tokens for gap in gaps)
    return sum(gap.total for gap in gaps) / tokens if tokens else math.nan


def gap_metrics(gaps: Sequence[SampleGap], version: int | None) -> dict[str, Metric]:
    """Return mean gaps and KL divergences, on samples of the present version and on older ones, if there are any.

    The cause of the first is rounding, precision and routing; older samples add what the policy has moved since.
    """
    known = [gap for gap in gaps if math.isfinite(gap.total) and None not in (version, gap.version)]
    metrics: dict[str, Metric] = {}
    for fresh, name, divergence in ((True, "", "_fresh"), (False, "_stale", "_stale")):
        some = [gap for gap in known if (gap.version == version) is fresh]
        if tokens := sum(gap.tokens for gap in some):
            metrics[f"train/logprob_gap{name}"] = Mean(sum(gap.total for gap in some), tokens)
            metrics[f"alignment/kl_rollout{divergence}"] = Mean(sum(gap.divergence for gap in some), tokens)
    return metrics


def find_drift(
    gaps: Sequence[SampleGap], version: int | None, limit: float, recheck: Callable[[int], Recheck]
) -> tuple[Cause, list[SampleGap]] | None:
    """Return what is wrong with a step's samples, and which samples; None: nothing.

    `limit` is the largest mean gap that samples of the trainer's version may have, in nats a token. `recheck` computes
    samples of a version again, and is called only if their gap is above the limit.
    """
    if broken := [gap for gap in gaps if not math.isfinite(gap.total)]:
        return Cause.NOT_FINITE, broken
    samples: dict[int, list[SampleGap]] = {}
    for gap in gaps:
        if gap.version is not None:
            samples.setdefault(gap.version, []).append(gap)
    means = {number: mean_gap(some) for number, some in sorted(samples.items())}

    def older_agree(than: int) -> bool:
        """Return whether older samples fit: then the policy has not moved enough to explain a gap."""
        return any(mean <= limit for number, mean in means.items() if number < than)

    if version is not None and means.get(version, 0.0) > limit:
        again = recheck(version)
        near = max(limit, 0.25 * again.own)  # another explanation must fit much better than the trainer
        for cause, other in ((Cause.BASE_MODEL, again.base), (Cause.TEMPERATURE, again.raw)):
            if other is not None and other <= limit and other < near < again.own:
                return cause, samples[version]
        return Cause.ONE_VERSION if older_agree(version) else Cause.FRESH, samples[version]
    for number, mean in means.items():
        if mean > max(limit, STALE_LIMIT):
            return Cause.ONE_VERSION if older_agree(number) else Cause.STALE, samples[number]
    return None


@dataclass(eq=False, repr=False)
class DriftAlarm:
    """Reports a step whose samples are not of the trainer's policy, once per cause within `SAY_EVERY` steps."""

    limit: float
    """Largest mean gap that samples of the present version may have, in nats a token; 0: no limit."""
    on_drift: Literal["warn", "stop"]
    """Stop raises an error, except for a gap on older samples only."""
    bridge: str
    """The bridge's name, for messages."""
    fresh: Cause = Cause.FRESH
    """Cause of a gap on fresh samples that has no other explanation; quantisation, if a side is quantised."""
    _said: dict[Cause, int] = field(default_factory=dict)
    _kept_back: Counter[Cause] = field(default_factory=Counter)

    def check_samples(
        self, step: int, gaps: Sequence[SampleGap], version: int | None, recheck: Callable[[int], Recheck]
    ) -> None:
        """Check the samples of one step, before the weights change.

        Raises:
            DriftError: the gap is above the limit, and `--on-drift` is stop.
        """
        if not self.limit or (found := find_drift(gaps, version, self.limit, recheck)) is None:
            return
        cause, samples = found
        cause = self.fresh if cause is Cause.FRESH else cause
        limit = max(self.limit, STALE_LIMIT) if cause is Cause.STALE else self.limit
        has_size = cause is not Cause.NOT_FINITE
        off = f", {mean_gap(samples):.3g} nats a token off" if has_size else ""
        got = f"{len(samples)} of {len(gaps)} samples, of version {samples[0].version}{off}"
        self._report(step, cause, f"drift on bridge {self.bridge}", got, f"at most {limit:.2g}" if has_size else "")

    def check_routing(self, step: int, metrics: Metrics, shape: RoutedShape) -> None:
        """Check that the trainer would choose most of the replayed experts itself, in each layer and each sequence.

        Near-ties that the server breaks differently are a few of a hundred choices. The limit is half of the share
        that a choice by chance would give.

        Raises:
            DriftError: it would not, and `--on-drift` is stop.
        """
        changed = metrics[CHANGED_MAX].value() if CHANGED_MAX in metrics else 0.0
        limit = 0.5 * (1.0 - shape.top_k / shape.experts)
        if changed > limit:
            got = f"a layer or a sequence in which the trainer would not choose {changed:.0%} of the experts"
            self._report(step, Cause.ROUTING, "routed_experts", got, f"at most {limit:.0%}")

    def _report(self, step: int, cause: Cause, field: str, got: str, wanted: str) -> None:
        problem = Problem(field, got, wanted, cause.fix, cause.meaning)
        if self.on_drift == "stop" and cause is not Cause.STALE:
            raise DriftError.of([problem])
        if cause in self._said and step - self._said[cause] < SAY_EVERY:
            self._kept_back[cause] += 1
            return
        self._said[cause] = step
        before = self._kept_back.pop(cause, 0)
        log.warning("%s%s", problem, f" (and at {before} steps since this was last reported)" if before else "")


def drift_alarm(config: TrainConfig, noise: float | None, model: nn.Module) -> DriftAlarm:
    """Return the alarm that the options ask for.

    The default limit follows from the noise that the bridge proof measured, in nats a token. Without a proof (None) it
    is the largest noise that a proof accepts for a server in bfloat16, or the ceiling of quantised sides.
    """
    in_4_bits, in_8_bits = config.load_in_4bit, config.server.in_8_bits
    quantised = in_4_bits or in_8_bits
    limit = config.drift_limit
    if limit is None:
        floor, margin = FLOOR[computing_dtype(model, config)], MARGIN_QUANTISED if quantised else MARGIN
        limit = NOISE_LIMIT["bfloat16"] if noise is None else max(floor, margin * noise)
        if quantised:
            limit = CEILING_QUANTISED if noise is None else min(limit, CEILING_QUANTISED)
    if limit:
        log.info("drift alarm: limit %.2g nats a token, then %s", limit, config.on_drift)
    fresh = Cause.QUANTISATION if in_4_bits else Cause.COARSE_SERVER if in_8_bits else Cause.FRESH
    return DriftAlarm(limit, config.on_drift, config.weight_bridge_mode, fresh)


@torch.no_grad()
def recheck_version(forward: Forward, sequences: Sequence[Sample], version: int) -> Recheck:
    """Compare a few samples of a version with the base model, and with the trainer at temperature 1.

    The passes run one sequence at a time and keep no activations, because training may have filled the GPU's memory.
    If memory still runs out, the cause stays unknown.
    """
    chosen = beginnings(sequence for sequence in sequences if sequence.version == version)
    if not chosen:
        return UNKNOWN
    disabled: Any = getattr(forward.model, "disable_adapter", None)
    try:
        with evaluating(forward.model):
            own = _mean_difference(forward, chosen)
            with disabled() if disabled else contextlib.nullcontext():
                base = _mean_difference(forward, chosen) if disabled else None
            hot = any(sequence.temperature != 1.0 for sequence in chosen)
            cold = [replace(sequence, temperature=1.0) for sequence in chosen] if hot else []
            raw = _mean_difference(forward, cold) if hot else None
    except torch.OutOfMemoryError:
        return UNKNOWN
    return Recheck(own, base, raw)


def beginnings(sequences: Iterable[Sample]) -> list[Sample]:
    """Return the first few sequences with rollout logprobs, truncated to `RECHECKED_TOKENS` in all.

    Truncation is safe: a token's logprob does not depend on later tokens.
    """
    chosen: list[Sample] = []
    room = RECHECKED_TOKENS
    for sequence in sequences:
        if len(chosen) == RECHECKED:
            break
        trained = int(np.searchsorted(sequence.positions, room))  # trained tokens among those that still fit
        if not trained or sequence.rollout_logprobs is None:
            continue
        chosen.append(replace(sequence.cut(int(sequence.positions[trained - 1]) + 1), teacher=None))
        room -= len(chosen[-1].tokens_T)
    return chosen


def _mean_difference(forward: Forward, sequences: Sequence[Sample]) -> float:
    device = next(forward.model.parameters()).device
    rows = [
        row_gaps(microbatch, forward.scores(microbatch).logprobs_N)
        for microbatch in (one.to(device) for one in split(sequences, size=1, packed=forward.packed))
    ]
    return mean_gap(sample_gaps(rows))
