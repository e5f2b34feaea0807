"""The engine's process: forked from one that has made its imports, and ended when the server ends.

vLLM's own server spawns the engine's process. That process then imports for 6 s (a fast machine) to 16 s what the
server has just imported. Here a process of multiprocessing's "forkserver" makes these imports while the server makes
its own. The forkserver starts before the server knows its arguments. Each process forked from it therefore first copies
the environment that the server has at that moment, as a spawned process would. vLLM reads its variables on use (it
caches them only once an engine is up); for variables that libraries read while they load, see `too_late`.

Where a fork is not safe, `context` returns None and the engine is spawned. `allow_forked_workers` does the same for
workers.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import logging
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
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
"""Variables that may differ. `_taken_over` sets the number of threads again. scikit-learn, which transformers imports
if it is installed, sets the others. They stop Intel's OpenMP from ending a process that loads a second OpenMP, and
from preparing for a fork. A server that imports scikit-learn after torch has an OpenMP that read neither of them,
too."""
_FOR_SPAWNED = (METHOD_VARIABLE, "VLLM_ENABLE_CUDA_COMPATIBILITY")
"""Variables that require a spawned engine: another start method, or libraries from vLLM's own LD_LIBRARY_PATH."""

_CORES_VARIABLE, _ANY_CORES = "VLLM_CPU_OMP_THREADS_BIND", "nobind"
"""vLLM's variable that gives each worker on a CPU its cores, which OpenMP reads when it is loaded; and "none"."""

_CUDA_NOT_INITIALISED = 3

logger = logging.getLogger("vllm.grpo.forking")

_preloaded: str | None = None
_forked = False
"""Whether this process was forked after its imports."""


class _Forked(ForkServerProcess):
    """A process that copies the server's environment before the rest of its state is unpickled."""

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return _taken_over, (dict(os.environ), type(self), bytes(ForkingPickler.dumps(self.__dict__)))


class _Context(ForkServerContext):
    Process = _Forked


def _taken_over(environment: dict[str, str], kind: type, state: bytes) -> Any:
    """Rebuild the process object, in the forked process."""
    global _forked
    _forked = True
    signal.signal(signal.SIGINT, signal.default_int_handler)  # as in a spawned process
    threads = os.environ.get(THREADS_VARIABLE)
    os.environ.clear()
    os.environ.update(environment)
    if environment.get(THREADS_VARIABLE, threads) != threads and "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(int(environment[THREADS_VARIABLE]))  # OpenMP read it only when loaded
    process = object.__new__(kind)
    process.__dict__.update(pickle.loads(state))
    return process


def start(preload: str = PRELOAD) -> None:
    """Start the process that imports `preload`, after the environment is set and as early as possible.

    A second call does nothing. Neither does a call if the user has chosen another start method, or under WSL, whose
    NVML does not survive a fork.
    """
    global _preloaded
    if _preloaded or any(map(os.environ.get, _FOR_SPAWNED)) or "microsoft" in os.uname().release.lower():
        return
    _preloaded = preload
    multiprocessing.set_forkserver_preload([preload])
    forkserver.ensure_running()


def leave() -> None:
    """Leave the start of engines to vLLM, which spawns them."""
    global _preloaded
    _preloaded = None


def context() -> ForkServerContext | None:
    """Return the context that forks an engine's process; wait for the imports.

    Return None if a fork is not safe: a test process says why, and so does the log.
    """
    if _preloaded is None:
        return None
    forked = _Context()
    ours, theirs = forked.Pipe(duplex=False)
    try:
        forked.Process(target=_answer, args=(theirs, _preloaded), name="fit").start()
        theirs.close()
        reason = ours.recv()
    except (OSError, EOFError) as error:
        reason = f"the process with the imports has ended ({error!r})"
    if reason:
        logger.warning("the engine's process is spawned instead of forked, and makes its own imports: %s", reason)
    return None if reason else forked


def _answer(answers: Connection, preload: str) -> None:
    module = sys.modules.get(preload)
    if module is None:
        answers.send(f"{preload} could not be imported")
    else:
        answers.send(module.unfit or too_late(module.started_with, os.environ))


