"""Main memory for copies of tensors: one block, which is used again for each copy.

On a machine with a GPU it is page-locked: the GPU then copies by itself, several times faster.
"""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

ALIGNMENT = 64


class LockedMemory:
    """A block of main memory that tensors are taken from, one after the other.

    Args:
        size: its bytes, see `bytes_for`.
        shared: whether other processes of this user can map it.

    Attributes:
        is_locked: whether it is page-locked.
        path: opens it in another process, as long as this object or one of its tensors is there; empty: not shared.
        address: of its first byte.
    """

    def __init__(self, size: int = 0, *, shared: bool = False) -> None:
        self.path = ""
        if shared:  # a file without a name: its memory ends with the last process that has it
            file = os.memfd_create("grpo")
            os.ftruncate(file, size)
            self._bytes = np.frombuffer(mmap.mmap(file, size), np.uint8)
            weakref.finalize(self._bytes, os.close, file)
            self.path = f"/proc/{os.getpid()}/fd/{file}"
        else:
            self._bytes = np.empty(size, np.uint8)
        self.address = self._bytes.ctypes.data
        self._bytes.fill(0)  # allocates the pages before they are locked: slow, and CUDA would be blocked meanwhile
        self._start = 0
        self.is_locked = False
        if size and torch.cuda.is_available():
            runtime: Any = torch.cuda.cudart()
            self.is_locked = int(runtime.cudaHostRegister(self.address, size, 0)) == 0
            if self.is_locked:  # until neither this object nor a tensor needs the memory
                weakref.finalize(self._bytes, runtime.cudaHostUnregister, self.address).atexit = False

    def __len__(self) -> int:
        return len(self._bytes)

    def restart(self) -> None:
        """Take the next tensors from the beginning again: they overwrite those that were taken."""
        self._start = 0

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return a tensor in the block; one without elements lies outside."""
        count = torch.Size(shape).numel()
        if not count:
            return torch.empty(shape, dtype=dtype)
        taken = torch.frombuffer(self._bytes, dtype=dtype, count=count, offset=self._start)
        self._start += bytes_for([count], dtype)
        return taken.view(shape)


def bytes_for(counts: Iterable[int], dtype: torch.dtype) -> int:
    """Return the bytes that tensors with these numbers of elements take."""
    return sum(-(-count * dtype.itemsize // ALIGNMENT) * ALIGNMENT for count in counts)
