"""Drift alarm: do the samples come from the weights that the trainer believes the server generates with?

The proof shows it once, before training. From then on each step compares the logprobs that came with the samples with
those of the forward pass that trains on them. On samples of the present version they differ by rounding only; whatever
else happens to a server or on the way from it shows as a gap there. Older samples may differ by as much as the policy
has moved since. Nothing is computed for it, but when there is something to explain.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from grpo_common.errors import Problem
from grpo_trainer.batch.microbatches import MicroBatch, TrainingSequence, split
from grpo_trainer.config.train import TrainConfig
from grpo_trainer.errors import DriftError
from grpo_trainer.metrics.types import Mean, Metric
from grpo_trainer.model.forward import Forward, evaluating
from grpo_trainer.weights.proof import NOISE_LIMIT, NOISE_LIMIT_4BIT

log = logging.getLogger(__name__)

MARGIN = 5.0
"""The gap of a step may be this many times the noise that the proof measured: it had tens of tokens, of random text."""

MARGIN_4BIT = 2.0
"""The same where the base model is in 4 bits: its noise is large, and not of rounding."""

FLOOR = {"float32": 0.01, "float16": 0.03, "bfloat16": 0.1}
"""No limit that is derived lies below this, in nats. Mean gaps of a healthy run: 1e-6 in float32 on a CPU, 0.004 to
0.02 in bfloat16 on one H200 (0.5B parameters, 150 steps)."""

STALE_LIMIT = 0.3
"""Older samples may be this far off, in nats: at 0.3 a token's ratio is off by a third, beyond the clip of the loss."""

SAY_EVERY = 20
"""Steps between two lines about the same cause."""

RECHECKED = 8
RECHECKED_TOKENS = 8192
"""Sequences that are looked at once more to find the cause, and their tokens in all."""


class Cause(StrEnum):
    """What a gap looks like."""

    NOT_FINITE = "not finite"
    BASE_MODEL = "base model"
    TEMPERATURE = "temperature"
    ONE_VERSION = "one version"
    FRESH = "fresh samples"
    QUANTISATION = "quantisation"
    STALE = "stale samples"


@dataclass(frozen=True)
class SampleGap:
    """One sequence: |trainer - rollout| summed over its trained tokens, in nats; `version` None: it brought none."""

    version: int | None
    tokens: int
    total: float


@dataclass(frozen=True)
class Gap:
    """The mean gap of several samples, in nats a token; NaN without any."""

    mean: float
    samples: int
    tokens: int


@dataclass(frozen=True)
class Recheck:
    """Mean |rollout - X| of the rechecked samples: X the trainer; its base model; the trainer at temperature 1."""

    own: float
    base: float | None
    raw: float | None


@dataclass(frozen=True)
class Finding:
    """Why the alarm goes off."""

    cause: Cause
    gap: Gap
    version: int | None


def row_gaps(microbatch: MicroBatch, trainer_logprobs_N: Tensor) -> Tensor:
    """`[B, 3]`, one row for each sequence: its version, its tokens with a known rollout logprob, the sum of their gaps.

    Stays on the device: it is read once a step, by `sample_gaps`.
    """
    known_N = microbatch.has_rollout_N
    gap_N = torch.where(known_N, (trainer_logprobs_N.detach() - microbatch.rollout_logprobs_N).abs(), 0.0)
    rows_B3 = torch.zeros(len(microbatch.versions_B), 3, dtype=torch.float64, device=gap_N.device)
    rows_B3[:, 0] = microbatch.versions_B
    rows_B3[:, 1].index_add_(0, microbatch.rows_N, known_N.double())
    rows_B3[:, 2].index_add_(0, microbatch.rows_N, gap_N.double())
    return rows_B3


def sample_gaps(rows: Sequence[Tensor]) -> list[SampleGap]:
    """The sequences of all microbatches that brought logprobs."""
    return [
        SampleGap(None if version < 0 else int(version), int(tokens), total)
        for version, tokens, total in (torch.cat(list(rows)).tolist() if rows else ())
        if tokens
    ]


def pooled(gaps: Sequence[SampleGap]) -> Gap:
    """Of all of them together, the mean per token."""
    tokens = sum(gap.tokens for gap in gaps)
    return Gap(sum(gap.total for gap in gaps) / tokens if tokens else math.nan, len(gaps), tokens)


def gap_metrics(gaps: Sequence[SampleGap], version: int | None) -> dict[str, Metric]:
    """Mean gap on samples of the present version, and on older ones; without any of a kind it is left out."""
    finite = [gap for gap in gaps if math.isfinite(gap.total) and None not in (version, gap.version)]
    kinds = {
        "train/logprob_gap": [gap for gap in finite if gap.version == version],
        "train/logprob_gap_stale": [gap for gap in finite if gap.version != version],
    }
    return {
        key: Mean(sum(gap.total for gap in some), sum(gap.tokens for gap in some))
        for key, some in kinds.items()
        if some
    }


