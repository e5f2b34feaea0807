"""Drift alarm: check at each step that the samples come from the policy version that they name.

The proof checks the server once, before training. After that, each step compares the samples' logprobs with
those of the forward pass that trains on them. On samples of the present version they differ by rounding only, so
any other fault of the server or of the environment shows there as a gap. Older samples may differ by as much as the
policy has moved since. The comparison needs no extra forward pass, except to find the cause of a large gap.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from grpo_common.errors import Problem
from grpo_trainer.alignment.proof import NOISE_LIMIT
from grpo_trainer.batch.microbatches import MicroBatch, TrainingSequence, split
from grpo_trainer.config.train import TrainConfig
from grpo_trainer.engine.forward import Forward, evaluating
from grpo_trainer.errors import DriftError
from grpo_trainer.metrics.types import Mean, Metric

log = logging.getLogger(__name__)

MARGIN = 5.0
"""The limit is this many times the noise of the proof, which was measured on only tens of tokens of random text."""

MARGIN_QUANTISED = 2.0
"""The same if a side is quantised: its noise is large, and was measured on more tokens."""

CEILING_QUANTISED = 0.5
"""Greatest limit that is derived from the noise if a side is quantised, in nats. With a larger gap the samples are too
far off-policy to learn from, however large the noise was on the proof's random tokens."""

FLOOR = {"float32": 0.01, "float16": 0.03, "bfloat16": 0.1}
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

    @property
    def meaning(self) -> str:
        return self.value[0]

    @property
    def fix(self) -> str:
        return self.value[1]


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
    """Mean |rollout - X| of the rechecked samples.

    Attributes:
        own: X is the trainer.
        base: X is the trainer's base model; None: it has no adapter.
        raw: X is the trainer at temperature 1; None: all samples are at temperature 1.
    """

    own: float
    base: float | None
    raw: float | None


@dataclass(frozen=True)
class Finding:
    """The reason for an alarm: the samples of a version, and their mean gap in nats a token, NaN if not finite."""

    cause: Cause
    version: int | None
    samples: int
    gap: float

    @classmethod
    def of(cls, cause: Cause, gaps: Sequence[SampleGap]) -> Finding:
        return cls(cause, gaps[0].version, len(gaps), mean_gap(gaps) if cause is not Cause.NOT_FINITE else math.nan)


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
    rows_B4[:, 3].index_add_(
        0, microbatch.rows_N, gap_N.clamp(max=20.0).expm1() - gap_N
    )  # k3; bounded, since e^800 is no number
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
    finite = [gap for gap in gaps if math.isfinite(gap.total) and None not in (version, gap.version)]
    kinds = {
        "": [gap for gap in finite if gap.version == version],
        "_stale": [gap for gap in finite if gap.version != version],
    }
    metrics: dict[str, Metric] = {}
    for kind, some in kinds.items():
        if tokens := sum(gap.tokens for gap in some):
            metrics[f"train/logprob_gap{kind}"] = Mean(sum(gap.total for gap in some), tokens)
            metrics[f"alignment/kl_rollout{kind or '_fresh'}"] = Mean(sum(gap.divergence for gap in some), tokens)
    return metrics


def find_drift(
    gaps: Sequence[SampleGap], version: int | None, limit: float, recheck: Callable[[int], Recheck]
) -> Finding | None:
    """Return what is wrong with a step's samples, or None.

    Args:
        version: the trainer's version.
        limit: largest mean gap that samples of this version may have, in nats a token.
        recheck: computes samples of a version again; called only if their gap is above the limit.
    """
    if broken := [gap for gap in gaps if not math.isfinite(gap.total)]:
        return Finding.of(Cause.NOT_FINITE, broken)
    known = sorted({gap.version for gap in gaps if gap.version is not None})
    samples = {number: [gap for gap in gaps if gap.version == number] for number in known}
    means = {number: mean_gap(some) for number, some in samples.items()}
    if version is not None and means.get(version, 0.0) > limit:
        older_agree = any(mean <= limit for number, mean in means.items() if number < version)
        return Finding.of(_explain(recheck(version), limit, older_agree=older_agree), samples[version])
    for number, mean in means.items():
        if mean > max(limit, STALE_LIMIT):
            older_agree = any(means[older] <= limit for older in known if older < number)
            return Finding.of(Cause.ONE_VERSION if older_agree else Cause.STALE, samples[number])
    return None


def _explain(again: Recheck, limit: float, *, older_agree: bool) -> Cause:
    """Return the cause of a gap on samples of the present version."""
    near = max(limit, 0.25 * again.own)  # another explanation must fit much better than the trainer
    for cause, other in ((Cause.BASE_MODEL, again.base), (Cause.TEMPERATURE, again.raw)):
        if other is not None and other <= limit and other < near < again.own:
            return cause
    # If older samples fit, the policy has not moved enough to explain this gap.
    return Cause.ONE_VERSION if older_agree else Cause.FRESH


