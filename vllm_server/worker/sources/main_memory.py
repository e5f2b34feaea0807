"""Source `main_memory`: the trainer's main memory, mapped once and copied from there."""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vllm_server.protocol.page_lock import page_lock
from vllm_server.protocol.weights import MainMemorySource
from vllm_server.worker.packed import Layout


class MemoryMap:
    """Holds the mapping of the trainer's memory.

    Args:
        layouts: of the buckets.
        device: of the buffers. For a GPU the memory is page-locked.

    Attributes:
        is_locked: whether it is page-locked.

    Raises:
        ValueError: this process does not see the memory, or a tensor of a bucket is missing or has another shape.
    """

    def __init__(self, source: MainMemorySource, layouts: Sequence[Layout], device: torch.device) -> None:
        mapped_B = _mapped(source)
        self.is_locked = device.type == "cuda" and page_lock(mapped_B)
        bytes_B = torch.from_numpy(mapped_B)
        self._layouts = layouts
        self._theirs: dict[str, Tensor] = {}
        for name, tensor in source.tensors.items():
            dtype = getattr(torch, tensor.dtype)
            whole_E = bytes_B[: len(bytes_B) // dtype.itemsize * dtype.itemsize].view(dtype)
            self._theirs[name] = whole_E.as_strided(tensor.shape, tensor.stride, tensor.offset)
        for name, place in ((name, place) for layout in layouts for name, place in layout.places.items()):
            if name not in self._theirs or tuple(self._theirs[name].shape) != tuple(place.shape):
                raise ValueError(f"no memory was named for {name} with the shape {tuple(place.shape)}")

    def fill(self, version: int, number: int, buffer_E: Tensor) -> None:
        """Copy a bucket into a buffer on any device. The trainer does not write meanwhile."""
        for name, place in self._layouts[number].places.items():
            buffer_E[place.offset : place.end].view(place.shape).copy_(self._theirs[name], non_blocking=True)

    def close(self) -> None:
        """Do nothing: the mapping ends with its last reference, which a copy in progress may have."""


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
