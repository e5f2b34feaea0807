"""A copy of the tensors of a checkpoint in main memory, made while training stands still, written while it goes on."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from grpo_trainer.main_memory import main_memory

log = logging.getLogger(__name__)

ALIGNMENT = 64
ROOM = 0.8
"""A copy may take this share of the main memory that is available; beyond it there is none."""


class Snapshot:
    """One piece of main memory that copies go into, used again by each: so much it takes, and never more.

    On a machine with a GPU it is page-locked, which makes the copies several times faster.

    Args:
        available: bytes of main memory that may be taken; None: what the machine or its container has left.
    """

    def __init__(self, available: Callable[[], int] | None = None) -> None:
        self._available = available or (lambda: main_memory().available)
        self._memory: NDArray[np.uint8] = np.empty(0, np.uint8)
        self._locked = False
        self._said = False

    def take(self, tree: Any) -> Any | None:
        """Copy every tensor of nested dictionaries, lists and tuples; the rest goes along as it is.

        The copies of the call before are overwritten.

        Returns:
            The same with tensors in main memory; None: there is no room for them.
        """
        size = sum(_aligned(tensor) for tensor in _tensors(tree))
        if not self._make_room(size):
            return None
        start = 0
        devices: set[torch.device] = set()

        def copied(tensor: Tensor) -> Tensor:
            nonlocal start
            if not tensor.numel():
                return tensor.detach().to("cpu", copy=True)
            own = torch.frombuffer(self._memory, dtype=tensor.dtype, count=tensor.numel(), offset=start)
            start += _aligned(tensor)
            if tensor.device.type == "cuda":
                devices.add(tensor.device)
            return own.view(tensor.shape).copy_(tensor.detach(), non_blocking=True)

        copy = _mapped(tree, copied)
        for device in devices:
            torch.cuda.synchronize(device)
        return copy

    def close(self) -> None:
        """Give the memory back; no copy may be in use any more."""
        if self._locked:
            _runtime().cudaHostUnregister(self._memory.ctypes.data)
            self._locked = False
        self._memory = np.empty(0, np.uint8)

    def _make_room(self, size: int) -> bool:
        if size <= len(self._memory):
            return True
        self.close()
        available = self._available()
        if size > ROOM * available:
            if not self._said:
                self._said = True
                log.warning(
                    "checkpoints are written while training waits: a copy takes %.1f GB of main memory, and %.1f GB "
                    "are available",
                    *(size / 1e9, available / 1e9),
                )
            return False
        self._memory = np.empty(size, np.uint8)
        if torch.cuda.is_available():
            self._locked = int(_runtime().cudaHostRegister(self._memory.ctypes.data, size, 0)) == 0
        log.info(
            "checkpoints are written in the background, from a copy in main memory: %.1f MB%s",
            *(size / 1e6, ", page-locked" if self._locked else ""),
        )
        return True


def _runtime() -> Any:
    return torch.cuda.cudart()


def _aligned(tensor: Tensor) -> int:
    return -(-tensor.numel() * tensor.itemsize // ALIGNMENT) * ALIGNMENT


def _tensors(tree: Any) -> list[Tensor]:
    found: list[Tensor] = []
    _mapped(tree, lambda tensor: found.append(tensor) or tensor)
    return found


def _mapped(tree: Any, change: Callable[[Tensor], Tensor]) -> Any:
    match tree:
        case Tensor():
            return change(tree)
        case dict():
            return {key: _mapped(value, change) for key, value in tree.items()}
        case list() | tuple():
            return type(tree)(_mapped(value, change) for value in tree)
        case _:
            return tree
