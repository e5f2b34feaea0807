"""The loss of a microbatch: pure functions of flat tensors, one entry per trained token (suffix `_N`), all in fp32.

Notation: `lp` the trainer's logprob now, `old` the logprob before the first update on this batch, `roll` the one that
the server sampled with, `ref` the reference model's, `A` the advantage.

`LOSSES` of `config/loss.py` is the table of built-in losses. The terms are in `surrogates.py`; the loss is

    sum of weight x (-w x gain + kl_beta x KL)  - entropy_coef x mean entropy  + distill_coef x mean cross-entropy

where w corrects the mismatch of server and trainer. A supervised token (the override `sft`) has -A lp in place of the
bracket, and A = 1. The weight is a token's share in the loss's mean. For every loss, the
entropy's mean is over all tokens of the batch that the policy sampled, and the cross-entropy's over all tokens with a
teacher. A stale sequence with a lower weight (`--on-stale downweight`) has it in each of these means.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from grpo_trainer import import_paths
from grpo_trainer.config.loss import LOSSES, LossConfig, TokenMean
from grpo_trainer.errors import ConfigError
from grpo_trainer.losses import surrogates
from grpo_trainer.losses.surrogates import (
    Correction,
    Segments,
    Surrogate,
    divergence,
    mismatch_correction,
    teacher_cross_entropy,
)
from grpo_trainer.metrics.types import EffectiveShare, Max, Mean, Metric, Sum

if TYPE_CHECKING:
    from grpo_trainer.engine.head import TokenScores

LARGEST_LOG_RATIO = 20.0
"""Limit of a log ratio in `alignment/ess`: one weight of e^20 is as good as infinite there."""


@dataclass(frozen=True)
class LossSpec:
    """What makes a loss; a user's own is an object of this class."""

    ratio: Callable[[Tensor, Tensor, Segments], Tensor]
    """Returns the importance ratio of each token `[N]` from `lp_N`, `old_N` and the segments."""
    surrogate: Callable[[Tensor, Tensor, Tensor, LossConfig], Surrogate]
    """Returns the gain of each token from `ratio_N`, `lp_N`, `advantages_N` and the options."""
    mean: TokenMean
    """Over a sequence's tokens and then over sequences, over all trained tokens of the batch (in all its microbatches),
    or the sum divided by a constant."""


RATIOS = {"token": surrogates.token_ratio, "sequence": surrogates.sequence_ratio}
BUILT_IN = {
    name: LossSpec(RATIOS[loss.ratio], getattr(surrogates, loss.surrogate), loss.mean) for name, loss in LOSSES.items()
}


@dataclass(frozen=True)
class BatchCounts:
    """Denominators of means, counted in the whole batch before any sequence is left out or the batch is split."""

    sequences: int
    trained_tokens: int
    teacher_tokens: int = 0
    supervised_tokens: int = 0

    @property
    def sampled_tokens(self) -> int:
        """Trained tokens that the policy sampled."""
        return self.trained_tokens - self.supervised_tokens


@dataclass(frozen=True, kw_only=True)
class TrainedTokens:
    """What a batch says of the N trained tokens of a microbatch: B sequences, K tokens of a teacher at each token."""

    rows_N: Tensor  # the sequence that a token belongs to
    advantages_N: Tensor  # 1 if supervised
    weights_N: Tensor  # weight of each token in the loss of the whole batch
    shares_N: Tensor  # factor of the token's sequence in means without such weights; below 1 if it is stale
    rollout_logprobs_N: Tensor  # logprob that the server sampled with; 0 where `has_rollout_N` is False
    has_rollout_N: Tensor
    supervised_N: Tensor  # the token is imitated; the policy did not sample it
    teacher_logprobs_NK: Tensor  # -inf where the teacher gave fewer than K tokens; K is 0 if no sequence has a teacher
    versions_B: Tensor  # version of the policy that sampled each sequence; -1: unknown

    @property
    def segments(self) -> Segments:
        """The sequences that the tokens belong to."""
        return Segments(self.rows_N, len(self.versions_B))


