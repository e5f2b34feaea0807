"""Logprobs of chosen tokens in fp32, chunk by chunk: fp32 copies of the logits exist for one chunk at a time.

Shift convention: the logits at position t predict the token at t + 1, so the logprob of `tokens_BT[b, t]` is read from
`logits_BTV[b, t - 1]`.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

CHUNK_TOKENS = 1024
"""Rows whose fp32 log-softmax exists at one time."""


def chosen_logprobs(
    logits_BTV: Tensor, tokens_BT: Tensor, rows_N: Tensor, columns_N: Tensor, temperature_N: Tensor
) -> tuple[Tensor, Tensor]:
    """Logprob of the token at each (row, column) under the distribution it was sampled from, and that one's entropy.

    Args:
        logits_BTV: any float dtype; computed in fp32 chunk by chunk, recomputed in the backward pass.
        columns_N: positions of the tokens, each >= 1.
        temperature_N: divides the logits.

    Returns:
        `trainer_logprobs_N` with gradient and `entropy_N` without, both fp32, in nats.
    """
    targets_N = tokens_BT[rows_N, columns_N]
    logprobs, entropies = [], []
    chunks = zip(
        logits_BTV[rows_N, columns_N - 1].split(CHUNK_TOKENS),  # split, not sliced: one gradient of that size, not many
        targets_N.split(CHUNK_TOKENS),
        temperature_N.split(CHUNK_TOKENS),
        strict=True,
    )
    for logits_nV, targets_n, temperature_n in chunks if len(rows_N) else ():
        pair = checkpoint(_logprob_and_entropy, logits_nV, targets_n, temperature_n, use_reentrant=False)
        assert pair is not None
        logprobs.append(pair[0])
        entropies.append(pair[1])
    if not logprobs:  # no trained token: a zero that can still be backpropagated
        nothing = logits_BTV.float().sum() * torch.zeros(0, device=logits_BTV.device)
        return nothing, nothing.detach()
    return torch.cat(logprobs), torch.cat(entropies)


def _logprob_and_entropy(logits_nV: Tensor, targets_n: Tensor, temperature_n: Tensor) -> tuple[Tensor, Tensor]:
    all_nV = torch.log_softmax(logits_nV.float() / temperature_n[:, None], dim=-1)
    entropy_n = -(all_nV.detach().exp() * all_nV.detach()).sum(-1)
    return all_nV.gather(-1, targets_n[:, None]).squeeze(-1), entropy_n
