"""Writing beside the forward passes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


def stream_beside(device: torch.device) -> torch.cuda.Stream | None:
    """Return a stream of its own on a GPU; None on a CPU."""
    return torch.cuda.Stream(device) if device.type == "cuda" else None


@contextmanager
def writing_on(stream: torch.cuda.Stream | None) -> Iterator[None]:
    """Write on a stream, concurrently with forward passes that do not read the target; on a CPU write at once.

    The writes are complete when the block ends.
    """
    if stream is None:
        with torch.no_grad():
            yield
        return
    with torch.no_grad(), torch.cuda.stream(stream):
        yield
        stream.synchronize()
