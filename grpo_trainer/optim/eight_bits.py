"""fp32 numbers in 8 bits: blocks of 256 with a scale each (arXiv 2110.02861)."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

BLOCK = 256


@cache
def levels_of(signed: bool, device: torch.device) -> tuple[Tensor, Tensor]:
    """The 256 values of 8 bits within [-1, 1] or [0, 1], ascending, and the midpoints between them.

    Dynamic exponents (arXiv 1511.04561): seven decades, each with twice the steps of the one below.
    """
    values = [0.0, 1.0]
    for decade in range(7):
        edges = torch.linspace(0.1, 1.0, (1 << decade if signed else 2 << decade) + 1, dtype=torch.float64)
        middles = 10.0 ** (decade - 6) * (edges[1:] + edges[:-1]) / 2
        values += middles.tolist() + ((-middles).tolist() if signed else [])
    levels = torch.tensor(sorted(values), dtype=torch.float32, device=device)
    assert len(levels) == 256
    return levels, (levels[1:] + levels[:-1]) / 2


def encoded(values_n: Tensor, midpoints: Tensor) -> tuple[Tensor, Tensor]:
    """Flat fp32 values as codes `[n]` and one scale for each block of 256, `[ceil(n / 256)]`."""
    padded = torch.nn.functional.pad(values_n, (0, -len(values_n) % BLOCK)).view(-1, BLOCK)
    scales = padded.abs().amax(-1)
    relative = padded / scales.clamp(min=torch.finfo(torch.float32).tiny)[:, None]
    codes = torch.bucketize(relative, midpoints, out_int32=True).view(-1)[: len(values_n)]
    return codes.to(torch.uint8), scales


def decoded(codes_n: Tensor, scales: Tensor, levels: Tensor) -> Tensor:
    """What was `encoded`, in fp32."""
    return levels[codes_n.int()] * scales.repeat_interleave(BLOCK)[: len(codes_n)]
