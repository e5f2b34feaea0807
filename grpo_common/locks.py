"""Lock files that one process holds at a time. The kernel releases a lock when its process ends, for any reason."""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path

LOOKS = 25
"""Attempts to lock a file before it counts as held."""


class HeldError(Exception):
    """Another process holds the lock; `holder` is its pid as text, or `unknown`."""

    def __init__(self, holder: str) -> None:
        super().__init__(holder)
        self.holder = holder


def hold(path: Path) -> int:
    """Lock a file for this process, and create it if it is missing. Return its descriptor; closing it unlocks the file.

    Raises:
        HeldError: another process holds the lock.
        OSError: the file cannot be created, or its file system has no locks.
    """
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        _lock(handle)
        os.truncate(handle, 0)
        os.pwrite(handle, str(os.getpid()).encode(), 0)
    except BlockingIOError:
        holder = os.read(handle, 32).decode(errors="replace") or "unknown"
        os.close(handle)
        raise HeldError(holder) from None
    except OSError:
        os.close(handle)
        raise
    return handle


def _lock(handle: int) -> None:
    """Lock the file; wait for a process that only looks (`is_held`) and has it locked for an instant."""
    for left in reversed(range(LOOKS)):
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if not left:
                raise
        time.sleep(0.02)


def is_held(path: Path) -> bool:
    """Return whether another process holds a file. This process locks it for an instant, as others that look may."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(handle)
    return False
