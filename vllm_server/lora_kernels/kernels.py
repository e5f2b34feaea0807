"""Two Triton kernels that add a LoRA adapter to a linear layer's output, for tokens of several versions at once.

`shrink` is `middle += scaling * x A`, `expand` is `y += middle B`, where each token has the A and B of its own slot.

Other than vLLM's, which follow Punica (Chen et al., 2023, arXiv:2310.18547) and gather the tokens of each adapter,
these go through the tokens in their own order: a program reads its rows of `x` or `y` as they lie in memory, and
multiplies them with each slot that some of them have, the others' rows set to zero. At ranks of 16 to 64 the products
cost next to nothing beside reading and writing `y`; tokens of four versions need no more programs than those of one.

Letters of shapes: M tokens, K inputs, N outputs of one slice, R rank, S slots.
"""

# Triton compiles these functions; what it declares is for Python's interpreter:
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
    active_slots,  # int32, those that occur, filled up with -1
    active,  # how many of them to look at
    scaling,
    tokens,
    inputs,
    x_stride,
    RANK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_R: tl.constexpr,
    STEPS: tl.constexpr,  # blocks of inputs that one program goes through
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
                inside = (ranks < RANK)[None, :] & (columns < inputs)[:, None]
                a_KR = tl.load(a + places, mask=inside, other=0.0)
                total += tl.dot(tl.where(mine[:, None], x, 0.0), a_KR)
    out = middle + (slice_id * tokens + rows[:, None]) * RANK + ranks[None, :]
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
    ADD: tl.constexpr,  # to what `y` holds
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
        if ADD:  # asked for first, so that it comes while the rest is computed
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
