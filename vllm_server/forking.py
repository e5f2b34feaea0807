"""Engines are forked from a process that has imported what they need, instead of importing it themselves.

vLLM's own server spawns the engine's process, which then imports for 6 s (a fast machine) to 16 s what the server has
imported just before. Here a process of multiprocessing's "forkserver" imports it at the same time as the server imports
its own half. It was started before the server knew its arguments: each process forked from it first takes over the
environment that the server has at that moment, as a spawned one would. vLLM reads its variables when they are asked for
(it keeps them only once an engine is up); for what libraries read while being loaded, see `too_late`.

Nothing is forked where this could go wrong: `context` asks first, and is None then.
"""

from __future__ import annotations

import ctypes
import gc
import logging
import multiprocessing
import os
import pickle
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, ForkServerProcess
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

PRELOAD = "vllm_server.worker.preload"
METHOD_VARIABLE = "VLLM_WORKER_MULTIPROC_METHOD"
THREADS_VARIABLE = "OMP_NUM_THREADS"

_READ_WHEN_LOADED = ("OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "MALLOC_", "PROMETHEUS_")
_MAY_CHANGE = {THREADS_VARIABLE, "KMP_DUPLICATE_LIB_OK", "KMP_INIT_AT_FORK"}
"""Threads are set anew. The others are set by scikit-learn, which transformers imports where it is installed: they keep
Intel's OpenMP from ending a process that loads a second one, and from preparing for a fork. One that is loaded already
has read neither, as in a server that scikit-learn was imported into after torch."""
_FOR_SPAWNED = (METHOD_VARIABLE, "VLLM_ENABLE_CUDA_COMPATIBILITY")
"""Set where the user wants another start method, or libraries that are found by an LD_LIBRARY_PATH of vLLM's."""

_PR_SET_PDEATHSIG = 1
_CUDA_NOT_INITIALISED = 3

logger = logging.getLogger("vllm.grpo.forking")

_preloaded: str | None = None


class _Forked(ForkServerProcess):
    """A process that takes over the environment before anything else of it is unpickled."""

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return _taken_over, (dict(os.environ), type(self), bytes(ForkingPickler.dumps(self.__dict__)))


class _Context(ForkServerContext):
    Process = _Forked


def _taken_over(environment: dict[str, str], kind: type, state: bytes) -> Any:
    """In the new process."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # as a spawned one has it
    threads = os.environ.get(THREADS_VARIABLE)
    os.environ.clear()
    os.environ.update(environment)
    if environment.get(THREADS_VARIABLE, threads) != threads and "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(int(environment[THREADS_VARIABLE]))  # OpenMP has read it, once for all
    process = object.__new__(kind)
    process.__dict__.update(pickle.loads(state))
    return process


def start(preload: str = PRELOAD) -> None:
    """Start the process that imports `preload`; once is enough. Call it early, and with the environment set.

    Not if the user has chosen otherwise, and not under WSL, whose NVML stands no fork.
    """
    global _preloaded
    if _preloaded or any(map(os.environ.get, _FOR_SPAWNED)) or "microsoft" in os.uname().release.lower():
        return
    _preloaded = preload
    multiprocessing.set_forkserver_preload([preload])
    forkserver.ensure_running()


def context() -> ForkServerContext | None:
    """By which to start an engine's process; waits for the imports. None: none may be forked, the log says why."""
    if _preloaded is None:
        return None
    forked = _Context()
    if reason := _ask(forked, _preloaded):
        logger.warning(
            "the engine's process is spawned, and will import all that it needs, instead of forked: %s", reason
        )
        return None
    return forked


def _ask(forked: _Context, preload: str) -> str:
    """Have a process forked, and let it say what speaks against it."""
    ours, theirs = forked.Pipe(duplex=False)
    process = forked.Process(target=_answer, args=(theirs, preload), name="fit")
    try:
        process.start()
        theirs.close()
        return ours.recv()
    except (OSError, EOFError) as error:
        return f"the process with the imports has ended ({error!r})"


def _answer(answers: Connection, preload: str) -> None:
    module = sys.modules.get(preload)
    if module is None:
        answers.send(f"{preload} could not be imported")
    else:
        answers.send(module.unfit or too_late(module.started_with, os.environ))


def too_late(started_with: Mapping[str, str], now: Mapping[str, str]) -> str:
    """Which variable a process can't take over once it has loaded its libraries; empty if there is none."""
    changed = {name for name in {*started_with, *now} if started_with.get(name) != now.get(name)}
    for name in sorted(changed - _MAY_CHANGE):
        if name.startswith(_READ_WHEN_LOADED):
            return f"{name} was set after its libraries had been loaded"
    loaded = Path("/proc/self/maps").read_text()
    wanted = now.get("LD_PRELOAD", "").replace(":", " ").split()
    missing = [library for library in wanted if os.path.realpath(library) not in loaded]
    return f"LD_PRELOAD names {missing[0]}, which it has not loaded" if missing else ""


def end_with_parent() -> None:
    """Have the kernel end this process with the one that started it, in the midst of its imports, too."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


@contextmanager
def silence() -> Iterator[None]:
    """Nothing reaches stdout and stderr."""
    kept = {number: os.dup(number) for number in (1, 2)}
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for number in kept:
        os.dup2(nowhere, number)
    try:
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        for number, copy in kept.items():
            os.dup2(copy, number)
        for each in (nowhere, *kept.values()):
            os.close(each)


def spoiled() -> str:
    """Why nothing may be forked from this process, after its imports; empty if nothing speaks against it."""
    if threading.active_count() > 1:
        return f"its imports have started threads ({', '.join(thread.name for thread in threading.enumerate())})"
    if cuda_is_initialised():
        return "its imports have initialised CUDA"
    gc.collect()
    gc.freeze()  # the collector writes into all that it looks at: kept from it, memory stays shared
    return ""


def cuda_is_initialised() -> bool:
    """By the driver's own word, which does not initialise it."""
    try:
        driver = ctypes.CDLL("libcuda.so.1", mode=os.RTLD_NOLOAD)
    except OSError:
        return False  # not even loaded
    count = ctypes.c_int()
    return driver.cuDeviceGetCount(ctypes.byref(count)) != _CUDA_NOT_INITIALISED