@dataclass(frozen=True)
class LossInputs:
    """The loss's inputs for one microbatch."""

    tokens: TrainedTokens
    scores: TokenScores  # under the current policy; the entropy has a gradient if the loss has an entropy bonus
    counts: BatchCounts  # of the whole batch
    old_logprobs_N: Tensor | None = None
    """The trainer's logprobs before the first update on this batch; None: this is it, so they equal the scores'."""
    ref_logprobs_N: Tensor | None = None  # None: there is no reference


@dataclass(frozen=True)
class LossOutput:
    """A microbatch's share of the batch's loss (a scalar to call backward on) and its metrics."""

    loss: Tensor
    metrics: dict[str, Metric]


def loss_spec(name: str) -> LossSpec:
    """Return a loss by its name, or by the import path of the user's own.

    Raises:
        ConfigError: the path names no `LossSpec`.
    """
    if not import_paths.is_import_path(name):
        return BUILT_IN[name]
    found = import_paths.load(name, "--loss")
    if not isinstance(found, LossSpec):
        wanted = "a grpo_trainer.losses.LossSpec"
        raise ConfigError(field="--loss", got=f"{name} is of type {type(found).__name__}", wanted=wanted)
    return found


def token_weight(loss: str, *, length: int, counts: BatchCounts, max_completion_len: int) -> float:
    """Return the weight of each trained token of a sequence; the batch's loss is the weighted sum over all tokens.

    The sequence has `length` trained tokens; `max_completion_len` is the constant of dr_grpo, in tokens.
    """
    match loss_spec(loss).mean:
        case "sequences":
            return 1.0 / (length * counts.sequences)
        case "tokens":
            return 1.0 / counts.trained_tokens
        case "constant":
            return 1.0 / (counts.sequences * max_completion_len)


def batch_loss(inputs: LossInputs, config: LossConfig) -> LossOutput:
    """Return the microbatch's share of the loss that the options describe."""
    spec, lp_N = loss_spec(config.loss), inputs.scores.logprobs_N
    own_N = lp_N.detach() if inputs.old_logprobs_N is None else inputs.old_logprobs_N
    old_N = own_N
    if config.ratio_against == "rollout":
        old_N = torch.where(inputs.tokens.has_rollout_N, inputs.tokens.rollout_logprobs_N, own_N)
    ratio_N = spec.ratio(lp_N, old_N, inputs.tokens.segments)
    surrogate = spec.surrogate(ratio_N, lp_N, inputs.tokens.advantages_N, config)
    correction = mismatch_correction(
        own_N,
        inputs.tokens.rollout_logprobs_N,
        inputs.tokens.has_rollout_N,
        inputs.tokens.segments,
        kind=config.correction,
        level=config.is_level,
        cap=config.is_cap,
    )
    policy_N = torch.where(inputs.tokens.supervised_N, 0.0, -correction.weights_N * surrogate.gain_N)
    parts = {"policy": (inputs.tokens.weights_N * policy_N).sum(), **_other_parts(inputs, ratio_N, config)}
    with torch.no_grad():
        metrics = {
            **_policy_metrics(inputs, ratio_N, surrogate),
            **_correction_metrics(inputs, correction, config),
            **_gap_metrics(inputs),
            **_reference_metrics(inputs),
            **{f"loss/{name}": Sum(part.detach()) for name, part in parts.items()},
        }
    return LossOutput(torch.stack(list(parts.values())).sum(), metrics)


def _other_parts(inputs: LossInputs, ratio_N: Tensor, config: LossConfig) -> dict[str, Tensor]:
    """Return the parts of the loss besides the policy's, only those that the options ask for."""
    lp_N, weights_N = inputs.scores.logprobs_N, inputs.tokens.weights_N
    imitated_N = torch.where(inputs.tokens.supervised_N, inputs.tokens.advantages_N * lp_N, 0.0)
    parts = {"supervised": -(weights_N * imitated_N).sum()}
    if config.kl_beta and inputs.ref_logprobs_N is not None:
        kl_N = divergence(lp_N, inputs.ref_logprobs_N, config.kl_estimator) * (ratio_N if config.kl_unbiased else 1.0)
        parts["kl"] = config.kl_beta * (weights_N * torch.where(inputs.tokens.supervised_N, 0.0, kl_N)).sum()
    if config.entropy_coef:
        entropy_N = torch.where(inputs.tokens.supervised_N, 0.0, inputs.tokens.shares_N * inputs.scores.entropy_N)
        parts["entropy"] = -config.entropy_coef * entropy_N.sum() / max(1, inputs.counts.sampled_tokens)
    if config.distill_coef and inputs.counts.teacher_tokens:
        cross_N = teacher_cross_entropy(
            inputs.scores.others_NK, inputs.tokens.teacher_logprobs_NK, config.distill_temperature
        )
        shared = (inputs.tokens.shares_N * cross_N).sum()
        parts["distillation"] = config.distill_coef * shared / inputs.counts.teacher_tokens
    return parts


