"""Several tensors as one flat tensor, and back."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def joined(tensors: Sequence[Tensor]) -> Tensor:
    """Return the tensors' values in one flat tensor: the memory of a single contiguous one, or else a copy."""
    if len(tensors) == 1 and tensors[0].is_contiguous():
        return tensors[0].detach().view(-1)
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


@torch.no_grad()
def hand_out(flat: Tensor, tensors: Sequence[Tensor]) -> None:
    """Write the values of `joined(tensors)` back into the tensors, unless they are their memory."""
    if flat.data_ptr() == tensors[0].data_ptr():
        return
    parts = flat.split([tensor.numel() for tensor in tensors])
    torch._foreach_copy_(  # pyright: ignore[reportPrivateImportUsage]
        list(tensors), [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]
    )
