"""Two Triton kernels that add LoRA adapters to a linear layer's output, for tokens of several versions at once.

`shrink` is `middle += scaling * x A`, `expand` is `y += middle B`. Each token uses the A and B of its slot.

vLLM's kernels follow Punica (Chen et al., 2023, arXiv:2310.18547) and gather the tokens of each adapter. These kernels
process the tokens in their original order. A program reads contiguous rows of `x` or `y`. For each slot that occurs
among its rows, it sets the rows of other slots to zero and multiplies. At ranks of 16 to 64 these products cost almost
nothing compared with reading and writing `y`, and tokens of four versions need no more programs than tokens of one.

Shape letters: M tokens, K inputs, N outputs of one slice, R rank, S slots.
"""

# Triton compiles these functions; a type checker does not understand its declarations:
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from vllm_server import seams


@triton.jit
def shrink(
    x_MK,
    a0_SRK,
    a1_SRK,
    a2_SRK,
    middle,  # fp32, [slices, M, R], zeros
    slots_M,  # int32, of each token; -1: no adapter
    active_slots,  # int32, the slots that occur, padded with -1
    active,  # number of slots to visit
    scaling,
    tokens,
    inputs,
    x_stride,
    RANK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_R: tl.constexpr,
    STEPS: tl.constexpr,  # blocks of inputs per program
):
    part = tl.program_id(2)
    chunks: tl.constexpr = (RANK + BLOCK_R - 1) // BLOCK_R
    slice_id = part // chunks
    if slice_id == 0:
        a = a0_SRK
    elif slice_id == 1:
        a = a1_SRK
    else:
        a = a2_SRK
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    ranks = (part % chunks) * BLOCK_R + tl.arange(0, BLOCK_R)
    in_batch = rows < tokens
    slots = tl.load(slots_M + rows, mask=in_batch, other=-1)
    x_rows = x_MK + rows.to(tl.int64)[:, None] * x_stride
    total = tl.zeros((BLOCK_M, BLOCK_R), dtype=tl.float32)
    for step in range(STEPS):
        columns = (tl.program_id(1) * STEPS + step) * BLOCK_K + tl.arange(0, BLOCK_K)
        x = tl.load(x_rows + columns[None, :], mask=in_batch[:, None] & (columns < inputs)[None, :], other=0.0)
        for i in range(active):
            slot = tl.load(active_slots + i)
            mine = slots == slot
            if (slot >= 0) & (tl.max(mine.to(tl.int32), axis=0) > 0):
                places = slot.to(tl.int64) * RANK * inputs + ranks[None, :] * inputs + columns[:, None]
                # Only slots of this block's rows get here: no other slot's A is read.
                inside = (ranks < RANK)[None, :] & (columns < inputs)[:, None]
                a_KR = tl.load(a + places, mask=inside, other=0.0)
                total += tl.dot(tl.where(mine[:, None], x, 0.0), a_KR)
    out = middle + (slice_id * tokens + rows[:, None]) * RANK + ranks[None, :]
    # Several programs share one output, because the inputs are split between them.
    tl.atomic_add(out, total * scaling, mask=(slots >= 0)[:, None] & (ranks < RANK)[None, :], sem="relaxed")


@triton.jit
def expand(
    middle,  # fp32, [slices, M, R]
    b0_SNR,
    b1_SNR,
    b2_SNR,
    y,  # [M, all outputs]
    slots_M,
    active_slots,
    active,
    tokens,
    start0,
    start1,
    start2,
    width0,
    width1,
    width2,
    y_stride,
    ADD: tl.constexpr,  # add to `y` instead of overwriting it
    RANK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    slice_id = tl.program_id(2)
    if slice_id == 0:
        b, start, width = b0_SNR, start0, width0
    elif slice_id == 1:
        b, start, width = b1_SNR, start1, width1
    else:
        b, start, width = b2_SNR, start2, width2
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    if tl.program_id(0) * BLOCK_N < width:
        in_batch = rows < tokens
        slots = tl.load(slots_M + rows, mask=in_batch, other=-1)
        mask = (slots >= 0)[:, None] & (columns < width)[None, :]
        out = y + rows.to(tl.int64)[:, None] * y_stride + (start + columns)[None, :]
        total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        if ADD:  # loaded first, so that the load overlaps with the products
            total += tl.load(out, mask=mask, other=0.0).to(tl.float32)
        middle_rows = middle + (slice_id * tokens + rows[:, None]) * RANK
        for chunk in tl.static_range((RANK + BLOCK_R - 1) // BLOCK_R):
            ranks = chunk * BLOCK_R + tl.arange(0, BLOCK_R)
            inside = (ranks < RANK)[None, :]
            h_MR = tl.load(middle_rows + ranks[None, :], mask=in_batch[:, None] & inside, other=0.0)
            h_MR = h_MR.to(b.dtype.element_ty)
            for i in range(active):
                slot = tl.load(active_slots + i)
                mine = slots == slot
                if (slot >= 0) & (tl.max(mine.to(tl.int32), axis=0) > 0):
                    places = (slot.to(tl.int64) * width + columns[:, None]) * RANK + ranks[None, :]
                    b_NR = tl.load(b + places, mask=(columns < width)[:, None] & inside, other=0.0)
                    total += tl.dot(tl.where(mine[:, None], h_MR, 0.0), tl.trans(b_NR))
        tl.store(out, total.to(y.dtype.element_ty), mask=mask)


# ----------------------------------------------------------------------------------------------------------------------
# Run vLLM's two LoRA operators with these kernels. They keep vLLM's names and arguments, so compiled models and
# captured graphs find the new code under the old names.


MOST_SLICES = 3
"""The limit is query, key and value in one matrix; gate and up are two slices."""

_SHRINK: Any = shrink  # launched as `kernel[grid](…)`, with Triton's own options
_EXPAND: Any = expand

_library: torch.library.Library | None = None
"""Held for the life of the process: torch removes the operators when this object is freed."""


@dataclass(frozen=True)
class Blocks:
    """Block sizes of one program, and its number of warps (32 threads each)."""

    tokens: int
    outer: int  # inputs of `shrink`, outputs of `expand`
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

    `outputs` are those of the widest slice.
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
    """Replace vLLM's operators in the worker's process, before its model is loaded."""
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
