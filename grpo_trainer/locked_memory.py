"""Main memory for copies of tensors: one block, which is used again for each copy.

On a machine with a GPU it is page-locked: the GPU then copies by itself, several times faster.
"""

from __future__ import annotations

import mmap
import os
import secrets
import weakref
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vllm_server.protocol.file_parts import page_lock

ALIGNMENT = 64


class LockedMemory:
    """A block of main memory, of as many bytes as `bytes_for` returns, from which tensors are taken in order.

    If it is shared, other processes of this user can map it, where the system gives files in memory.
    """

    def __init__(self, size: int = 0, *, shared: bool = False) -> None:
        self.name = ""
        """Of the file that it is, if it can be mapped, else empty. It is in no folder; the last process that closes it
        frees it."""
        self.path = ""
        """Opens this file as long as this object or one of its tensors is there."""
        file = self._file(size) if shared else None
        self._bytes: NDArray[np.uint8] = np.empty(size, np.uint8) if file is None else file
        self.address = self._bytes.ctypes.data  # of its first byte
        self._bytes.fill(0)  # allocates the pages before they are locked: slow, and CUDA would be blocked meanwhile
        self._start = 0
        self.is_locked = bool(size) and torch.cuda.is_available() and page_lock(self._bytes)

    def _file(self, size: int) -> NDArray[np.uint8] | None:
        """Return memory that is a file, and note its name and path; None if the system gives none."""
        name = f"grpo-{secrets.token_hex(8)}"
        try:
            file = os.memfd_create(name)
        except OSError:  # a sandbox may forbid it
            return None
        try:
            os.ftruncate(file, size)
            memory = np.frombuffer(mmap.mmap(file, size), np.uint8)
        except (OSError, ValueError):  # no room, or nothing to share
            os.close(file)
            return None
        weakref.finalize(memory, os.close, file)
        self.name, self.path = name, f"/proc/{os.getpid()}/fd/{file}"
        return memory

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
