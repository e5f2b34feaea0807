"""torch's allocator of GPU memory: how it takes memory from the driver.

Passes have different lengths. With segments of fixed size, the freed memory of one pass has gaps that the next can't
use: 13 GB after eleven steps of 1.5B with passes of 16,384 tokens. Segments that grow leave almost none. But memory of
such a segment can't be mapped by another process over CUDA IPC.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

KEY = "expandable_segments"
VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""The user's settings; torch reads the first one that is set."""
_changing = threading.Lock()
"""Settings are those of the process, and bridges to several servers allocate in threads."""


def grow_segments() -> None:
    """Let segments grow, on GPUs, unless the user has set it; keep the user's other settings."""
    if torch.cuda.is_available() and KEY not in _asked():
        _set(expandable=True)


@contextmanager
def shareable() -> Iterator[None]:
    """Allocate the memory that the block asks for where CUDA IPC can hand it to another process."""
    if not torch.cuda.is_available():
        yield
        return
    with _changing:
        _set(expandable=False)
        try:
            yield
        finally:
            torch._C._accelerator_setAllocatorSettings(_asked())
            grow_segments()


def with_segments(asked: str, *, expandable: bool) -> str:
    """Return allocator settings with segments as wanted, and else as in `asked`."""
    others = [setting for setting in asked.split(",") if setting.strip() and KEY not in setting]
    return ",".join([*others, f"{KEY}:{expandable}"])


def _asked() -> str:
    return next((os.environ[name] for name in VARIABLES if os.environ.get(name)), "")


def _set(*, expandable: bool) -> None:
    torch._C._accelerator_setAllocatorSettings(with_segments(_asked(), expandable=expandable))
