"""A Triton kernel that merges two parts of a softmax in one pass over both: see `attention`."""

# Triton compiles this function, so pyright's view of its types is wrong:
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

ROWS = 32
"""Tokens of one program."""


@triton.jit
def merge(
    out,
    normalisers,
    seen,
    seen_normalisers,
    rows,
    out_row,
    out_head,
    normalisers_head,
    seen_row,
    seen_head,
    seen_normalisers_head,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    head = tl.program_id(1)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    inside = row < rows
    own_log = tl.load(normalisers + head * normalisers_head + row, mask=inside, other=0.0)
    seen_log = tl.load(seen_normalisers + head * seen_normalisers_head + row, mask=inside, other=0.0)
    larger = tl.maximum(own_log, seen_log)
    whole = larger + tl.log(tl.exp(own_log - larger) + tl.exp(seen_log - larger))
    mask = inside[:, None] & (column < SIZE)[None, :]
    own_places = out + row.to(tl.int64)[:, None] * out_row + head * out_head + column[None, :]
    seen_places = seen + row.to(tl.int64)[:, None] * seen_row + head * seen_head + column[None, :]
    own_part = tl.load(own_places, mask=mask, other=0.0).to(tl.float32) * tl.exp(own_log - whole)[:, None]
    seen_part = tl.load(seen_places, mask=mask, other=0.0).to(tl.float32) * tl.exp(seen_log - whole)[:, None]
    tl.store(own_places, (own_part + seen_part).to(out.dtype.element_ty), mask=mask)
    tl.store(normalisers + head * normalisers_head + row, whole, mask=inside)


_MERGE: Any = merge  # launched as `kernel[grid](…)`, with Triton's own options too


def launch(out_RHD: Tensor, normalisers_HR: Tensor, seen_RHD: Tensor, seen_HR: Tensor) -> None:
    """Launch the kernel; see `attention.merge`."""
    rows, heads, size = out_RHD.shape
    strides = (*out_RHD.stride()[:2], normalisers_HR.stride(0), *seen_RHD.stride()[:2], seen_HR.stride(0))
    _MERGE[(-(-rows // ROWS), heads)](
        *(out_RHD, normalisers_HR, seen_RHD, seen_HR, rows, *strides),
        SIZE=size,
        BLOCK=1 << (size - 1).bit_length(),
        ROWS=ROWS,
        num_warps=4,
    )
