"""Encodes fp32 numbers in 8 bits: blocks of 256 with a scale each (arXiv 2110.02861)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType

import torch
from torch import Tensor

BLOCK = 256
SIGNED: Mapping[str, bool] = MappingProxyType({"exp_avg": True, "exp_avg_sq_root": False})
"""State in 8 bits -> whether it has signs; its scales are the state NAME + `SCALE`."""
SCALE = "_scale"
"""Suffix of a state's name for the scales of its blocks."""
RECODED = 1 << 23
"""Values that are recoded at a time, a multiple of the block."""


@cache
def levels_of(signed: bool, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the 256 values of an 8-bit code within [-1, 1] or [0, 1], ascending, and the midpoints between them.

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
    """Encode flat fp32 values as codes `[n]` and one scale for each block of 256, `[ceil(n / 256)]`."""
    padded = torch.nn.functional.pad(values_n, (0, -len(values_n) % BLOCK)).view(-1, BLOCK)
    scales = padded.abs().amax(-1)
    relative = padded / scales.clamp(min=torch.finfo(torch.float32).tiny)[:, None]
    codes = torch.bucketize(relative, midpoints, out_int32=True).view(-1)[: len(values_n)]
    return codes.to(torch.uint8), scales


def decoded(codes_n: Tensor, scales: Tensor, levels: Tensor) -> Tensor:
    """Decode the result of `encoded` to fp32."""
    return levels[codes_n.int()] * scales.repeat_interleave(BLOCK)[: len(codes_n)]


# ---------------------------------------------------------------- other blocks


@dataclass(frozen=True)
class Scaled:
    """Scales of the blocks of some rows of a parameter, in order. In a stack of matrices, no block spans two."""

    scales: Tensor
    shape: tuple[int, ...]
    """Shape of the rows."""
    first: int
    """Flat index of the first value of the rows in the whole parameter."""

    @property
    def end(self) -> int:
        return self.first + math.prod(self.shape)

    def of(self, start: int, end: int) -> Tensor:
        """Return the scale of each value with a flat index from `start` to `end`, which must lie within these rows."""
        place = torch.arange(start - self.first, end - self.first, device=self.scales.device)
        matrix = math.prod(self.shape[-2:])
        return self.scales[place // matrix * -(-matrix // BLOCK) + place % matrix // BLOCK]


def recoded(
    codes_n: Tensor, known: Sequence[Scaled], shape: tuple[int, ...], first: int, *, signed: bool
) -> tuple[Tensor, Tensor]:
    """Return codes and block scales of some rows, from scales of blocks that may begin at other values.

    A new block whose values all had the same scale keeps the scale and its codes. If rows have a multiple of 256
    values, that holds for all blocks. The values of other blocks are rounded once more. `codes_n` are flat, on any
    device; the rows of `known` cover these; `shape` and `first` are as in `Scaled`.
    """
    levels, midpoints = levels_of(signed, codes_n.device)
    matrix = math.prod(shape[-2:])
    found = [(codes_n[:0], codes_n.new_empty(0, dtype=torch.float32))]
    for begin in range(0, len(codes_n), matrix or 1):
        for start in range(begin, begin + matrix, RECODED):
            end = min(start + RECODED, begin + matrix)
            parts = [(each, max(first + start, each.first), min(first + end, each.end)) for each in known]
            scales_n = torch.cat([part.of(low, high) for part, low, high in parts if low < high]).to(codes_n.device)
            old_n = codes_n[start:end]
            new_n, new = encoded(levels[old_n.int()] * scales_n, midpoints)
            padded = torch.cat([scales_n, scales_n[-1:].expand(-len(scales_n) % BLOCK)]).view(-1, BLOCK)
            old, highest = padded.aminmax(dim=-1)
            kept = old == highest
            kept_n = kept.repeat_interleave(BLOCK)[: len(old_n)]
            found.append((torch.where(kept_n, old_n, new_n), torch.where(kept, old, new)))
    codes, scales = zip(*found, strict=True)
    return torch.cat(codes), torch.cat(scales)
