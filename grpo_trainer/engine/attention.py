"""Causal attention over packed sequences: they lie end to end in one row, none attends to another, nothing is padded.

On a GPU it is torch's built-in FlashAttention-2 (arXiv 2307.08691). It is called directly and not by
`torch.nn.attention.varlen`, whose arguments differ between torch releases. On a CPU the same is computed sequence by
sequence, so that packed training runs, and is tested, on any machine. transformers models use it as the attention
implementation `NAME`, which reads the boundaries from the arguments of flash attention; without boundaries it is sdpa.

A prompt that several completions share stands in the row once. Attention of the completions to the prompt is then a
second part: all queries of its completions over all of its keys, without a causal mask. Each part returns its result
and the log of its softmax normaliser, by which the parts are merged into one softmax (`merge`). The backward pass of
each part needs only the merged result and the merged normaliser.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from grpo_trainer.batch.microbatches import Packed

NAME = "grpo_packed"
NONE_SHARED = (None, None, 0, 0, 0, 0)
LARGEST_HEAD = 256
"""Largest head size of FlashAttention-2; head sizes are multiples of 8."""
HAS_TRITON = importlib.util.find_spec("triton") is not None
"""Torch builds for GPUs bring Triton."""


@torch.library.custom_op("grpo::packed_attention", mutates_args=())
def packed_attention(
    query_THD: Tensor,
    key_TGD: Tensor,
    value_TGD: Tensor,
    boundaries: Tensor,
    longest: int,
    scale: float,
    prompts: Tensor | None,
    readers: Tensor | None,
    longest_prompt: int,
    longest_readers: int,
    first: int,
    last: int,
) -> tuple[Tensor, Tensor]:
    """Return the attention's result, and the logs of its softmax normalisers `[H, T]`.

    Args:
        query_THD, key_TGD, value_TGD: contiguous; H is a multiple of G.
        boundaries, longest: as in `microbatches.Packed`.
        prompts, readers, longest_prompt, longest_readers, first, last: as in `microbatches.SharedPrompts`; None and 0
            if no prompts are shared.
    """
    own = Part(boundaries, boundaries, longest, longest, causal=True)
    out_THD, normalisers_HT = _attend(query_THD, key_TGD, value_TGD, own, scale)
    if prompts is None or readers is None:
        return out_THD, normalisers_HT
    part = Part(readers, prompts, longest_readers, longest_prompt, causal=False)
    seen_RHD, seen_HR = _attend(query_THD[first:last], key_TGD[:first], value_TGD[:first], part, scale)
    merge(out_THD[first:last], normalisers_HT[:, first:last], seen_RHD, seen_HR)
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
    prompts: Tensor | None,
    readers: Tensor | None,
    longest_prompt: int,
    longest_readers: int,
    first: int,
    last: int,
) -> tuple[Tensor, Tensor, Tensor]:
    own = Part(boundaries, boundaries, longest, longest, causal=True)
    tensors = (grad_THD, query_THD, key_TGD, value_TGD, out_THD, normalisers_HT)
    query_grad, key_grad, value_grad = _attend_backward(*tensors, own, scale)
    if prompts is None or readers is None:
        return query_grad, key_grad, value_grad
    part = Part(readers, prompts, longest_readers, longest_prompt, causal=False)
    read = slice(first, last)
    seen = _attend_backward(
        *(grad_THD[read], query_THD[read], key_TGD[:first], value_TGD[:first], out_THD[read]),
        *(normalisers_HT[:, read].contiguous(), part, scale),
    )
    for whole, place, more in zip(
        (query_grad, key_grad, value_grad), (read, slice(first), slice(first)), seen, strict=True
    ):
        whole[place] += more
    return query_grad, key_grad, value_grad


@_packed_attention_backward.register_fake
def _(_grad: Tensor, query_THD: Tensor, key_TGD: Tensor, value_TGD: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    query, key, value = (each.new_empty(each.shape) for each in (query_THD, key_TGD, value_TGD))
    return query, key, value


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, boundaries, ctx.longest, ctx.scale, prompts, readers, *ctx.lengths = inputs
    ctx.shares = prompts is not None
    ctx.save_for_backward(query, key, value, *output, boundaries, *((prompts, readers) if ctx.shares else ()))


def _backward(ctx: Any, grad_THD: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors  # read once: a recomputed layer hands them out only one time
    *tensors, boundaries = saved[:6]
    shared = saved[6:] if ctx.shares else (None, None)
    grads = torch.ops.grpo.packed_attention_backward(
        *(grad_THD.contiguous(), *tensors, boundaries, ctx.longest, ctx.scale, *shared, *ctx.lengths)
    )
    return (*grads, *(None,) * 9)


packed_attention.register_autograd(_backward, setup_context=_keep)

OPERATION = torch.ops.grpo.packed_attention.default
"""The operation as torch's compiler sees it."""


