"""Causal attention over sequences that lie end to end in one row: none sees another, and nothing is padded.

On a GPU it is FlashAttention-2 as it is built into torch (arXiv 2307.08691; what `torch.nn.attention.varlen` calls,
too: called directly, since that module's arguments differ from one torch to the next). On a CPU the same is computed
sequence by sequence, so that packed training runs, and is tested, anywhere. To a transformers model it is one more
attention implementation, `NAME`, which takes the boundaries from the arguments that flash attention has for them;
without them it is sdpa.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from grpo_trainer.microbatches import Packed

NAME = "grpo_packed"
LARGEST_HEAD = 256
"""Of FlashAttention-2; head sizes are multiples of 8."""


@torch.library.custom_op("grpo::packed_attention", mutates_args=())
def packed_attention(
    query_THD: Tensor, key_TGD: Tensor, value_TGD: Tensor, boundaries: Tensor, longest: int, scale: float
) -> tuple[Tensor, Tensor]:
    """Attention, and the log of its normalisers `[H, T]`.

    Args:
        query_THD, key_TGD, value_TGD: contiguous; H a multiple of G heads.
        boundaries, longest: as in `microbatches.Packed`.
    """
    if query_THD.is_cuda:
        found = torch.ops.aten._flash_attention_forward(
            *(query_THD, key_TGD, value_TGD, boundaries, boundaries, longest, longest, 0.0, True, False), scale=scale
        )
        return found[0], found[1]
    out_THD = torch.empty_like(query_THD)
    normalisers_HT = query_THD.new_empty(query_THD.shape[1], len(query_THD), dtype=torch.float32)
    for own in _sequences(boundaries):
        scores_HTT = _scores(query_THD[own], key_TGD[own], scale)
        values_HTD = _heads(value_TGD[own], query_THD.shape[1])
        normalisers_HT[:, own] = torch.logsumexp(scores_HTT, -1)
        out_THD[own] = (scores_HTT.softmax(-1) @ values_HTD).transpose(0, 1).to(out_THD.dtype)
    return out_THD, normalisers_HT


@packed_attention.register_fake
def _(query_THD: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    tokens, heads, _size = query_THD.shape
    return query_THD.new_empty(query_THD.shape), query_THD.new_empty(heads, tokens, dtype=torch.float32)


@torch.library.custom_op("grpo::packed_attention_backward", mutates_args=())
def _packed_attention_backward(
    grad_THD: Tensor,
    query_THD: Tensor,
    key_TGD: Tensor,
    value_TGD: Tensor,
    out_THD: Tensor,
    normalisers_HT: Tensor,
    boundaries: Tensor,
    longest: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    if query_THD.is_cuda:
        no_randomness = torch.zeros(2, dtype=torch.uint64, device=query_THD.device)
        nothing = torch.empty(0, device=query_THD.device)
        inputs = (grad_THD, query_THD, key_TGD, value_TGD, out_THD, normalisers_HT, boundaries, boundaries)
        return torch.ops.aten._flash_attention_backward(
            *(*inputs, longest, longest, 0.0, True, no_randomness, nothing), scale=scale
        )
    grads = torch.empty_like(query_THD), torch.empty_like(key_TGD), torch.empty_like(value_TGD)
    heads, groups = query_THD.shape[1], key_TGD.shape[1]
    for own in _sequences(boundaries):
        weights_HTT = _scores(query_THD[own], key_TGD[own], scale).softmax(-1)
        grad_HTD = grad_THD[own].transpose(0, 1).float()
        through_HTT = grad_HTD @ _heads(value_TGD[own], heads).mT
        inner_HTT = weights_HTT * (through_HTT - (through_HTT * weights_HTT).sum(-1, keepdim=True)) * scale
        own_grads = (
            inner_HTT @ _heads(key_TGD[own], heads),
            _by_group(inner_HTT.mT @ _heads(query_THD[own], heads), groups),
            _by_group(weights_HTT.mT @ grad_HTD, groups),
        )
        for whole, part_HTD in zip(grads, own_grads, strict=True):
            whole[own] = part_HTD.transpose(0, 1).to(whole.dtype)
    return grads


@_packed_attention_backward.register_fake
def _(_grad: Tensor, query_THD: Tensor, key_TGD: Tensor, value_TGD: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    query, key, value = (each.new_empty(each.shape) for each in (query_THD, key_TGD, value_TGD))
    return query, key, value


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.longest, ctx.scale = inputs
    ctx.save_for_backward(*tensors, *output)


def _backward(ctx: Any, grad_THD: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    query, key, value, boundaries, out, normalisers = ctx.saved_tensors
    grads = torch.ops.grpo.packed_attention_backward(
        *(grad_THD.contiguous(), query, key, value, out, normalisers, boundaries, ctx.longest, ctx.scale)
    )
    return (*grads, None, None, None)


packed_attention.register_autograd(_backward, setup_context=_keep)


def _sequences(boundaries: Tensor) -> Iterator[slice]:
    return (slice(start, end) for start, end in pairwise(boundaries.tolist()))


def _scores(query_THD: Tensor, key_TGD: Tensor, scale: float) -> Tensor:
    """Causal scores in fp32."""
    heads, tokens = query_THD.shape[1], len(query_THD)
    scores_HTT = _heads(query_THD, heads) @ _heads(key_TGD, heads).mT * scale
    ahead_TT = torch.ones(tokens, tokens, dtype=torch.bool, device=query_THD.device).triu(1)
    return scores_HTT.masked_fill(ahead_TT, -torch.inf)


def _heads(values_TGD: Tensor, heads: int) -> Tensor:
    """As `[heads, T, D]` in fp32; heads of a group share theirs."""
    return values_TGD.transpose(0, 1).float().repeat_interleave(heads // values_TGD.shape[1], dim=0)


def _by_group(values_HTD: Tensor, groups: int) -> Tensor:
    return values_HTD.unflatten(0, (groups, -1)).sum(1)


def attention_forward(
    module: nn.Module,
    query_BHTD: Tensor,
    key_BGTD: Tensor,
    value_BGTD: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int | None = None,
    **others: Any,
) -> tuple[Tensor, Tensor | None]:
    """What a transformers model calls; the result is `[B, T, H, D]`."""
    if cu_seq_lens_q is None or max_length_q is None:
        return sdpa_attention_forward(
            module, query_BHTD, key_BGTD, value_BGTD, attention_mask, scaling=scaling, **others
        )
    scale = query_BHTD.shape[-1] ** -0.5 if scaling is None else scaling
    # Under autocast the rotary embedding leaves queries and keys in fp32.
    inputs = [each[0].transpose(0, 1).to(value_BGTD.dtype).contiguous() for each in (query_BHTD, key_BGTD, value_BGTD)]
    out_THD, _ = packed_attention(*inputs, cu_seq_lens_q, max_length_q, scale)
    return out_THD[None], None


AttentionInterface.register(NAME, attention_forward)


def arguments(packed: Packed) -> dict[str, Any]:
    """What a model is given besides the tokens."""
    return {
        "position_ids": packed.positions_1T,
        "cu_seq_lens_q": packed.boundaries,
        "cu_seq_lens_k": packed.boundaries,
        "max_length_q": packed.longest,
        "max_length_k": packed.longest,
    }


def why_not(config: Any, seq_len: int) -> str | None:
    """What in a model's configuration packed attention would leave out, if anything.

    Args:
        config: transformers' own, of a text model.
        seq_len: no sequence is longer.
    """
    window = getattr(config, "sliding_window", None)
    if window is not None and window < seq_len and getattr(config, "use_sliding_window", True):
        return f"its attention has a sliding window of {window} tokens"
    others = sorted(set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"})
    if others:
        return f"it has layers of another kind ({', '.join(others)})"
    if getattr(config, "attn_logit_softcapping", None):
        return "it caps its attention scores"
    heads = config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    if size % 8 or size > LARGEST_HEAD:
        return f"its heads have size {size}; wanted a multiple of 8 up to {LARGEST_HEAD}"
    return None
