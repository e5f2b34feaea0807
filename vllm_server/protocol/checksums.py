"""Checksums of weights, for both sides: equal bits at equal places have equal sums. Needs torch."""

from __future__ import annotations

import torch
from torch import Tensor

_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
_WEIGHTS = 8191
"""A prime: an element's bits are multiplied by 1 to 8191, depending on its place, so that an exchange shows."""

_PIECE = 16 << 20
"""Elements at a time: they take 8 bytes each meanwhile."""


def checksum(tensor: Tensor, first: int = 0) -> int:
    """Return the sum of the elements' bits, each multiplied by a number that its place determines, modulo 2^64.

    Sums of parts add up to the sum of the whole, if `first` says where a part begins. Zeros add nothing.

    Args:
        tensor: floats of any shape, on any device.
        first: flat place of its first element.
    """
    bits_E = tensor.detach().contiguous().view(-1).view(_INTEGERS[tensor.element_size()])
    sums = []
    for start in range(0, len(bits_E), _PIECE):
        piece_E = bits_E[start : start + _PIECE].to(torch.int64)
        places_E = torch.arange(first + start, first + start + len(piece_E), device=piece_E.device) % _WEIGHTS + 1
        sums.append(int((piece_E * places_E).sum()))
    return added(sums)


def added(sums: list[int]) -> int:
    """Return the checksum of a whole from those of its parts."""
    total = sum(sums) % 2**64
    return total - 2**64 if total >= 2**63 else total
