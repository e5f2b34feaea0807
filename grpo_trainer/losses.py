"""Policy losses: pure functions of flat tensors, one entry per trained token (suffix `_N`), all in fp32.

Notation: `lp` the trainer's logprob now, `old` the logprob before the first update on this batch, `A` the advantage,
`ratio = exp(lp - old)`.

| name | mean over tokens | source |
|---|---|---|
| grpo | within a sequence, then over sequences | DeepSeekMath, arXiv 2402.03300 |
| dapo | over all trained tokens of the batch | DAPO, arXiv 2503.14476 |
| dr_grpo | sum over tokens / (sequences x longest allowed completion) | Dr. GRPO, arXiv 2503.20783 |

The surrogate is PPO's (arXiv 1707.06347): `-min(ratio A, clip(ratio, 1 - eps_low, 1 + eps_high) A)`, for either sign of
A; `eps_high > eps_low` is DAPO's clip-higher.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from grpo_trainer.metrics.types import Max, Mean, Metric

LossName = Literal["grpo", "dapo", "dr_grpo"]


@dataclass(frozen=True)
class LossInputs:
    """What a loss sees of one microbatch, N trained tokens.

    Attributes:
        trainer_logprobs_N: of the current policy, with gradient.
        entropy_N: of the current policy at each position, without gradient.
        rollout_logprobs_N, has_rollout_N: what the server sampled with, where it is known.
        advantages_N, weights_N: as in `batching.MicroBatch`.
    """

    trainer_logprobs_N: Tensor
    entropy_N: Tensor
    rollout_logprobs_N: Tensor
    has_rollout_N: Tensor
    advantages_N: Tensor
    weights_N: Tensor


@dataclass(frozen=True)
class LossOutput:
    """A microbatch's share of the batch's loss (a scalar to call backward on) and its metrics."""

    loss: Tensor
    metrics: dict[str, Metric]


def token_weight(loss: LossName, *, length: int, sequences: int, trained_tokens: int, max_completion_len: int) -> float:
    """The weight of each trained token of one sequence, so that the batch's loss is the weighted sum over its tokens.

    Args:
        length: trained tokens of the sequence.
        sequences: sequences of the whole batch, skipped and empty ones included.
        trained_tokens: of the whole batch, likewise.
        max_completion_len: the constant of dr_grpo, in tokens.
    """
    match loss:
        case "grpo":
            return 1.0 / (length * sequences)
        case "dapo":
            return 1.0 / trained_tokens
        case "dr_grpo":
            return 1.0 / (sequences * max_completion_len)


def old_logprobs(inputs: LossInputs, against: Literal["rollout", "trainer"]) -> Tensor:
    """What the ratio is taken against, without gradient.

    With one update per batch the trainer's logprobs before the update are those of this very forward pass; they stand
    in wherever the server's are not known.
    """
    own = inputs.trainer_logprobs_N.detach()
    return torch.where(inputs.has_rollout_N, inputs.rollout_logprobs_N, own) if against == "rollout" else own


def policy_loss(inputs: LossInputs, old_N: Tensor, eps_low: float, eps_high: float) -> LossOutput:
    """The clipped surrogate, summed with the batch's weights."""
    ratio_N = torch.exp(inputs.trainer_logprobs_N - old_N)
    clipped_N = ratio_N.clamp(1.0 - eps_low, 1.0 + eps_high)
    gain_N = torch.minimum(ratio_N * inputs.advantages_N, clipped_N * inputs.advantages_N)
    loss = -(inputs.weights_N * gain_N).sum()
    with torch.no_grad():
        metrics = _metrics(inputs, ratio_N, eps_low, eps_high)
    return LossOutput(loss, metrics)


def _metrics(inputs: LossInputs, ratio_N: Tensor, eps_low: float, eps_high: float) -> dict[str, Metric]:
    tokens = ratio_N.numel()
    low = ((ratio_N < 1.0 - eps_low) & (inputs.advantages_N < 0)).sum()  # where clipping takes the gradient away
    high = ((ratio_N > 1.0 + eps_high) & (inputs.advantages_N > 0)).sum()
    metrics: dict[str, Metric] = {
        "grpo/mean_ratio": Mean(ratio_N.sum(), tokens),
        "grpo/max_ratio": Max(ratio_N.max() if tokens else 0.0),
        "grpo/clipped_fraction": Mean(low + high, tokens),
        "grpo/clipped_low": Mean(low, tokens),
        "grpo/clipped_high": Mean(high, tokens),
        "grpo/entropy": Mean(inputs.entropy_N.sum(), tokens),
        "logprobs/trainer_mean": Mean(inputs.trainer_logprobs_N.sum(), tokens),
    }
    known = inputs.has_rollout_N
    count = known.sum()
    gap_N = torch.where(known, inputs.rollout_logprobs_N - inputs.trainer_logprobs_N, 0.0)
    metrics |= {
        "logprobs/rollout_mean": Mean(torch.where(known, inputs.rollout_logprobs_N, 0.0).sum(), count),
        "alignment/logprob_diff_mean": Mean(gap_N.abs().sum(), count),
        "alignment/logprob_diff_max": Max(gap_N.abs().max() if tokens else 0.0),
        # k3 of Schulman 2020 (joschu.net/blog/kl-approx.html): exp(x) - x - 1 with x = roll - lp
        "alignment/kl_rollout": Mean((gap_N.exp() - gap_N - 1.0).sum(), count),
    }
    return metrics
