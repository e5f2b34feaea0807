"""Source `main_memory`: the trainer's main memory, mapped once and copied from there."""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from vllm_server.protocol.page_lock import page_lock
from vllm_server.protocol.weights import MainMemorySource
from vllm_server.worker.packed import Layout
from vllm_server.worker.sources.mapped import MappedWeights


class MemoryMap(MappedWeights):
    """Holds the mapping of the trainer's memory.

    Args:
        layouts: of the buckets.
        device: of the buffers. For a GPU the memory is page-locked.

    Attributes:
        is_locked: whether it is page-locked.

    Raises:
        ValueError: this process does not see the memory; or see `MappedWeights`.
    """

    def __init__(self, source: MainMemorySource, layouts: Sequence[Layout], device: torch.device) -> None:
        memory_B = _mapped(source)
        self.is_locked = device.type == "cuda" and page_lock(memory_B)
        super().__init__([torch.from_numpy(memory_B).untyped_storage()], source.tensors, layouts)


def _mapped(source: MainMemorySource) -> NDArray[np.uint8]:
    try:
        # In another container the same path may lead elsewhere; the name has a random part.
        if str(Path(source.path).readlink()) != f"/memfd:{source.name} (deleted)":
            raise ValueError("it is something else")
        file = os.open(source.path, os.O_RDWR | os.O_CLOEXEC)
        try:
            mapping = mmap.mmap(file, source.nbytes)
        finally:
            os.close(file)
    except (OSError, ValueError) as error:
        raise ValueError(f"this worker does not see the trainer's main memory at {source.path}: {error}") from error
    return np.frombuffer(mapping, np.uint8)
