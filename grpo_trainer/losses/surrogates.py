"""The policy's gain by each token: ratios and surrogates, pure functions of flat tensors (`_N`), all in fp32.

The ratio is that of one token, `exp(lp - old)` (PPO, arXiv 1707.06347), or of its whole sequence, `exp(mean(lp - old))`
(GSPO, arXiv 2507.18071). A surrogate turns it into a gain:

| surrogate | gain | source |
|---|---|---|
| clipped | min(ratio A, clip(ratio, 1 - eps_low, 1 + eps_high) A), for either sign of A | PPO, arXiv 1707.06347 |
| - eps_high > eps_low | clip-higher | DAPO, arXiv 2503.14476 |
| - dual clip c, where A < 0 | max(the above, c A) | arXiv 1912.09729 |
| cispo | sg(min(ratio, 1 + eps_high)) A lp | MiniMax-M1, arXiv 2506.13585 |
| sapo | (4 / tau) sigmoid(tau (ratio - 1)) A, tau by the sign of A | SAPO, arXiv 2511.20347 |
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from grpo_trainer.config.loss import LossConfig
from grpo_trainer.losses.segments import Segments

MAX_LOG_RATIO = 20.0
"""Limit of a log ratio, beyond every clip range and far from the overflow of exp in fp32, where a gradient of 0 times
infinity would be NaN. A token beyond it has no gradient. No policy moves that far, but a server may send -9999 for a
probability of 0."""


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