def find_drift(
    gaps: Sequence[SampleGap], version: int | None, limit: float, recheck: Callable[[int], Recheck]
) -> Finding | None:
    """What is wrong with a step's samples, if anything.

    Args:
        version: the trainer's.
        limit: mean gap that samples of this version may have, in nats a token.
        recheck: looks again at samples of a version; called only when their gap is above the limit.
    """
    if broken := [gap for gap in gaps if not math.isfinite(gap.total)]:
        return Finding(Cause.NOT_FINITE, replace(pooled(broken), mean=math.nan), broken[0].version)
    known = sorted({gap.version for gap in gaps if gap.version is not None})
    by_version = {number: pooled([gap for gap in gaps if gap.version == number]) for number in known}
    fresh = by_version.get(version) if version is not None else None
    if fresh is not None and fresh.mean > limit:
        return Finding(_explain(by_version, fresh, version, limit, recheck), fresh, version)
    for number, gap in by_version.items():
        if gap.mean > max(limit, STALE_LIMIT):
            older_agree = any(by_version[older].mean <= limit for older in known if older < number)
            return Finding(Cause.ONE_VERSION if older_agree else Cause.STALE, gap, number)
    return None


def _explain(
    by_version: dict[int, Gap], fresh: Gap, version: int | None, limit: float, recheck: Callable[[int], Recheck]
) -> Cause:
    """What a gap on samples of the present version comes from."""
    assert version is not None
    again = recheck(version)
    near = max(limit, 0.25 * again.own)  # of two explanations the nearer one must be much nearer
    if again.base is not None and again.base <= limit and again.base < near < again.own:
        return Cause.BASE_MODEL
    if again.raw is not None and again.raw <= limit and again.raw < near < again.own:
        return Cause.TEMPERATURE
    if any(gap.mean <= limit for number, gap in by_version.items() if number < version):
        return Cause.ONE_VERSION  # the policy has not moved that far since the older ones: it can't be that
    return Cause.FRESH


MEANING = {
    Cause.NOT_FINITE: (
        "logprobs of the samples are not finite",
        "look at train/loss and logprobs/ in metrics.jsonl; lower --lr if they are the trainer's, restart the server "
        "if they are the server's",
    ),
    Cause.BASE_MODEL: (
        "the samples have the base model's logprobs: the server does not apply the adapter",
        "let the environment ask for the served model's name or `policy_version`; if it does, restart the server",
    ),
    Cause.TEMPERATURE: (
        "the samples fit at temperature 1: the server's logprobs are raw, or the environment reports a temperature "
        "that it does not sample with",
        "start the server with --logprobs-mode processed_logprobs, and send the temperature that is sampled with",
    ),
    Cause.ONE_VERSION: (
        "samples of older versions agree with the trainer: the server holds other weights under this one",
        "look at the server's log around the publish of this version; restart the server",
    ),
    Cause.FRESH: (
        "the server generates with other weights or in another precision than the trainer's, or the environment trains "
        "on tokens that the server did not sample",
        "compare --model-name, --dtype and --seq-len of both sides, and the environment's masks; run the proof again "
        "by restarting the trainer",
    ),
    Cause.QUANTISATION: (
        "the trainer's base model in 4 bits has come to differ that much from the server's: the adapter learns to mend "
        "what only the trainer's model needs",
        "leave --load-in-4bit out, lower --lr, or raise --drift-limit if the reward still rises",
    ),
    Cause.STALE: (
        "the policy has moved away from the older version that sampled",
        "lower --lr, or --max-staleness where the policy moves slowly",
    ),
}
"""What each cause means, and what to do."""


