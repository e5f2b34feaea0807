"""Logprobs of tokens in fp32, computed in chunks: only one chunk of fp32 logits exists at a time.

Shift convention: the logits at position t predict the token at t + 1, so the logprob of `tokens_BT[b, t]` is read from
`logits_BTV[b, t - 1]`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

CHUNK_TOKENS = 1024
"""Rows of a chunk."""


@dataclass(frozen=True)
class TokenScores:
    """Scores of N positions, in fp32 and nats.

    Attributes:
        logprobs_N: logprob of the token at each position, with gradient.
        entropy_N: entropy of the distribution that it was sampled from, with gradient if requested.
        others_NK: logprobs of further requested tokens, with gradient.
    """

    logprobs_N: Tensor
    entropy_N: Tensor
    others_NK: Tensor


def token_scores(
    logits_BTV: Tensor,
    tokens_BT: Tensor,
    rows_N: Tensor,
    columns_N: Tensor,
    temperature_N: Tensor,
    others_NK: Tensor | None = None,
    *,
    entropy_gradient: bool = False,
) -> TokenScores:
    """Return scores of the tokens at each (row, column), under the distribution that they were sampled from.

    Args:
        logits_BTV: any float dtype; scores are computed in fp32 by chunks, and recomputed in the backward pass.
        columns_N: positions of the tokens, each >= 1.
        temperature_N: divides the logits.
        others_NK: ids of further tokens at the same positions whose logprobs are returned.
    """
    if others_NK is None:
        others_NK = rows_N.new_zeros(len(rows_N), 0)
    if not len(rows_N):  # no trained token: a zero that can still be backpropagated
        nothing = logits_BTV.float().sum() * torch.zeros(0, device=logits_BTV.device)
        return TokenScores(nothing, nothing if entropy_gradient else nothing.detach(), nothing.view(others_NK.shape))
    chunks = zip(
        logits_BTV[rows_N, columns_N - 1].split(CHUNK_TOKENS),  # slices would give a whole gradient each
        tokens_BT[rows_N, columns_N].split(CHUNK_TOKENS),
        temperature_N.split(CHUNK_TOKENS),
        others_NK.split(CHUNK_TOKENS),
        strict=True,
    )
    parts: list[tuple[Tensor, Tensor, Tensor]] = []
    for chunk in chunks:
        part = checkpoint(_scores, *chunk, entropy_gradient, use_reentrant=False)
        assert part is not None
        parts.append(part)
    return TokenScores(*(torch.cat(column) for column in zip(*parts, strict=True)))


def _scores(
    logits_nV: Tensor,
    targets_n: Tensor,
    temperature_n: Tensor,
    others_nK: Tensor,
    entropy_gradient: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    all_nV = torch.log_softmax(logits_nV.float() / temperature_n[:, None], dim=-1)
    entropy_of_nV = all_nV if entropy_gradient else all_nV.detach()
    return (
        all_nV.gather(-1, targets_n[:, None]).squeeze(-1),
        -(entropy_of_nV.exp() * entropy_of_nV).sum(-1),
        all_nV.gather(-1, others_nK),
    )
