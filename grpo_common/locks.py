"""Lock files that one process holds at a time. The kernel releases a lock when its process ends, for any reason."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path


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
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
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


def is_held(path: Path) -> bool:
    """Whether another process holds a file now. It is held here for an instant, together with others who only look."""
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