def merge(out_RHD: Tensor, normalisers_HR: Tensor, seen_RHD: Tensor, seen_HR: Tensor) -> None:
    """Merge the second part into the first, in place; the log of a part's normaliser is its weight in the softmax.

    On a GPU it is one pass over both results (`attention_kernel`). torch's own operations need twelve, with copies in
    fp32.

    Args:
        out_RHD, seen_RHD: results of the parts, contiguous within each head.
        normalisers_HR, seen_HR: fp32, the logs of their normalisers, contiguous over tokens.
    """
    if out_RHD.is_cuda and HAS_TRITON:
        from grpo_trainer.engine import attention_kernel

        with torch.cuda.device(out_RHD.device):  # Triton launches on the current device, not on the tensors'
            attention_kernel.launch(out_RHD, normalisers_HR, seen_RHD, seen_HR)
        return
    whole_HR = torch.logaddexp(normalisers_HR, seen_HR)
    of_own_RH1, of_seen_RH1 = ((each - whole_HR).exp().mT[:, :, None] for each in (normalisers_HR, seen_HR))
    out_RHD.copy_(out_RHD * of_own_RH1 + seen_RHD * of_seen_RH1)
    normalisers_HR.copy_(whole_HR)


# ---------------------------------------------------------------- one part: rows of queries, each over its own keys


@dataclass(frozen=True)
class Part:
    """Rows of queries and rows of keys, each end to end; the n-th row of queries attends to the n-th row of keys."""

    queries: Tensor  # int32, where each row begins, and where the last ends
    keys: Tensor  # likewise
    longest_queries: int
    longest_keys: int
    causal: bool  # both rows have the same length, and a query does not attend to keys after it

    def rows(self) -> Iterator[tuple[slice, slice]]:
        """Return the slices of queries and keys, row by row."""
        both = (pairwise(each.tolist()) for each in (self.queries, self.keys))
        return ((slice(*query), slice(*key)) for query, key in zip(*both, strict=True))


def _attend(query_THD: Tensor, key_SGD: Tensor, value_SGD: Tensor, part: Part, scale: float) -> tuple[Tensor, Tensor]:
    """Return results, and the logs of their normalisers `[H, T]`."""
    if query_THD.is_cuda:
        # At least 2: for rows of a single query the kernel has a special case, which lays out normalisers differently.
        lengths = (part.queries, part.keys, max(2, part.longest_queries), part.longest_keys)
        found = torch.ops.aten._flash_attention_forward(
            *(query_THD, key_SGD, value_SGD, *lengths, 0.0, part.causal, False), scale=scale
        )
        return found[0], found[1]
    out_THD = torch.empty_like(query_THD)
    normalisers_HT = query_THD.new_empty(query_THD.shape[1], len(query_THD), dtype=torch.float32)
    for own, seen in part.rows():
        scores_HTS = _scores(query_THD[own], key_SGD[seen], scale, part.causal)
        values_HSD = _heads(value_SGD[seen], query_THD.shape[1])
        normalisers_HT[:, own] = torch.logsumexp(scores_HTS, -1)
        out_THD[own] = (scores_HTS.softmax(-1) @ values_HSD).transpose(0, 1).to(out_THD.dtype)
    return out_THD, normalisers_HT