class DriftAlarm:
    """Says when a step's samples are not of the trainer's policy; one line per cause within `SAY_EVERY` steps.

    Args:
        limit: mean gap that samples of the present version may have, in nats a token.
        on_drift: "stop" raises, but for samples that are merely old.
        bridge: the bridge's name, for messages.
        in_4_bits: the trainer holds its base model so, the server does not: what has no other cause is that.
    """

    def __init__(
        self, limit: float, on_drift: Literal["warn", "stop"], bridge: str, *, in_4_bits: bool = False
    ) -> None:
        self.limit = limit
        self._on_drift = on_drift
        self._bridge = bridge
        self._in_4_bits = in_4_bits
        self._said: dict[Cause, int] = {}
        self._kept_back: dict[Cause, int] = {}

    def look(
        self, step: int, gaps: Sequence[SampleGap], version: int | None, recheck: Callable[[int], Recheck]
    ) -> None:
        """Look at the samples of one step, before the weights change.

        Raises:
            DriftError: they are off, and `--on-drift` is stop.
        """
        finding = find_drift(gaps, version, self.limit, recheck)
        if finding is None:
            return
        if finding.cause is Cause.FRESH and self._in_4_bits:
            finding = replace(finding, cause=Cause.QUANTISATION)
        if self._on_drift == "stop" and finding.cause is not Cause.STALE:
            raise DriftError.of([self._problem(finding, len(gaps))])
        cause = finding.cause
        if cause in self._said and step - self._said[cause] < SAY_EVERY:
            self._kept_back[cause] = self._kept_back.get(cause, 0) + 1
            return
        self._said[cause] = step
        before = self._kept_back.pop(cause, 0)
        more = f" (and at {before} steps since it was last said)" if before else ""
        log.warning("%s%s", self._problem(finding, len(gaps)), more)

    def _problem(self, finding: Finding, samples: int) -> Problem:
        meaning, fix = MEANING[finding.cause]
        limit = max(self.limit, STALE_LIMIT) if finding.cause is Cause.STALE else self.limit
        gap = finding.gap
        off = "" if math.isnan(gap.mean) else f", {gap.mean:.3g} nats a token off"
        return Problem(
            field=f"drift on bridge {self._bridge}",
            got=f"{gap.samples} of {samples} samples, of version {finding.version}{off}",
            wanted=f"at most {limit:.2g}" if off else "",
            fix=fix,
            summary=meaning,
        )


def drift_alarm(config: TrainConfig, noise: float | None, model: nn.Module) -> DriftAlarm | None:
    """The alarm that the options ask for; None: it is off.

    Args:
        noise: what the bridge proof measured, in nats a token; None: it was skipped.
    """
    limit = config.drift.drift_limit
    in_4_bits = config.model.load_in_4bit
    if limit is None:
        dtype = str(getattr(model, "dtype", torch.float32)).removeprefix("torch.")
        limit = default_limit(noise, dtype, in_4_bits=in_4_bits)
    if limit == 0:
        return None
    log.info("drift alarm: limit %.2g nats a token, then %s", limit, config.drift.on_drift)
    return DriftAlarm(limit, config.drift.on_drift, config.bridge.mode, in_4_bits=in_4_bits)


def default_limit(noise: float | None, dtype: str, *, in_4_bits: bool) -> float:
    """The limit that follows from the measured noise, in nats a token.

    Without a measurement it is what the proof would let pass at most, bfloat16 on the server's side assumed.
    """
    if noise is None:
        return NOISE_LIMIT_4BIT if in_4_bits else NOISE_LIMIT["bfloat16"]
    return max(FLOOR[dtype], (MARGIN_4BIT if in_4_bits else MARGIN) * noise)


UNKNOWN = Recheck(math.inf, None, None)
"""Nothing is known of the cause."""


def not_rechecked(version: int) -> Recheck:
    """Where the trainer can't compute by itself."""
    return UNKNOWN


@torch.no_grad()
def recheck_version(forward: Forward, sequences: Sequence[TrainingSequence], version: int) -> Recheck:
    """Compare a few samples of a version with the base model, and with the trainer at temperature 1.

    One sequence at a time, by the passes that train, without what those keep: the GPU may be full of what training
    holds. If it still lacks memory, the cause stays unknown.
    """
    chosen = beginnings([s for s in sequences if s.version == version and s.rollout_logprobs is not None])
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


def beginnings(sequences: Iterable[TrainingSequence]) -> list[TrainingSequence]:
    """The first few, of `RECHECKED_TOKENS` at most; a token's logprob does not depend on what comes after it."""
    chosen: list[TrainingSequence] = []
    room = RECHECKED_TOKENS
    for sequence in sequences:
        if len(chosen) == RECHECKED:
            break
        trained = int(np.searchsorted(sequence.positions, room))  # of the tokens for which there is room
        if trained:
            chosen.append(_cut(sequence, trained))
            room -= len(chosen[-1].tokens_T)
    return chosen


def _cut(sequence: TrainingSequence, trained: int) -> TrainingSequence:
    """Up to its so many-th trained token; without a teacher."""
    assert sequence.rollout_logprobs is not None
    return replace(
        sequence,
        tokens_T=sequence.tokens_T[: sequence.positions[trained - 1] + 1],
        positions=sequence.positions[:trained],
        advantages=sequence.advantages[:trained],
        rollout_logprobs=sequence.rollout_logprobs[:trained],
        teacher=None,
    )


def _mean_difference(forward: Forward, sequences: Sequence[TrainingSequence]) -> float:
    device = next(forward.model.parameters()).device
    rows = [
        row_gaps(microbatch, forward.scores(microbatch).logprobs_N)
        for microbatch in (one.to(device) for one in split(sequences, size=1, packed=forward.packed))
    ]
    return pooled(sample_gaps(rows)).mean
