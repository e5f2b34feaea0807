"""Scores of tokens from hidden states and the head's weights: the logits of all tokens never exist at once.

The head processes hidden states chunk by chunk, and drops a chunk's logits once it has their logprobs, their entropies
and what the backward pass needs. Matrix products are in the weights' dtype, everything else is in fp32. On a GPU the
logits are the fp32 sums of their product and not rounded to 16 bits, where a logit of 10 is off by up to 0.03. The
server does the same (`vllm_server.worker.logits`; MiniMax-M1, arXiv:2506.13585). There are two backward passes:

* The head's weights are frozen (LoRA). A logprob's gradient by the hidden state is a row, `(onehot - softmax) @ W /
  temperature`, times a number that only the loss knows. The forward pass computes the row, and nothing is recomputed.
* The head's weights are trained. The backward pass recomputes a chunk's logits, or uses kept ones if they are few.

Several processes may have a shard of the head each (`tensor_shards.py`): some tokens' rows. Each computes the logprobs
of the distribution over its own tokens, as if there were no others, and then `over_all_tokens` combines them.

Models that do more to their logits give them whole: `token_scores` computes with them in fp32, chunk by chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from grpo_trainer.engine.collectives import gather_columns, reduced, spread
from grpo_trainer.memory import HEAD_CHUNK_BYTES, HEAD_INTERMEDIATE_BYTES

CHUNK_TOKENS = 1024
"""Rows of a chunk of whole logits."""
COMPILED_CHUNK = 1 << 27
"""Logits of a chunk if both functions are compiled: about 768 rows of Qwen's vocabulary."""

Statistics = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]
Residual = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, torch.dtype], Tensor]


@dataclass(frozen=True)
class TokenScores:
    """Scores of N positions, in fp32 and nats."""

    logprobs_N: Tensor  # of the token at each position, with gradient
    entropy_N: Tensor  # of the distribution that it was sampled from, with gradient if requested
    others_NK: Tensor  # logprobs of further requested tokens, with gradient


