"""Source `main_memory`: the trainer's main memory, mapped once and copied from there."""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vllm_server.protocol.weights import MainMemorySource
from vllm_server.worker.packed import Layout


class MemoryMap:
    """Holds the mapping of the trainer's memory. It is page-locked for a GPU, which then copies by itself.

    Args:
        layouts: of the buckets.

    Attributes:
        is_locked: whether it is page-locked.

    Raises:
        ValueError: this process does not see the memory, or a tensor of a bucket is missing.
    """

    def __init__(self, source: MainMemorySource, layouts: Sequence[Layout], device: torch.device) -> None:
        mapping = _mapped(source)
        self.is_locked = device.type == "cuda" and _lock(mapping)
        bytes_B = torch.from_numpy(mapping)
        self._layouts = layouts
        self._theirs: dict[str, Tensor] = {}
        for name, tensor in source.tensors.items():
            elements = bytes_B[: len(bytes_B) // 16 * 16].view(getattr(torch, tensor.dtype))
            self._theirs[name] = elements.as_strided(tensor.shape, tensor.stride, tensor.offset)
        if missing := [name for layout in layouts for name in layout.places if name not in self._theirs]:
            raise ValueError(f"no memory was named for {missing[0]} ({len(missing)} in all)")

    def fill(self, version: int, number: int, buffer_E: Tensor) -> None:
        """Copy a bucket into a buffer on any device. The trainer does not write meanwhile."""
        for name, place in self._layouts[number].places.items():
            buffer_E[place.offset : place.end].view(place.shape).copy_(self._theirs[name], non_blocking=True)

    def close(self) -> None:
        """Do nothing: the mapping ends with its last reference, which a copy in progress may have."""


def _mapped(source: MainMemorySource) -> NDArray[np.uint8]:
    try:
        file = os.open(source.path, os.O_RDWR | os.O_CLOEXEC)
        try:
            mapping = mmap.mmap(file, source.nbytes)
        finally:
            os.close(file)
    except (OSError, ValueError) as error:
        raise ValueError(f"this worker does not see the trainer's main memory, {source.path}: {error}") from error
    return np.frombuffer(mapping, np.uint8)


def _lock(mapping: NDArray[np.uint8]) -> bool:
    """Page-lock memory until no tensor needs it; return whether it worked."""
    runtime: Any = torch.cuda.cudart()
    address = mapping.ctypes.data
    if int(runtime.cudaHostRegister(address, len(mapping), 0)) != 0:
        return False
    weakref.finalize(mapping, runtime.cudaHostUnregister, address).atexit = False
    return True
