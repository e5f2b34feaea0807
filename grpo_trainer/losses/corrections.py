"""Correction for the mismatch between server and trainer, by truncated or masked importance sampling.

The server's kernels and precision differ from the trainer's, and its weights may be some versions older. If the ratio
is taken against the trainer's own old logprobs (`old`), each token is weighted by

    w = sg(exp(old - roll))      per token, or with the sum of its sequence's differences; 1 where roll is not known

| kind | weight | source |
|---|---|---|
| truncate | min(w, cap) | truncated importance sampling, Ionides 2008; for this use arXiv 2510.26788 |
| mask | w within [1 / cap, cap], 0 beyond | masked importance sampling, the same |
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from grpo_trainer.losses.segments import Segments


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
    """Return the weights of all tokens.

    Args:
        old_N: the trainer's logprobs before the first update on this batch.
        rollout_N, known_N: the server's logprobs, and where they are known.
    """
    if kind == "none":
        return Correction(torch.ones_like(old_N), torch.zeros_like(known_N))
    log_N = torch.where(known_N, (old_N - rollout_N).detach(), 0.0)
    w_N = torch.exp(segments.total_N(log_N) if level == "sequence" else log_N)
    if kind == "truncate":
        return Correction(w_N.clamp(max=cap), w_N > cap)
    beyond_N = (w_N < 1.0 / cap) | (w_N > cap)
    return Correction(torch.where(beyond_N, 0.0, w_N), beyond_N)
