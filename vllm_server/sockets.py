"""Where Unix sockets lie: a kernel takes no path of more than 107 bytes, and a TMPDIR may be as long as that alone."""

from __future__ import annotations

import multiprocessing.util
import os
import tempfile

FOLDER_VARIABLE = "VLLM_RPC_BASE_PATH"
"""By which vLLM is told where its sockets go; unset: the temporary folder."""

_LONGEST = 107 - len("/pymp-12345678/listener-12345678") - 5  # vLLM's own, /<uuid>, are 5 longer
_SHORT = ("/tmp", "/var/tmp", "/dev/shm")


def folder() -> str:
    """The temporary folder, or one with a shorter path where that is too long; sockets need no space."""
    usual = tempfile.gettempdir()
    if len(os.fsencode(usual)) <= _LONGEST:
        return usual
    return next((short for short in _SHORT if os.access(short, os.W_OK | os.X_OK)), usual)


def prepare() -> None:
    """Have those of vLLM and of multiprocessing lie there, unless the user has said where vLLM's do."""
    chosen, usual = folder(), tempfile.gettempdir()
    if chosen == usual:
        return
    os.environ.setdefault(FOLDER_VARIABLE, chosen)
    tempfile.tempdir = chosen
    try:
        multiprocessing.util.get_temp_dir()  # makes its folder once for all
    finally:
        tempfile.tempdir = usual