class DriftAlarm:
    """Reports a step whose samples are not of the trainer's policy, once per cause within `SAY_EVERY` steps.

    Args:
        limit: largest mean gap that samples of the present version may have, in nats a token.
        on_drift: "stop" raises an error, except for a gap on older samples only.
        bridge: the bridge's name, for messages.
        in_4_bits: the trainer has its base model in 4 bits and the server does not, so a gap without another cause is
            due to quantisation.
        in_8_bits: the server has weights or KV cache in 8 bits, which explains such a gap as well.
    """

    def __init__(
        self,
        limit: float,
        on_drift: Literal["warn", "stop"],
        bridge: str,
        *,
        in_4_bits: bool = False,
        in_8_bits: bool = False,
    ) -> None:
        self.limit = limit
        self._on_drift = on_drift
        self._bridge = bridge
        self._coarse = Cause.QUANTISATION if in_4_bits else Cause.COARSE_SERVER if in_8_bits else None
        self._said: dict[Cause, int] = {}
        self._kept_back: Counter[Cause] = Counter()

    def look(
        self, step: int, gaps: Sequence[SampleGap], version: int | None, recheck: Callable[[int], Recheck]
    ) -> None:
        """Check the samples of one step, before the weights change.

        Raises:
            DriftError: the gap is above the limit, and `--on-drift` is stop.
        """
        finding = find_drift(gaps, version, self.limit, recheck)
        if finding is None:
            return
        if finding.cause is Cause.FRESH and self._coarse is not None:
            finding = replace(finding, cause=self._coarse)
        if self._on_drift == "stop" and finding.cause is not Cause.STALE:
            raise DriftError.of([self._problem(finding, len(gaps))])
        cause = finding.cause
        if cause in self._said and step - self._said[cause] < SAY_EVERY:
            self._kept_back[cause] += 1
            return
        self._said[cause] = step
        before = self._kept_back.pop(cause, 0)
        more = f" (and at {before} steps since this was last reported)" if before else ""
        log.warning("%s%s", self._problem(finding, len(gaps)), more)

    def _problem(self, finding: Finding, samples: int) -> Problem:
        limit = max(self.limit, STALE_LIMIT) if finding.cause is Cause.STALE else self.limit
        off = "" if math.isnan(finding.gap) else f", {finding.gap:.3g} nats a token off"
        return Problem(
            field=f"drift on bridge {self._bridge}",
            got=f"{finding.samples} of {samples} samples, of version {finding.version}{off}",
            wanted=f"at most {limit:.2g}" if off else "",
            fix=finding.cause.fix,
            summary=finding.cause.meaning,
        )


def drift_alarm(config: TrainConfig, noise: float | None, model: nn.Module) -> DriftAlarm | None:
    """Return the alarm that the options ask for; None: it is off.

    Args:
        noise: the noise that the bridge proof measured, in nats a token; None: the proof was skipped.
    """
    limit = config.drift.drift_limit
    in_4_bits, in_8_bits = config.model.load_in_4bit, config.vllm.in_8_bits
    if limit is None:
        dtype = str(getattr(model, "dtype", torch.float32)).removeprefix("torch.")
        limit = default_limit(noise, dtype, quantised=in_4_bits or in_8_bits)
    if limit == 0:
        return None
    log.info("drift alarm: limit %.2g nats a token, then %s", limit, config.drift.on_drift)
    return DriftAlarm(limit, config.drift.on_drift, config.bridge.mode, in_4_bits=in_4_bits, in_8_bits=in_8_bits)


def default_limit(noise: float | None, dtype: str, *, quantised: bool) -> float:
    """Return the limit that follows from the measured noise, in nats a token.

    Without a measurement, the limit is the largest noise that the proof accepts for a server in bfloat16, or the
    ceiling of quantised sides.
    """
    if noise is None:
        return CEILING_QUANTISED if quantised else NOISE_LIMIT["bfloat16"]
    limit = max(FLOOR[dtype], (MARGIN_QUANTISED if quantised else MARGIN) * noise)
    return min(limit, CEILING_QUANTISED) if quantised else limit


UNKNOWN = Recheck(math.inf, None, None)
"""No recheck was possible, so the cause is unknown."""


def not_rechecked(version: int) -> Recheck:
    """Return `UNKNOWN`: a process that holds only a shard can't compute a forward pass alone."""
    return UNKNOWN


@torch.no_grad()
def recheck_version(forward: Forward, sequences: Sequence[TrainingSequence], version: int) -> Recheck:
    """Compare a few samples of a version with the base model, and with the trainer at temperature 1.

    The passes run one sequence at a time and keep no activations, because training may have filled the GPU's memory.
    If memory still runs out, the cause stays unknown.
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
    """Return the first few sequences, truncated to `RECHECKED_TOKENS` in all.

    Truncation is safe: a token's logprob does not depend on later tokens.
    """
    chosen: list[TrainingSequence] = []
    room = RECHECKED_TOKENS
    for sequence in sequences:
        if len(chosen) == RECHECKED:
            break
        trained = int(np.searchsorted(sequence.positions, room))  # trained tokens among those that still fit
        if trained:
            chosen.append(_cut(sequence, trained))
            room -= len(chosen[-1].tokens_T)
    return chosen


def _cut(sequence: TrainingSequence, trained: int) -> TrainingSequence:
    """Return the sequence truncated after its first `trained` trained tokens, without a teacher's logprobs."""
    assert sequence.rollout_logprobs is not None
    return replace(
        sequence,
        tokens_T=sequence.tokens_T[: sequence.positions[trained - 1] + 1],
        positions=sequence.positions[:trained],
        advantages=sequence.advantages[:trained],
        rollout_logprobs=sequence.rollout_logprobs[:trained],
        teacher=None,
        masks=None if sequence.masks is None else sequence.masks.at(slice(0, trained)),
    )


def _mean_difference(forward: Forward, sequences: Sequence[TrainingSequence]) -> float:
    device = next(forward.model.parameters()).device
    rows = [
        row_gaps(microbatch, forward.scores(microbatch).logprobs_N)
        for microbatch in (one.to(device) for one in split(sequences, size=1, packed=forward.packed))
    ]
    return mean_gap(sample_gaps(rows))
