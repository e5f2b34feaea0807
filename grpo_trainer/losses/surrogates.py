"""The terms of the loss at each token, pure functions of flat tensors (`_N`), all in fp32.

The ratio is that of one token, `exp(lp - old)` (PPO, arXiv 1707.06347), or of its whole sequence, `exp(mean(lp - old))`
(GSPO, arXiv 2507.18071). A surrogate turns it into a gain:

| surrogate | gain | source |
|---|---|---|
| clipped | min(ratio A, clip(ratio, 1 - eps_low, 1 + eps_high) A), for either sign of A | PPO, arXiv 1707.06347 |
| - eps_high > eps_low | clip-higher | DAPO, arXiv 2503.14476 |
| - dual clip c, where A < 0 | max(the above, c A) | arXiv 1912.09729 |
| cispo | sg(min(ratio, 1 + eps_high)) A lp | MiniMax-M1, arXiv 2506.13585 |
| sapo | (4 / tau) sigmoid(tau (ratio - 1)) A, tau by the sign of A | SAPO, arXiv 2511.20347 |

The server's kernels and precision differ from the trainer's, and its weights may be some versions older. If the ratio
is taken against the trainer's own old logprobs (`old`), a correction for this mismatch weights each token by

    w = sg(exp(old - roll))      per token, or with the sum of its sequence's differences; 1 where roll is not known

| correction | weight | source |
|---|---|---|
| truncate | min(w, cap) | truncated importance sampling, Ionides 2008; for this use arXiv 2510.26788 |
| mask | w within [1 / cap, cap], 0 beyond | masked importance sampling, the same |

Further terms are the divergence from a reference, and distillation:

| term of a token | definition | source |
|---|---|---|
| k1 | x = lp - ref | Schulman 2020, joschu.net/blog/kl-approx.html |
| k2 | x^2 / 2 | the same |
| k3 | exp(-x) + x - 1 | the same; in a loss: DeepSeekMath, arXiv 2402.03300 |
| distillation | -sum_k softmax(teacher / tau)_k lp_k over the teacher's k likeliest tokens | Atropos's distill fields |

On samples of the policy, the means of k1 and k3 are the KL divergence. Their gradients are not the divergence's: on
average the gradient of k1 is 0, that of k3 is the gradient of the reversed divergence, and only that of k2 is the
gradient of the KL divergence. Multiplied by the ratio, k1 and k3 have the right mean and the right gradient
(DeepSeek-V3.2, arXiv 2512.02556): that is `--kl-unbiased`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from grpo_trainer.config.loss import KlEstimator, LossConfig

MAX_LOG_RATIO = 20.0
"""Limit of a log ratio, beyond every clip range and far from the overflow of exp in fp32, where a gradient of 0 times
infinity would be NaN. A token beyond it has no gradient. No policy moves that far, but a server may send -9999 for a
probability of 0."""


@dataclass(frozen=True)
class Segments:
    """Which of `count` sequences each of N tokens belongs to."""

    index_N: Tensor
    count: int

    def total_N(self, values_N: Tensor) -> Tensor:
        """Return the sum of each sequence's values at each of its tokens."""
        return torch.zeros(self.count, dtype=values_N.dtype, device=values_N.device).index_add(
            0, self.index_N, values_N
        )[self.index_N]


@dataclass(frozen=True)
class Surrogate:
    """The gain of each token, with gradient, and which tokens are clipped at the lower or upper end."""

    gain_N: Tensor
    low_N: Tensor
    high_N: Tensor


def token_ratio(lp_N: Tensor, old_N: Tensor, segments: Segments) -> Tensor:
    """Return the new probability of each token over its old one."""
    return torch.exp((lp_N - old_N).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO))


def sequence_ratio(lp_N: Tensor, old_N: Tensor, segments: Segments) -> Tensor:
    """Return the geometric mean of a sequence's ratios at each of its tokens.

    A token's gradient goes through its own logprob alone (GSPO-token, section 4.3). If all tokens of a sequence have
    the same advantage, the gradient of their mean is that of GSPO; otherwise each token keeps its own advantage.

    The mean leaves out tokens whose own log ratio exceeds `MAX_LOG_RATIO`: one of them would dominate the sequence.
    """
    log_N = (lp_N - old_N).detach()
    beyond_N = log_N.abs() > MAX_LOG_RATIO  # False for NaN, which must stay visible in the loss
    total_N = segments.total_N(torch.where(beyond_N, 0.0, log_N))
    within_N = segments.total_N((~beyond_N).to(log_N.dtype))
    return torch.exp(total_N / within_N.clamp(min=1.0) + torch.where(beyond_N, 0.0, lp_N - lp_N.detach()))


