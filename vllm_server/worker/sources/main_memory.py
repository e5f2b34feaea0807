"""A bucket that arrives in main memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


@contextmanager
def in_main_memory(buffer_E: Tensor) -> Iterator[Tensor]:
    """Yield the buffer itself on a CPU, else a tensor in main memory that is copied into it when the block ends."""
    here_E = buffer_E if buffer_E.device.type == "cpu" else torch.empty_like(buffer_E, device="cpu")
    yield here_E
    if here_E is not buffer_E:
        buffer_E.copy_(here_E)
