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

import triton
import triton.language as tl


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