def clipped(ratio_N: Tensor, lp_N: Tensor, advantages_N: Tensor, config: LossConfig) -> Surrogate:
    """Return PPO's surrogate, with clip-higher and dual clip. A clipped token has no gradient."""
    low, high = 1.0 - config.clip_eps, 1.0 + config.eps_high
    plain_N = ratio_N * advantages_N
    gain_N = torch.minimum(plain_N, ratio_N.clamp(low, high) * advantages_N)
    low_N = (ratio_N < low) & (advantages_N < 0)
    high_N = (ratio_N > high) & (advantages_N > 0)
    if config.dual_clip is not None:
        beyond_N = (ratio_N > config.dual_clip) & (advantages_N < 0)
        gain_N = torch.where(beyond_N, config.dual_clip * advantages_N, gain_N)
        high_N = high_N | beyond_N
    return Surrogate(gain_N, low_N, high_N)


def cispo(ratio_N: Tensor, lp_N: Tensor, advantages_N: Tensor, config: LossConfig) -> Surrogate:
    """Return CISPO's surrogate: the ratio, clipped from above, weights the logprob's gradient, so no token loses it."""
    high = 1.0 + config.eps_high
    gain_N = ratio_N.detach().clamp(max=high) * advantages_N * lp_N
    return Surrogate(gain_N, torch.zeros_like(ratio_N, dtype=torch.bool), ratio_N > high)


def sapo(ratio_N: Tensor, lp_N: Tensor, advantages_N: Tensor, config: LossConfig) -> Surrogate:
    """Return SAPO's surrogate: a gate instead of a clip; its slope is 1 at a ratio of 1 and falls off on both sides."""
    tau_N = torch.where(advantages_N > 0, config.sapo_tau_pos, config.sapo_tau_neg)
    gain_N = 4.0 / tau_N * torch.sigmoid(tau_N * (ratio_N - 1.0)) * advantages_N
    never_N = torch.zeros_like(ratio_N, dtype=torch.bool)
    return Surrogate(gain_N, never_N, never_N)


@dataclass(frozen=True)
class Correction:
    """The weight of each token, without gradient, and whether it is truncated or masked (differs from w)."""

    weights_N: Tensor
    cut_N: Tensor


def mismatch_correction(
    old_N: Tensor,
    rollout_N: Tensor,
    known_N: Tensor,
    segments: Segments,
    *,
    kind: Literal["none", "truncate", "mask"],
    level: Literal["token", "sequence"],
    cap: float,
) -> Correction:
    """Return the weights of all tokens; `old_N` is from before the first update on this batch."""
    if kind == "none":
        return Correction(torch.ones_like(old_N), torch.zeros_like(known_N))
    log_N = torch.where(known_N, (old_N - rollout_N).detach(), 0.0)
    w_N = torch.exp(segments.total_N(log_N) if level == "sequence" else log_N)
    if kind == "truncate":
        return Correction(w_N.clamp(max=cap), w_N > cap)
    beyond_N = (w_N < 1.0 / cap) | (w_N > cap)
    return Correction(torch.where(beyond_N, 0.0, w_N), beyond_N)


def divergence(lp_N: Tensor, ref_N: Tensor, estimator: KlEstimator) -> Tensor:
    """Return the estimate of KL(policy || reference) at each token, in nats, with gradient to `lp_N`."""
    x_N = lp_N - ref_N
    match estimator:
        case "k1":
            return x_N
        case "k2":
            return 0.5 * x_N.square()
        case "k3":
            return torch.exp((-x_N).clamp(max=MAX_LOG_RATIO)) + x_N - 1.0


def teacher_cross_entropy(lp_NK: Tensor, teacher_NK: Tensor, temperature: float) -> Tensor:
    """Return the policy's cross-entropy to the teacher at each token, in nats; 0 where there is no teacher.

    Args:
        lp_NK: the policy's logprobs of the teacher's tokens, with gradient.
        teacher_NK: the teacher's logprobs; padded with -inf where it gave fewer.
        temperature: divides the teacher's logprobs before they are normalised over the k.
    """
    given_NK = teacher_NK.isfinite()
    known_N = given_NK.any(-1)
    softened_NK = torch.where(known_N[:, None], teacher_NK / temperature, 0.0)
    targets_NK = torch.where(given_NK, torch.softmax(softened_NK, -1), 0.0)
    return -(targets_NK * lp_NK).sum(-1)
