"""Choose the folder of Unix sockets: the kernel limits their paths to 107 bytes, and TMPDIR may be longer."""

from __future__ import annotations

import multiprocessing.util
import os
import tempfile

FOLDER_VARIABLE = "VLLM_RPC_BASE_PATH"
"""vLLM's variable for the folder of its sockets; unset: the temporary folder."""

_LONGEST = 107 - len("/pymp-12345678/listener-12345678") - 5  # vLLM's own, /<uuid>, are 5 longer
_SHORT = ("/tmp", "/var/tmp", "/dev/shm")


def folder() -> str:
    """Return the temporary folder, or a folder with a shorter path if that is too long. Sockets need no disk space."""
    usual = tempfile.gettempdir()
    if len(os.fsencode(usual)) <= _LONGEST:
        return usual
    return next((short for short in _SHORT if os.access(short, os.W_OK | os.X_OK)), usual)


def prepare() -> None:
    """Put the sockets of vLLM and multiprocessing there, unless the user has set vLLM's folder."""
    chosen, usual = folder(), tempfile.gettempdir()
    if chosen == usual:
        return
    os.environ.setdefault(FOLDER_VARIABLE, chosen)
    tempfile.tempdir = chosen
    try:
        multiprocessing.util.get_temp_dir()  # creates multiprocessing's folder, which it keeps using
    finally:
        tempfile.tempdir = usual
