"""Large files, written and read in parts by several threads, and page-locked memory; for both sides. Needs torch.

One thread copies 1 to 3 GB/s between memory and the operating system's file cache. File systems let one thread at a
time write into a file, and any number read it: so several files are written at once, and one file is read by several
threads.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

PART_BYTES = 16 << 20
THREADS = 8
"""At most; the server's own processes need cores as well."""

T = TypeVar("T")


class PartMemory:
    """One thread's memory for a part on its way between a device and a file. It is kept between files.

    For a GPU the memory is page-locked, so that the GPU copies it by itself.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    @cached_property
    def _part_B(self) -> Tensor:
        if self._device.type != "cuda":
            return torch.empty(PART_BYTES, dtype=torch.uint8)
        with torch.cuda.device(self._device):  # page-locking opens a context on the current GPU
            return torch.empty(PART_BYTES, dtype=torch.uint8, pin_memory=True)

    @cached_property
    def _stream(self) -> torch.cuda.Stream:
        return torch.cuda.Stream(self._device)

    def write(self, file: int, offset: int, tensor: Tensor, dtype: torch.dtype) -> None:
        """Write a tensor in a dtype at a byte of a file. Raise an OSError if it can't be written."""
        flat_E = tensor.detach().reshape(-1)
        step = PART_BYTES // dtype.itemsize
        for start in range(0, flat_E.numel(), step):
            part_E = flat_E[start : start + step]
            if part_E.device.type != "cpu" or part_E.dtype != dtype:
                here_E = self._part_B[: part_E.numel() * dtype.itemsize].view(dtype)
                if part_E.device.type != "cpu":
                    # `copy_` would bring the GPU's dtype here, through memory that is not page-locked, and convert it
                    # on the CPU: for a 7B model in fp32 a publish took 26 s.
                    part_E = part_E.to(dtype)
                part_E = here_E.copy_(part_E)
            write_at(file, memory_of(part_E), offset + start * dtype.itemsize)

    def read(self, file: int, offset: int, target_B: Tensor) -> None:
        """Read at most `PART_BYTES` bytes at a byte of a file into a tensor on any device; they are there on return.

        Raise a ValueError if the file ends before, and an OSError if it can't be read.
        """
        if target_B.device.type == "cpu":
            read_at(file, memory_of(target_B), offset)
            return
        here_B = self._part_B[: len(target_B)]
        read_at(file, memory_of(here_B), offset)
        with torch.cuda.stream(self._stream):
            target_B.copy_(here_B, non_blocking=True)
            self._stream.synchronize()


class PartThreads:
    """Threads that each have a `PartMemory`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        cores = len(os.sched_getaffinity(0))
        self._pool = ThreadPoolExecutor(min(THREADS, cores), thread_name_prefix="file parts")
        self._own = threading.local()

    def each(self, work: Callable[[PartMemory, T], None], items: Iterable[T]) -> None:
        """Do the work for each item; when all threads are done, raise what it raised for the first item that failed."""
        done = [self._pool.submit(self._do, work, item) for item in items]
        wait(done)  # even if one fails, so that no thread uses the file or the tensor afterwards
        for one in done:
            one.result()

    def _do(self, work: Callable[[PartMemory, T], None], item: T) -> None:
        memory: PartMemory | None = getattr(self._own, "memory", None)
        if memory is None:
            memory = self._own.memory = PartMemory(self._device)
        work(memory, item)

    def close(self) -> None:
        """End the threads when the work that they have is done, and free their memory."""
        self._pool.shutdown(wait=False)  # who waits for work that is cancelled would wait for ever


def memory_of(tensor: Tensor) -> memoryview:
    """Return the bytes of a flat tensor in main memory."""
    return tensor.view(torch.uint8).numpy().data


def write_at(file: int, data: memoryview | bytes, offset: int) -> None:
    """Write all of `data` at a byte of an open file."""
    rest = memoryview(data)
    while rest:
        count = os.pwrite(file, rest, offset)
        rest, offset = rest[count:], offset + count


def read_at(file: int, memory: memoryview, offset: int) -> None:
    """Fill the memory from a byte of an open file. Raise a ValueError if the file ends before."""
    wanted = offset + len(memory)
    while memory:
        count = os.preadv(file, [memory], offset)
        if not count:
            raise ValueError(f"ends after {offset} of at least {wanted} bytes")
        memory, offset = memory[count:], offset + count


def page_lock(memory_B: NDArray[np.uint8]) -> bool:
    """Page-lock memory until neither the array nor a tensor of it is left; return whether it worked.

    A GPU copies it by itself then, several times faster. CUDA must be available.
    """
    runtime: Any = torch.cuda.cudart()
    address = memory_B.ctypes.data
    if int(runtime.cudaHostRegister(address, len(memory_B), 0)) != 0:
        with suppress(RuntimeError):  # CUDA keeps the error, and the next kernel that is launched reports it
            torch.zeros(1, device="cuda").add_(1)
        return False
    weakref.finalize(memory_B, runtime.cudaHostUnregister, address).atexit = False
    return True