def _policy_metrics(inputs: LossInputs, ratio_N: Tensor, surrogate: Surrogate) -> dict[str, Metric]:
    """Return metrics of the tokens that the policy sampled; supervised tokens have no ratio."""
    sampled_N = ~inputs.tokens.supervised_N
    count = sampled_N.sum()
    low, high = (surrogate.low_N & sampled_N).sum(), (surrogate.high_N & sampled_N).sum()
    ratio_N = torch.where(sampled_N, ratio_N, 0.0)
    tokens = ratio_N.numel()
    return {
        "grpo/mean_ratio": Mean(ratio_N.sum(), count),
        "grpo/max_ratio": Max(ratio_N.max() if tokens else 0.0),
        "grpo/clipped_fraction": Mean(low + high, count),
        "grpo/clipped_low": Mean(low, count),
        "grpo/clipped_high": Mean(high, count),
        "grpo/entropy": Mean(torch.where(sampled_N, inputs.scores.entropy_N.detach(), 0.0).sum(), count),
        "logprobs/trainer_mean": Mean(inputs.scores.logprobs_N.sum(), tokens),
    }


def _correction_metrics(inputs: LossInputs, correction: Correction, config: LossConfig) -> dict[str, Metric]:
    """Return the mean weight of the tokens that have one, and the share of them whose weight is truncated or masked."""
    if config.correction == "none":
        return {}
    known_N = inputs.tokens.has_rollout_N
    count = known_N.sum()
    return {
        "correction/weight_mean": Mean(torch.where(known_N, correction.weights_N, 0.0).sum(), count),
        "correction/clipped_fraction": Mean((correction.cut_N & known_N).sum(), count),
    }


def _gap_metrics(inputs: LossInputs) -> dict[str, Metric]:
    """Return the gap between the trainer's and the server's logprobs."""
    known_N = inputs.tokens.has_rollout_N
    count = known_N.sum()
    gap_N = torch.where(known_N, inputs.tokens.rollout_logprobs_N - inputs.scores.logprobs_N, 0.0)
    old_N = inputs.scores.logprobs_N if inputs.old_logprobs_N is None else inputs.old_logprobs_N
    ratio_N = (old_N - inputs.tokens.rollout_logprobs_N).clamp(max=LARGEST_LOG_RATIO).double().exp()
    ratio_N = torch.where(known_N, ratio_N, 0.0)
    return {
        "logprobs/rollout_mean": Mean(torch.where(known_N, inputs.tokens.rollout_logprobs_N, 0.0).sum(), count),
        "alignment/logprob_diff_mean": Mean(gap_N.abs().sum(), count),
        "alignment/logprob_diff_max": Max(gap_N.abs().max() if gap_N.numel() else 0.0),
        "alignment/kl_rollout": Mean(divergence(gap_N, torch.zeros_like(gap_N), "k3").sum(), count),
        "alignment/ess": EffectiveShare(ratio_N.sum(), ratio_N.square().sum(), count),
    }


def _reference_metrics(inputs: LossInputs) -> dict[str, Metric]:
    """Return the policy's KL divergence from the reference, by k3 whichever estimator the loss uses."""
    if inputs.ref_logprobs_N is None:
        return {}
    sampled_N = ~inputs.tokens.supervised_N
    kl_N = divergence(inputs.scores.logprobs_N, inputs.ref_logprobs_N, "k3")
    return {"alignment/kl_reference": Mean(torch.where(sampled_N, kl_N, 0.0).sum(), sampled_N.sum())}
