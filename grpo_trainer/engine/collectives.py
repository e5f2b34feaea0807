"""Operations of several trainer processes within a pass, each of which has a shard of every matrix (tensor parallel).

A layer with sharded matrices begins with `spread` and ends with `join`: between them, each process computes with its
shard. Forward and backward mirror each other (Megatron-LM, arXiv 1909.08053, figure 3):

              forward                    backward
    spread    nothing                    gradients are summed
    join      results are summed         nothing

Numbers in 16 bits are summed in fp32 and rounded once, as one process rounds the result of a whole matrix product.
All processes must make the same calls in the same order.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from grpo_trainer.errors import PeerGoneError

LAST_WORDS = "grpo_last_words"
"""Key of the processes' common store under which one that fails says why."""


@contextmanager
def peers() -> Iterator[None]:
    """Turn torch's error in an operation with other processes into a `PeerGoneError`, which says that one is gone."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise peer_gone(last_words() or str(error).strip().partition("\n")[0]) from None


def peer_gone(why: str) -> PeerGoneError:
    return PeerGoneError(
        "another one has ended, its log says why", field="trainer processes", got=why, fix="continue with --resume auto"
    )


def leave_words(text: str) -> None:
    """Say to the other processes why this one ends; they read it when they find that it is gone."""
    with suppress(RuntimeError, ValueError):  # rank 0, which keeps the words, is gone as well
        dist.distributed_c10d._get_default_store().set(LAST_WORDS, text)


def last_words() -> str:
    """Return why another process has ended; empty: it has not said so."""
    with suppress(RuntimeError, ValueError):
        store = dist.distributed_c10d._get_default_store()
        if store.check([LAST_WORDS]):
            return store.get(LAST_WORDS).decode(errors="replace")
    return ""


def spread(hidden: Tensor) -> Tensor:
    """Return the tensor, which all processes have, for a computation of which each has a part."""
    return _Spread.apply(hidden)


def join(part: Tensor) -> Tensor:
    """Return the sum of all processes' parts."""
    return _Join.apply(part)


def gather_columns(part: Tensor, each: int) -> Tensor:
    """Return all processes' last dimensions, one after the other, each padded with zeros to a length of `each`."""
    return _Gather.apply(part, each)


@torch.no_grad()
def reduced(tensor: Tensor, by: Any = dist.ReduceOp.SUM) -> Tensor:
    """Return the sum (or another reduction) of all processes' tensors; 16 bits are reduced in fp32."""
    whole = tensor.to(torch.float32 if tensor.itemsize < 4 else tensor.dtype, copy=True).contiguous()
    with peers():
        dist.all_reduce(whole, by)
    return whole.to(tensor.dtype)


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor) -> Tensor:
        return hidden.view_as(hidden)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return reduced(grad_outputs[0])


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor) -> Tensor:
        return reduced(part)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return grad_outputs[0]


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, each: int) -> Tensor:
        ctx.own = slice(dist.get_rank() * each, dist.get_rank() * each + part.shape[-1])
        padded = functional.pad(part, (0, each - part.shape[-1])).contiguous()
        parts = [torch.empty_like(padded) for _ in range(dist.get_world_size())]
        with peers():
            dist.all_gather(parts, padded)
        return torch.cat(parts, -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return grad_outputs[0][..., ctx.own], None
