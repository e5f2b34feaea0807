"""Processes that this program has started."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from contextlib import suppress
from typing import Any

import psutil

_LIBC = ctypes.CDLL(None, use_errno=True)
_PR_SET_PDEATHSIG = 1


def kill_group(leader: subprocess.Popen[Any]) -> None:
    """Kill what is left of the group of a process that was started in a new session.

    Until the leader is waited for (where SIGCHLD is not ignored), its number is its own, and so is that of its group.
    Afterwards the kernel gives the number to a new process only once the group is empty: a group of that number is then
    another one.
    """
    if leader.returncode is None or not psutil.pid_exists(leader.pid):
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(leader.pid, signal.SIGKILL)


def end_with_parent(by: signal.Signals = signal.SIGKILL) -> None:
    """Have the kernel send this process a signal when the thread that started it ends, also during imports."""
    if sys.platform == "linux":
        _LIBC.prctl(_PR_SET_PDEATHSIG, by)