def statistics(logits_nV: Tensor, targets_n: Tensor, temperature_n: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return in fp32 the targets' logprobs, the entropies, and the logs of the normalisers.

    One pass over the logits finds the largest, and one more gives both sums: with x the logits minus the largest, the
    entropy is `log(sum(exp(x))) - sum(x * exp(x)) / sum(exp(x))`.
    """
    scaled_nV = logits_nV.float() / temperature_n[:, None]
    peak_n = scaled_nV.amax(-1)
    below_nV = scaled_nV - peak_n[:, None]
    weights_nV = below_nV.exp()
    total_n = weights_nV.sum(-1)
    entropy_n = total_n.log() - (below_nV * weights_nV).sum(-1) / total_n
    normaliser_n = peak_n + total_n.log()
    of_target_n = scaled_nV.gather(-1, targets_n[:, None])[:, 0]
    return of_target_n - normaliser_n, entropy_n, normaliser_n


def residual(
    logits_nV: Tensor,
    targets_n: Tensor,
    temperature_n: Tensor,
    normaliser_n: Tensor,
    entropy_n: Tensor,
    grad_n: Tensor,
    entropy_grad_n: Tensor,
    dtype: torch.dtype,
) -> Tensor:
    """Return in `dtype` the gradient of `grad_n` x logprob + `entropy_grad_n` x entropy by the logits.

    It is one expression in fp32: a target's `1 - p`, computed from terms in 16 bits, would vanish for p near 1.
    """
    logprobs_nV = logits_nV.float() / temperature_n[:, None] - normaliser_n[:, None]
    p_nV = logprobs_nV.exp()
    is_target_nV = torch.arange(logits_nV.shape[-1], device=logits_nV.device)[None] == targets_n[:, None]
    of_logprob_nV = (is_target_nV.float() - p_nV) * grad_n[:, None]
    of_entropy_nV = p_nV * (logprobs_nV + entropy_n[:, None]) * entropy_grad_n[:, None]
    return ((of_logprob_nV - of_entropy_nV) / temperature_n[:, None]).to(dtype)


@dataclass(frozen=True)
class HeadPlan:
    """How scores are computed; the plan changes results by rounding only."""

    dtype: torch.dtype  # of the factors of matrix products, and of the logits' gradients
    logits_dtype: torch.dtype  # `dtype` or fp32
    distills: bool = False  # some tokens have a teacher, whose logprobs take more memory and are not compiled
    chunk_bytes: int = HEAD_CHUNK_BYTES  # of a chunk's logits
    kept_bytes: int = 0  # the logits of all rows are kept for the backward pass if they take no more than this
    # These are the functions of this module, or compiled ones, which need no intermediate tensors.
    statistics: Statistics = statistics
    residual: Residual = residual
    own: range | None = None  # the tokens whose rows of the head this process has; None: all
    sum_dtype: torch.dtype | None = None  # in which the weights' gradient is summed over chunks; None: `dtype`

    def compiled(self) -> HeadPlan:
        """Return the plan with both functions compiled, and chunks of a suitable size."""
        return replace(
            self,
            chunk_bytes=self.chunk_bytes if self.distills else COMPILED_CHUNK * self.logits_dtype.itemsize,
            statistics=_compiled(statistics),
            residual=_compiled(residual),
        )

    @property
    def is_compiled(self) -> bool:
        return self.residual is not residual

    @property
    def logit_bytes(self) -> int:
        """Bytes at the peak for each logit of a chunk: the logit, its gradient and intermediate tensors.

        The figures are measured (in `tests/unit/test_head.py`).
        """
        if self.is_compiled and not self.distills:
            return self.logits_dtype.itemsize + self.dtype.itemsize
        return self.logits_dtype.itemsize + HEAD_INTERMEDIATE_BYTES

    def rows(self, vocab: int) -> int:
        """Return the rows of a chunk: a multiple of 128, for which matrix products are fast."""
        return max(128, self.chunk_bytes // (vocab * self.logits_dtype.itemsize) // 128 * 128)

    def logits(self, hidden_nH: Tensor, weight_VH: Tensor, bias_V: Tensor | None) -> Tensor:
        exact = self.logits_dtype != self.dtype
        return (product if exact else functional.linear)(hidden_nH, weight_VH, bias_V)


def product(hidden_nH: Tensor, weight_VH: Tensor, bias_V: Tensor | None) -> Tensor:
    """Return `hidden @ weight.T + bias` in fp32 of 16-bit factors: a GPU sums in fp32 anyway, a CPU converts them."""
    if not hidden_nH.is_cuda:
        return functional.linear(hidden_nH.float(), weight_VH.float(), None if bias_V is None else bias_V.float())
    logits_nV = torch.mm(hidden_nH, weight_VH.mT, out_dtype=torch.float32)
    return logits_nV if bias_V is None else logits_nV.add_(bias_V)


class ExactHead(nn.Linear):
    """A head with fp32 logits, for a model's own forward pass; `head.__class__ = ExactHead` converts a linear layer.

    Its factors have autocast's dtype, or else that of the weights.
    """

    def forward(self, input: Tensor) -> Tensor:
        kind = input.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else self.weight.dtype
        with torch.autocast(kind, enabled=False):  # autocast would round the result too
            if dtype == torch.float32:
                return super().forward(input.float())
            bias = None if self.bias is None else self.bias.to(dtype)
            logits_NV = _Product.apply(input.flatten(0, -2).to(dtype), self.weight.to(dtype), bias)
        return logits_NV.unflatten(0, input.shape[:-1])


class ShardedHead(ExactHead):
    """A head with the rows of some tokens, whose logits all processes together compute; `out_features` counts all."""

    own: range  # these tokens
    each: int  # the number of tokens of each process; the last ones may have fewer

    def forward(self, input: Tensor) -> Tensor:
        return gather_columns(super().forward(spread(input)), self.each)[..., : self.out_features]


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden_NH: Tensor, weight_VH: Tensor, bias_V: Tensor | None) -> Tensor:
        ctx.save_for_backward(hidden_NH, weight_VH)
        return product(hidden_NH, weight_VH, bias_V)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        hidden_NH, weight_VH = ctx.saved_tensors
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad
        grad_NV = grad_outputs[0].to(hidden_NH.dtype)
        return (
            grad_NV @ weight_VH if needs_hidden else None,
            grad_NV.mT @ hidden_NH if needs_weight else None,
            grad_outputs[0].sum(0).to(hidden_NH.dtype) if needs_bias else None,
        )


def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile for any number of rows but a fixed vocabulary: dividing by an unknown length costs more than the rest."""
    compiled = torch.compile(function)

    def call(*arguments: Any) -> Any:
        for argument in arguments:
            if isinstance(argument, Tensor):
                torch._dynamo.maybe_mark_dynamic(argument, 0)  # pyright: ignore[reportPrivateImportUsage]
        return compiled(*arguments)

    return call


@dataclass(frozen=True)
class Wanted:
    """What a forward pass computes or keeps besides scores."""

    early: bool  # gradients by hidden states, in the forward pass: only they are needed, and only through logprobs
    kept: bool  # keep logits for the backward pass


def head_scores(
    hidden_NH: Tensor,
    weight_VH: Tensor,
    bias_V: Tensor | None,
    targets_N: Tensor,
    temperature_N: Tensor,
    others_NK: Tensor,
    plan: HeadPlan,
    *,
    entropy_gradient: bool = False,
) -> TokenScores:
    """Return scores of the tokens `targets_N`, and of `others_NK`, from the hidden states that predict them.

    `temperature_N` divides the logits.
    """
    bias_V = None if bias_V is None else bias_V.to(plan.dtype)
    if plan.own is not None:
        assert not others_NK.numel(), "teachers' tokens are not looked up in shards"
        hidden_NH, targets_N = spread(hidden_NH), targets_N - plan.own.start
    learns = torch.is_grad_enabled()
    trained = weight_VH.requires_grad or (bias_V is not None and bias_V.requires_grad)
    wanted = Wanted(
        early=learns and not (trained or entropy_gradient or others_NK.numel() or plan.own is not None),
        kept=learns and len(hidden_NH) * len(weight_VH) * plan.logits_dtype.itemsize <= plan.kept_bytes,
    )
    logprobs_N, entropy_N, others = _HeadScores.apply(
        hidden_NH.to(plan.dtype), weight_VH, bias_V, targets_N, temperature_N, others_NK, plan, wanted
    )
    return TokenScores(logprobs_N, entropy_N if entropy_gradient else entropy_N.detach(), others)


class _HeadScores(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_NH: Tensor,
        weight_VH: Tensor,
        bias_V: Tensor | None,
        targets_N: Tensor,
        temperature_N: Tensor,
        others_NK: Tensor,
        plan: HeadPlan,
        wanted: Wanted,
    ) -> tuple[Tensor, Tensor, Tensor]:
        count, weight_VH = len(hidden_NH), weight_VH.to(plan.dtype)
        scores_3N = temperature_N.new_empty(3, count, dtype=torch.float32)  # logprobs, entropies, normalisers
        others = temperature_N.new_empty(others_NK.shape, dtype=torch.float32)
        early_NH = torch.empty_like(hidden_NH) if wanted.early else None
        ctx.kept = []
        known_N = targets_N if plan.own is None else targets_N.clamp(0, len(weight_VH) - 1)
        for own in _chunks(count, plan.rows(len(weight_VH))):
            logits_nV = plan.logits(hidden_NH[own], weight_VH, bias_V)
            at = known_N[own], temperature_N[own]
            for row, values in zip(scores_3N, plan.statistics(logits_nV, *at), strict=True):
                row[own] = values
            if others_NK.numel():
                taken = logits_nV.gather(-1, others_NK[own]).float() / at[1][:, None]
                others[own] = taken - scores_3N[2, own][:, None]
            if early_NH is not None:
                ones = torch.ones_like(at[1])
                values = (scores_3N[2, own], scores_3N[1, own], ones, torch.zeros_like(ones))
                early_NH[own] = plan.residual(logits_nV, *at, *values, plan.dtype) @ weight_VH
            elif wanted.kept:
                ctx.kept.append(logits_nV)
        if plan.own is not None:
            scores_3N = over_all_tokens(scores_3N, (targets_N >= 0) & (targets_N < len(weight_VH)))
        ctx.plan = plan
        ctx.is_early = early_NH is not None
        bias = () if bias_V is None else (bias_V,)
        if early_NH is not None:
            ctx.save_for_backward(early_NH)
        else:
            ctx.save_for_backward(hidden_NH, weight_VH, targets_N, temperature_N, others_NK, scores_3N, *bias)
        return scores_3N[0].clone(), scores_3N[1].clone(), others

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        grad_N, entropy_grad_N, others_grad_NK = grad_outputs
        if ctx.is_early:
            (early_NH,) = ctx.saved_tensors
            return ((early_NH * grad_N[:, None]).to(early_NH.dtype), *(None,) * 7)
        plan: HeadPlan = ctx.plan
        hidden_NH, weight_VH, targets_N, temperature_N, others_NK, scores_3N, *bias = ctx.saved_tensors
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        grad_hidden_NH = torch.empty_like(hidden_NH) if needs_hidden else None
        grad_weight_VH = torch.zeros_like(weight_VH, dtype=plan.sum_dtype or plan.dtype) if needs_weight else None
        grad_bias_V = torch.zeros_like(bias[0], dtype=torch.float32) if needs_bias else None
        chunks = list(_chunks(len(hidden_NH), plan.rows(len(weight_VH))))
        for number, own in enumerate(chunks):
            if ctx.kept:
                logits_nV, ctx.kept[number] = ctx.kept[number], None
            else:
                logits_nV = plan.logits(hidden_NH[own], weight_VH, bias[0] if bias else None)
            own_values = targets_N[own], temperature_N[own], scores_3N[2, own], scores_3N[1, own]
            grads = grad_N[own], entropy_grad_N[own]
            if others_NK.numel():
                taught = others_NK[own], others_grad_NK[own]
                grad_nV = residual_with_others(logits_nV, *own_values, *grads, *taught, plan.dtype)
            else:
                grad_nV = plan.residual(logits_nV, *own_values, *grads, plan.dtype)
            del logits_nV
            if grad_hidden_NH is not None:
                grad_hidden_NH[own] = grad_nV @ weight_VH
            if grad_weight_VH is not None and grad_weight_VH.dtype == plan.dtype:
                grad_weight_VH.addmm_(grad_nV.mT, hidden_NH[own])
            elif grad_weight_VH is not None and grad_weight_VH.is_cuda:  # in one kernel, without rounding between
                sums: dict[str, Any] = {"out_dtype": grad_weight_VH.dtype, "out": grad_weight_VH}
                torch.addmm(grad_weight_VH, grad_nV.mT, hidden_NH[own], **sums)
            elif grad_weight_VH is not None:
                grad_weight_VH += grad_nV.mT @ hidden_NH[own]
            if grad_bias_V is not None:
                grad_bias_V += grad_nV.sum(0, dtype=torch.float32)
        bias_grad = None if grad_bias_V is None else grad_bias_V.to(bias[0].dtype)
        return (grad_hidden_NH, grad_weight_VH, bias_grad, *(None,) * 5)


def over_all_tokens(own_3N: Tensor, has_N: Tensor) -> Tensor:
    """Return logprobs, entropies and logs of normalisers over all tokens, from those over each process's tokens.

    With L a process's log of the normaliser, its tokens have a probability of p = exp(L) / sum(exp(L)) together. The
    entropy is the sum of p (H - log(p)), with H the entropy among its tokens. `has_N`: the target is one of this
    process's tokens.
    """
    logprobs_N, entropy_N, normaliser_N = own_3N.double()
    peak_N = reduced(normaliser_N, dist.ReduceOp.MAX)
    below_N = normaliser_N - peak_N
    weights_N = below_N.exp()
    of_target_N = torch.where(has_N, logprobs_N + normaliser_N, 0.0)
    total_N, moment_N, of_target_N = reduced(torch.stack([weights_N, weights_N * (entropy_N - below_N), of_target_N]))
    whole_N = peak_N + total_N.log()
    return torch.stack([of_target_N - whole_N, moment_N / total_N + total_N.log(), whole_N]).float()


def _chunks(count: int, rows: int) -> Iterator[slice]:
    return (slice(start, min(start + rows, count)) for start in range(0, count, rows))


def residual_with_others(
    logits_nV: Tensor,
    targets_n: Tensor,
    temperature_n: Tensor,
    normaliser_n: Tensor,
    entropy_n: Tensor,
    grad_n: Tensor,
    entropy_grad_n: Tensor,
    others_nK: Tensor,
    others_grad_nK: Tensor,
    dtype: torch.dtype,
) -> Tensor:
    """Return `residual` plus the gradients of other tokens' logprobs: same softmax, only their onehots differ."""
    moved_n = others_grad_nK.sum(-1)
    of_own = targets_n, temperature_n, normaliser_n, entropy_n, grad_n + moved_n, entropy_grad_n
    grad_nV = residual(logits_nV, *of_own, torch.float32)
    grad_nV.scatter_add_(1, targets_n[:, None], -(moved_n / temperature_n)[:, None])
    return grad_nV.scatter_add_(1, others_nK, others_grad_nK / temperature_n[:, None]).to(dtype)


# from whole logits ---------------------------------------------------------------------------------------------------


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

    The logits at position t predict the token at t + 1: that of `tokens_BT[b, t]` is in `logits_BTV[b, t - 1]`, so each
    column is at least 1. Scores are computed in fp32 by chunks, and recomputed in the backward pass. `others_NK` are
    ids of further tokens at the same positions whose logprobs are returned.
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
        part = checkpoint(_chunk_scores, *chunk, entropy_gradient, use_reentrant=False)
        assert part is not None
        parts.append(part)
    return TokenScores(*(torch.cat(column) for column in zip(*parts, strict=True)))


def _chunk_scores(
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
