"""Kernels of packed attention on a GPU, and which of them is the fastest one there.

Both come with torch: FlashAttention-2 (arXiv 2307.08691), and cuDNN's, which knows newer GPUs' instructions. What torch
says of them differs from one version to the next; so a kernel is tried against FlashAttention-2 before it is used.
"""

from __future__ import annotations

import logging
import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from grpo_trainer.microbatches import Packed, layout

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Kernel:
    """Attention over sequences end to end in one row; arguments as `attention.packed_attention` has them.

    Attributes:
        forward: gives the result, and numbers for the backward pass: one for each head and token, in fp32.
        backward: gives the gradients of query, key and value.
        same_shapes: it is built anew for each number of sequences and largest length, so these are rounded up.
    """

    name: str
    forward: Callable[[Tensor, Tensor, Tensor, Tensor, int, float], tuple[Tensor, Tensor]]
    backward: Callable[
        [Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, int, float], tuple[Tensor, Tensor, Tensor]
    ]
    same_shapes: bool = False


def _flash_forward(
    query_THD: Tensor, key_TGD: Tensor, value_TGD: Tensor, boundaries: Tensor, longest: int, scale: float
) -> tuple[Tensor, Tensor]:
    found = torch.ops.aten._flash_attention_forward(
        *(query_THD, key_TGD, value_TGD, boundaries, boundaries, longest, longest, 0.0, True, False), scale=scale
    )
    return found[0], found[1]


def _flash_backward(
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
    no_randomness = torch.zeros(2, dtype=torch.uint64, device=query_THD.device)
    nothing = torch.empty(0, device=query_THD.device)
    inputs = (grad_THD, query_THD, key_TGD, value_TGD, out_THD, normalisers_HT, boundaries, boundaries)
    return torch.ops.aten._flash_attention_backward(
        *(*inputs, longest, longest, 0.0, True, no_randomness, nothing), scale=scale
    )


def _cudnn_forward(
    query_THD: Tensor, key_TGD: Tensor, value_TGD: Tensor, boundaries: Tensor, longest: int, scale: float
) -> tuple[Tensor, Tensor]:
    inputs = (query_THD, key_TGD, value_TGD, None, boundaries, boundaries, longest, longest)
    found = torch.ops.aten._cudnn_attention_forward(*inputs, True, 0.0, True, False, scale=scale)
    tokens, heads, _ = query_THD.shape
    return found[0], found[1].view(heads, tokens)  # theirs is [T, H, 1]: here it is nothing but memory of that size


def _cudnn_backward(
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
    tokens, heads, _ = query_THD.shape
    unused = torch.empty((), dtype=torch.int64, device=query_THD.device)
    inputs = (grad_THD, query_THD, key_TGD, value_TGD, out_THD, normalisers_HT.view(tokens, heads, 1))
    lengths = (boundaries, boundaries, longest, longest)
    return torch.ops.aten._cudnn_attention_backward(*inputs, unused, unused, None, *lengths, 0.0, True, scale=scale)


FLASH = Kernel("flash-attention-2", _flash_forward, _flash_backward)
CUDNN = Kernel("cudnn", _cudnn_forward, _cudnn_backward, same_shapes=True)
KERNELS = {kernel.name: kernel for kernel in (FLASH, CUDNN)}

FEWEST_SEQUENCES = 16
SHORTEST = 256
TRIAL_TOKENS = 8192
REPEATS = 5
AGREES = 0.02
"""Relative distance of two kernels in 16 bits."""
WORTH = 0.95
"""Of the time: less than that is no gain."""


def boundaries_for(kernel: str, packed: Packed) -> tuple[Tensor, int]:
    """A row's boundaries and its longest sequence, as a kernel wants them: rounded up, there are empty sequences."""
    if not KERNELS[kernel].same_shapes:
        return packed.boundaries, packed.longest
    own = packed.boundaries
    count = max(FEWEST_SEQUENCES, 1 << (len(own) - 2).bit_length())
    padded = own.new_full((count + 1,), packed.positions_1T.shape[-1])
    padded[: len(own)] = own
    return padded, max(SHORTEST, 1 << (packed.longest - 1).bit_length())


@dataclass(frozen=True)
class Heads:
    """Of a model's attention."""

    queries: int
    keys: int
    size: int


def fastest(heads: Heads, seq_len: int, dtype: torch.dtype, device: torch.device) -> str:
    """The kernel that is, forward and backward, on a few thousand tokens; it must agree with FlashAttention-2."""
    generator = torch.Generator(device).manual_seed(0)
    lengths = [min(seq_len, TRIAL_TOKENS)] * max(1, TRIAL_TOKENS // seq_len)
    packed = layout([*lengths, 100]).to(device)  # and one whose end is no multiple of anything
    counts = (heads.queries, heads.keys, heads.keys, heads.queries)
    tokens = sum(lengths) + 100
    made = [torch.randn(tokens, n, heads.size, generator=generator, device=device, dtype=dtype) for n in counts]
    wanted, flash_ms = _tried(FLASH, packed, made)
    try:
        got, cudnn_ms = _tried(CUDNN, packed, made)
    except RuntimeError as error:  # of this torch, cuDNN or GPU
        log.info("packed attention: cuDNN's kernel does not run here: %s", str(error).strip().partition("\n")[0])
        return FLASH.name
    if not all((one - other).norm() <= AGREES * other.norm() for one, other in zip(got, wanted, strict=True)):
        log.warning("packed attention: cuDNN's kernel disagrees with FlashAttention-2, which is used")
        return FLASH.name
    chosen = CUDNN if cudnn_ms < WORTH * flash_ms else FLASH
    log.info(
        "packed attention of %d tokens: FlashAttention-2 %.2f ms, cuDNN %.2f ms: %s is used",
        *(tokens, flash_ms, cudnn_ms, chosen.name),
    )
    return chosen.name


def _tried(kernel: Kernel, packed: Packed, made: list[Tensor]) -> tuple[list[Tensor], float]:
    """Result and gradients in fp32, and the median milliseconds of both passes."""
    *inputs, grad_THD = made
    boundaries, longest = boundaries_for(kernel.name, packed)
    scale = inputs[0].shape[-1] ** -0.5

    def both() -> list[Tensor]:
        out_THD, numbers = kernel.forward(*inputs, boundaries, longest, scale)  # type: ignore[arg-type]
        grads = kernel.backward(grad_THD, *inputs, out_THD, numbers, boundaries, longest, scale)  # type: ignore[arg-type]
        return [out_THD, *grads]

    found = [each.float() for each in both()]
    times = []
    for _ in range(REPEATS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        both()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return found, statistics.median(times)
