"""Checkpoints while training continues: when one is due, a copy of its tensors in main memory, and the thread.

On a GPU, a separate stream copies during the next step's forward and backward passes:

    training   … update ─┬─ forward, backward of the next step ─┬─ next update …
                         │                                      │ waits, on the GPU, for the copy to be whole
    copies               └─ weights and states ─────────────────┘
    writer                  waits for the copy to be whole ─▶ writes
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import torch
from torch import Tensor

from grpo_trainer.locked_memory import LockedMemory, bytes_for
from grpo_trainer.machine import main_memory

log = logging.getLogger(__name__)

SHARE = 0.02
"""Largest share of a run's time that training may wait for checkpoints by time."""

ROOM = 0.8
"""Largest share of the available main memory for a copy; a larger checkpoint is written without a copy."""

AT_ONCE = 1 << 30
"""Bytes up to which training waits for the allocation; touching and page-locking more takes a second and longer."""


class Schedule:
    """Decides when the next checkpoint is due. A postponed checkpoint stays due until it begins.

    Checkpoints are due at multiples of `steps`; 0: every `seconds`, a time that grows if training waits for the disk; 0
    as well: none is due.
    """

    def __init__(self, steps: int, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._steps, self._seconds, self._clock = steps, seconds, clock
        self._last_step = 0
        self._due_at = clock() + seconds
        self._is_demanded = False

    def is_due(self, step: int) -> bool:
        """Return whether a checkpoint is due when `step` steps are done."""
        if self._is_demanded:
            return True
        if self._steps:
            return step // self._steps > self._last_step // self._steps
        return self._seconds > 0 and self._clock() >= self._due_at

    def demand(self) -> None:
        """Make a checkpoint due now, whatever the interval."""
        self._is_demanded = True

    def begun(self, step: int, waited: float = 0.0) -> None:
        """Record that a checkpoint of this step exists or has begun, for which training waited `waited` seconds."""
        self._is_demanded = False
        self._last_step = step
        self._due_at = self._clock() + max(self._seconds, waited / SHARE)


class BackgroundWriter:
    """Runs jobs one after the other in a thread. The process exits only after the running job has ended."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, "checkpoint writer")
        self._job: Future[None] | None = None

    def start(self, job: Callable[[], None]) -> None:
        """Run a job, after waiting for the last one, whose error is raised."""
        self.wait()
        self._job = self._pool.submit(job)

    @property
    def is_busy(self) -> bool:
        return self._job is not None and not self._job.done()

    def check(self) -> None:
        """Raise the error of a job that has ended, only once; do not wait for a running one."""
        if not self.is_busy:
            self.wait()

    def wait(self, seconds: float | None = None) -> bool:
        """Wait for a running job, for at most `seconds`, and return whether none is running any more.

        Raises:
            BaseException: the job's error, only once.
        """
        if self._job is None:
            return True
        if not wait([self._job], seconds).done:
            return False
        job, self._job = self._job, None
        job.result()
        return True


class Copy:
    """A copy that may not be complete yet."""

    def __init__(self, tree: Any, originals: Any, ends: Mapping[torch.device, Any]) -> None:
        self._tree, self._ends = tree, ends  # each device's stream reaches its event after the last copy
        self._originals = originals  # kept until the copy is complete, so that their memory is not reused

    def precede(self) -> None:
        """Make the GPU wait for the complete copy before any work that is queued later; the caller does not wait."""
        for device, end in self._ends.items():
            torch.cuda.current_stream(device).wait_event(end)

    def whole(self) -> Any:
        """Wait for the complete copy, and return it."""
        for device, end in self._ends.items():
            with torch.cuda.device(device):  # a thread would use the first GPU
                end.synchronize()
        self._originals = None
        return self._tree


class Snapshot:
    """One block of main memory that all copies use in turn; unless it is page-locked, they don't overlap with training.

    `available` returns the bytes of main memory that may be allocated; None: those of the machine or its container.
    """

    def __init__(self, available: Callable[[], int] | None = None, at_once: int = AT_ONCE) -> None:
        self._available = available or (lambda: main_memory().available)
        self._memory = LockedMemory()
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._at_once = at_once  # bytes up to which `wants_room` returns False
        self._refused = 0  # bytes for which there was no room

    def wants_room(self, tree: Any) -> bool:
        """Return whether to call `make_room` first, in a thread, because `take` would make training wait too long."""
        size = _size(tree)
        return size > max(self._at_once, len(self._memory)) and size != self._refused

    def make_room(self, tree: Any) -> bool:
        """Allocate memory for a copy of a tree unless there is enough already; return whether there is enough now."""
        size = _size(tree)
        if size <= len(self._memory):
            return True
        self.close()
        available = self._available()
        if size > ROOM * available:
            if size != self._refused:
                log.warning(
                    "checkpoints are written while training waits: a copy takes %.1f GB of main memory, and %.1f GB "
                    "are available",
                    *(size / 1e9, available / 1e9),
                )
            self._refused = size
            return False
        self._memory = LockedMemory(size)
        log.info(
            "checkpoints are written in the background, from a copy in main memory: %.1f MB%s",
            *(size / 1e6, ", page-locked" if self._memory.is_locked else ""),
        )
        return True

    def take(self, tree: Any) -> Copy | None:
        """Copy every tensor of nested dictionaries, lists and tuples; other values are taken over without a copy.

        This overwrites the last copy. Tensors on a GPU must not change until `Copy.precede` was called. None: there is
        no room for the copy.
        """
        if not self.make_room(tree):
            return None
        self._memory.restart()
        begun: dict[torch.device, torch.cuda.Stream] = {}

        def copied(tensor: Tensor) -> Tensor:
            own = self._memory.take(tensor.shape, tensor.dtype)
            if tensor.device.type != "cuda":
                return own.copy_(tensor.detach())
            if tensor.device not in begun:
                begun[tensor.device] = self.stream(tensor.device)
                begun[tensor.device].wait_stream(torch.cuda.current_stream(tensor.device))
            with torch.cuda.stream(begun[tensor.device]):
                return own.copy_(tensor.detach(), non_blocking=True)

        copy = _mapped(tree, copied)
        ends = {device: stream.record_event(torch.cuda.Event(blocking=True)) for device, stream in begun.items()}
        return Copy(copy, tree, ends)

    def stream(self, device: torch.device) -> torch.cuda.Stream:
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        return self._streams[device]

    def close(self) -> None:
        """Free the memory, unless a copy is in use."""
        self._memory = LockedMemory()


def _size(tree: Any) -> int:
    sizes: list[int] = []
    _mapped(tree, lambda tensor: sizes.append(bytes_for([tensor.numel()], tensor.dtype)) or tensor)
    return sum(sizes)


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