def fork_engines() -> None:
    """Have vLLM's server fork its engines, if a fork is safe."""
    for name in ("vllm.v1.engine.utils", "vllm.v1.engine.coordinator"):
        module = importlib.import_module(name)

        def get_mp_context(vllms: Callable[[], Any] = module.get_mp_context) -> Any:
            return context() or vllms()

        vars(module)["get_mp_context"] = get_mp_context


def allow_forked_workers() -> None:
    """Have vLLM fork workers from this engine's process, which has made their imports.

    vLLM itself spawns them if CUDA is initialised, with `--numa-bind`, in Ray's actors and under WSL. An engine that
    was spawned has made too few imports.
    """
    if _forked and os.environ.get(_CORES_VARIABLE, _ANY_CORES) == _ANY_CORES:
        os.environ[METHOD_VARIABLE] = "fork"


def too_late(started_with: Mapping[str, str], now: Mapping[str, str]) -> str:
    """Return which change of a variable comes too late for libraries that are loaded already; empty if none does."""
    changed = {name for name in {*started_with, *now} if started_with.get(name) != now.get(name)}
    for name in sorted(changed - _MAY_CHANGE):
        if name.startswith(_READ_WHEN_LOADED):
            return f"{name} was set after its libraries had been loaded"
    loaded = Path("/proc/self/maps").read_text()
    wanted = now.get("LD_PRELOAD", "").replace(":", " ").split()
    missing = [library for library in wanted if os.path.realpath(library) not in loaded]
    return f"LD_PRELOAD names {missing[0]}, which it has not loaded" if missing else ""


@contextmanager
def silence() -> Iterator[None]:
    """Discard what the block writes to stdout and stderr, also from C code."""
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
    """Return why a fork of this process is not safe after its imports; empty if it is safe."""
    if threading.active_count() > 1:
        return f"its imports have started threads ({', '.join(thread.name for thread in threading.enumerate())})"
    with suppress(OSError):  # the driver is not loaded
        driver = ctypes.CDLL("libcuda.so.1", mode=os.RTLD_NOLOAD)
        if driver.cuDeviceGetCount(ctypes.byref(ctypes.c_int())) != _CUDA_NOT_INITIALISED:  # does not initialise it
            return "its imports have initialised CUDA"
    gc.collect()
    gc.freeze()  # the collector writes to objects that it visits: frozen ones keep their pages shared
    return ""


# ----------------------------------------------------------------------------------------------------------------------
# What the engine's process does besides vLLM: above all, it ends when the server's process has ended, for any reason.
#
# vLLM's engine process waits for requests on a socket and does not notice that the server was killed: it would keep
# running, with the model in memory. vLLM's worker processes notice the end of the engine themselves.


GRACE_S = 5.0
GUARDED_VARIABLE = "GRPO_ENGINE_GUARDED"
"""Set in processes of an engine that ends with its server; `server.describe_workers` checks it."""

_replaced: Callable[..., None] | None = None
"""The function that `run_engine_core` replaces, in the server's process; an engine's process finds vLLM's own."""


def guard_engines() -> None:
    """Have vLLM's server start its engines by `run_engine_core`."""
    global _replaced
    from vllm.v1.engine.core import EngineCoreProc

    _replaced = EngineCoreProc.run_engine_core
    EngineCoreProc.run_engine_core = staticmethod(run_engine_core)  # pyright: ignore[reportAttributeAccessIssue]


def run_engine_core(*args: Any, **kwargs: Any) -> None:
    """Run vLLM's engine with the checks of this server; replaces `EngineCoreProc.run_engine_core` as process target."""
    os.environ[GUARDED_VARIABLE] = "1"
    threading.Thread(target=_end_with_parent, name="lifeline", daemon=True).start()

    from vllm.v1.engine.core import EngineCoreProc

    from vllm_server.patches import patch_vllm

    patch_vllm("engine")
    allow_forked_workers()
    run = _replaced or EngineCoreProc.run_engine_core
    run(*args, **kwargs)


def _end_with_parent() -> None:
    """Wait for the parent's end. Then send SIGTERM to this process, and SIGKILL after a grace period."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "runs in a process that multiprocessing started"
    parent.join()
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE_S)
    os.kill(os.getpid(), signal.SIGKILL)