def _attend_backward(
    grad_THD: Tensor,
    query_THD: Tensor,
    key_SGD: Tensor,
    value_SGD: Tensor,
    out_THD: Tensor,
    normalisers_HT: Tensor,
    part: Part,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return this part's contribution to the gradients of query, key and value.

    Result and normalisers are those of all parts together: with them, `exp(score - normaliser)` is the true softmax
    weight of each key, so the parts' gradients add up.
    """
    if query_THD.is_cuda:
        no_randomness, nothing = _no_dropout(query_THD.device)
        lengths = (part.queries, part.keys, part.longest_queries, part.longest_keys)
        inputs = (grad_THD, query_THD, key_SGD, value_SGD, out_THD, normalisers_HT, *lengths)
        return torch.ops.aten._flash_attention_backward(
            *(*inputs, 0.0, part.causal, no_randomness, nothing), scale=scale
        )
    grads = torch.zeros_like(query_THD), torch.zeros_like(key_SGD), torch.zeros_like(value_SGD)
    heads, groups = query_THD.shape[1], key_SGD.shape[1]
    for own, seen in part.rows():
        weights_HTS = (_scores(query_THD[own], key_SGD[seen], scale, part.causal) - normalisers_HT[:, own, None]).exp()
        grad_HTD = grad_THD[own].transpose(0, 1).float()
        through_HTS = grad_HTD @ _heads(value_SGD[seen], heads).mT
        mean_HT1 = (grad_HTD * out_THD[own].transpose(0, 1).float()).sum(-1, keepdim=True)
        inner_HTS = weights_HTS * (through_HTS - mean_HT1) * scale
        own_grads = (
            (own, inner_HTS @ _heads(key_SGD[seen], heads)),
            (seen, _by_group(inner_HTS.mT @ _heads(query_THD[own], heads), groups)),
            (seen, _by_group(weights_HTS.mT @ grad_HTD, groups)),
        )
        for whole, (place, part_HTD) in zip(grads, own_grads, strict=True):
            whole[place] = part_HTD.transpose(0, 1).to(whole.dtype)
    return grads


@cache
def _no_dropout(device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the kernel's random state and offset, cached per device because a step would make thousands of them."""
    return torch.zeros(2, dtype=torch.uint64, device=device), torch.empty(0, device=device)


def _scores(query_THD: Tensor, key_SGD: Tensor, scale: float, causal: bool) -> Tensor:
    """Return attention scores in fp32."""
    heads = query_THD.shape[1]
    scores_HTS = _heads(query_THD, heads) @ _heads(key_SGD, heads).mT * scale
    if not causal:
        return scores_HTS
    ahead_TS = torch.ones(scores_HTS.shape[1:], dtype=torch.bool, device=query_THD.device).triu(1)
    return scores_HTS.masked_fill(ahead_TS, -torch.inf)


def _heads(values_TGD: Tensor, heads: int) -> Tensor:
    """Return `[heads, T, D]` in fp32; heads of one group share their values."""
    return values_TGD.transpose(0, 1).float().repeat_interleave(heads // values_TGD.shape[1], dim=0)


def _by_group(values_HTD: Tensor, groups: int) -> Tensor:
    return values_HTD.unflatten(0, (groups, -1)).sum(1)


# ---------------------------------------------------------------- for transformers models


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
    shared_prompts: tuple[Any, ...] = NONE_SHARED,
    **others: Any,
) -> tuple[Tensor, Tensor | None]:
    """Return attention `[B, T, H, D]`; transformers models call this."""
    if cu_seq_lens_q is None or max_length_q is None:
        return sdpa_attention_forward(
            module, query_BHTD, key_BGTD, value_BGTD, attention_mask, scaling=scaling, **others
        )
    scale = query_BHTD.shape[-1] ** -0.5 if scaling is None else scaling
    # Under autocast the rotary embedding leaves queries and keys in fp32.
    inputs = [each[0].transpose(0, 1).to(value_BGTD.dtype).contiguous() for each in (query_BHTD, key_BGTD, value_BGTD)]
    out_THD, _ = packed_attention(*inputs, cu_seq_lens_q, max_length_q, scale, *shared_prompts)
    return out_THD[None], None


AttentionInterface.register(NAME, attention_forward)


def arguments(packed: Packed) -> dict[str, Any]:
    """Return a model's arguments besides the tokens."""
    return {
        "position_ids": packed.positions_1T,
        "cu_seq_lens_q": packed.boundaries,
        "cu_seq_lens_k": packed.boundaries,
        "max_length_q": packed.longest,
        "max_length_k": packed.longest,
        "shared_prompts": NONE_SHARED if packed.shared is None else tuple(vars(packed.shared).values()),
    }


def why_not(config: Any, seq_len: int) -> str | None:
    """Return the feature of a text model that packed attention does not support, or None."""
    window = getattr(config, "sliding_window", None)
    if window is not None and window < seq_len and getattr(config, "use_sliding_window", True):
        return f"its attention has a sliding window of {window} tokens"
    others = sorted(set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"})
    if others:
        return f"it has layers of another kind ({', '.join(others)})"
    if getattr(config, "attn_logit_softcapping", None):
        return "it caps its attention scores"
    if getattr(config, "v_head_dim", None) is not None:
        return "its values have another head size than its queries"
    heads = config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    if size % 8 or size > LARGEST_HEAD:
        return f"its heads have size {size}; wanted a multiple of 8 up to {LARGEST_HEAD}"
    return None
