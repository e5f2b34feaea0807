"""Further terms of the loss: divergence from a reference, distillation. Pure functions of flat tensors, in fp32.

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

import torch
from torch import Tensor

from grpo_trainer.config.loss import KlEstimator
from grpo_trainer.losses.surrogates import MAX_LOG_RATIO


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
