"""Run vLLM's two LoRA operators with our kernels.

The operators keep vLLM's names and arguments, so compiled models and captured graphs find the new code under the old
names.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from vllm_server import seams
from vllm_server.lora_kernels import kernels

MOST_SLICES = 3
"""The limit is query, key and value in one matrix; gate and up are two slices."""

_SHRINK: Any = kernels.shrink  # launched as `kernel[grid](…)`, with Triton's own options
_EXPAND: Any = kernels.expand

_library: torch.library.Library | None = None
"""Held for the life of the process: torch removes the operators when this object is freed."""


@dataclass(frozen=True)
class Blocks:
    """Block sizes of one program, and its number of warps (32 threads each)."""

    tokens: int
    outer: int
    """Inputs of `shrink`, outputs of `expand`."""
    warps: int
    steps: int = 1


NARROW = 4096
"""Up to this many inputs or outputs a matrix counts as narrow: it needs fewer programs."""
DECODING = 512
"""Up to this many tokens a step counts as a decode step."""


def shrink_blocks(tokens: int, inputs: int) -> Blocks:
    """Return the fastest of 72 block sizes, measured on an H200 with rank 16.

    The times were summed over the layers of a 7B shape, for one version and for four mixed. The tokens of a decode step
    are too few to fill the GPU, so the inputs are split between programs and their sums added.
    """
    if inputs <= NARROW:
        return Blocks(32, 128 if tokens <= 64 else 256, warps=4)
    if tokens <= DECODING:
        return Blocks(32, 128, warps=4, steps=1 if tokens <= 64 else 2 if tokens <= 256 else 4)
    return Blocks(32, 256, warps=4)


def expand_blocks(tokens: int, outputs: int) -> Blocks:
    """Return the fastest of 22 block sizes, measured as for `shrink`: small blocks, so that many loads overlap.

    Args:
        outputs: of the widest slice.
    """
    if tokens <= DECODING:
        return Blocks(32, 128 if outputs > NARROW and tokens > 64 else 64, warps=4)
    return Blocks(32, 256, warps=4)


def rank_block(rank: int) -> int:
    """Return the ranks per block; Triton multiplies matrices of at least 16 by 16."""
    return min(64, max(16, 1 << (rank - 1).bit_length()))


def can_run(weights: Sequence[torch.Tensor]) -> bool:
    """Return whether the kernels support a layer's A or B: 16 bits and at most three slices."""
    return len(weights) <= MOST_SLICES and all(w.dtype in (torch.float16, torch.bfloat16) for w in weights)


def run_shrink(
    x_MK: torch.Tensor,
    a: Sequence[torch.Tensor],
    middle: torch.Tensor,
    slots_M: torch.Tensor,
    active_slots: torch.Tensor,
    active: int,
    scaling: float,
    *,
    blocks: Blocks | None = None,
) -> None:
    """Compute `middle[s, m] = scaling * x[m] A_s[slot of m]`, with zeros for tokens without an adapter.

    `a`: each `[S, (1,) R, K]`, contiguous; `middle`: `[slices, M, R]`, float32.
    """
    tokens, inputs = x_MK.shape
    rank = a[0].shape[-2]
    blocks = blocks or shrink_blocks(tokens, inputs)
    middle.zero_()
    chunks = -(-rank // rank_block(rank))
    grid = (-(-tokens // blocks.tokens), -(-inputs // (blocks.outer * blocks.steps)), len(a) * chunks)
    _SHRINK[grid](
        x_MK,
        *_three(a),
        middle,
        slots_M,
        active_slots,
        active,
        scaling,
        tokens,
        inputs,
        x_MK.stride(0),
        RANK=rank,
        BLOCK_M=blocks.tokens,
        BLOCK_K=blocks.outer,
        BLOCK_R=rank_block(rank),
        STEPS=blocks.steps,
        num_warps=blocks.warps,
    )


def run_expand(
    middle: torch.Tensor,
    b: Sequence[torch.Tensor],
    y: torch.Tensor,
    slots_M: torch.Tensor,
    active_slots: torch.Tensor,
    active: int,
    start: int,
    add: bool,
    *,
    blocks: Blocks | None = None,
) -> None:
    """Compute `y[m, columns of s] (+)= middle[s, m] B_s[slot of m]`. Rows without an adapter do not change.

    `b`: each `[S, (1,) N_s, R]`, contiguous; `y`: `[M, N]`, the slices next to each other from column `start` on.
    """
    tokens, rank = middle.shape[1], middle.shape[2]
    widths = [w.shape[-2] for w in b]
    blocks = blocks or expand_blocks(tokens, max(widths))
    starts = [start + sum(widths[:i]) for i in range(len(b))]
    grid = (-(-max(widths) // blocks.outer), -(-tokens // blocks.tokens), len(b))
    _EXPAND[grid](
        middle,
        *_three(b),
        y,
        slots_M,
        active_slots,
        active,
        tokens,
        *_three(starts),
        *_three(widths),
        y.stride(0),
        ADD=add,
        RANK=rank,
        BLOCK_M=blocks.tokens,
        BLOCK_N=blocks.outer,
        BLOCK_R=rank_block(rank),
        num_warps=blocks.warps,
    )


def _three(values: Sequence[Any]) -> list[Any]:
    return [*values, *[values[-1]] * (MOST_SLICES - len(values))]


def install() -> None:
    """Replace vLLM's operators in the worker's process, before its model is loaded.

    Raises:
        FatalError: this vLLM has its LoRA operators elsewhere.
    """
    global _library
    module = "vllm.lora.ops.triton_ops"
    shrink = seams.require(f"{module}.lora_shrink_op", "_lora_shrink")
    expand = seams.require(f"{module}.lora_expand_op", "_lora_expand")
    _library = torch.library.Library("vllm", "IMPL")
    key = seams.require("vllm.platforms", "current_platform").dispatch_key
    _library.impl("lora_shrink", _shrink_in_place_of(shrink), key, allow_override=True)
    _library.impl("lora_expand", _expand_in_place_of(expand), key, allow_override=True)


def _shrink_in_place_of(vllms: Callable[..., None]) -> Callable[..., None]:
    def lora_shrink(x: torch.Tensor, a: list[torch.Tensor], middle: torch.Tensor, *rest: Any) -> None:
        slots, _, _, _, active_slots, none, active, scaling = rest
        if none.item():
            return
        if can_run(a):
            run_shrink(x, a, middle, slots, active_slots, int(active.item()), scaling)
        else:
            vllms(x, a, middle, *rest)

    return lora_shrink


def _expand_in_place_of(vllms: Callable[..., None]) -> Callable[..., None]:
    def lora_expand(middle: torch.Tensor, b: list[torch.Tensor], y: torch.Tensor, *rest: Any) -> None:
        slots, _, _, _, active_slots, none, active, *options = rest
        start = options[0] if options else 0  # torch omits arguments that equal the operator's defaults
        add = len(options) > 1 and options[1]
        if none.item():
            return
        if can_run(b):
            run_expand(middle, b, y, slots, active_slots, int(active.item()), start, add)
        else:
            vllms(middle, b, y, *rest)

    return lora_expand
