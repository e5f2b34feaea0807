"""What the engine's process does besides vLLM: above all, it ends when the server's process has ended, for any reason.

vLLM's engine process waits for requests on a socket and does not notice that the server was killed: it would keep
running, with the model in memory. vLLM's worker processes notice the end of the engine themselves.
"""

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

from vllm_server import forking

GRACE_S = 5.0
GUARDED_VARIABLE = "GRPO_ENGINE_GUARDED"
"""Set in processes of an engine that ends with its server; `engine.describe_workers` checks it."""

replaced: Callable[..., None] | None = None
"""The function that `run_engine_core` replaces, in the server's process; an engine's process finds vLLM's own."""


def guard_engines() -> None:
    """Have vLLM's server start its engines by `run_engine_core`."""
    global replaced
    from vllm.v1.engine.core import EngineCoreProc

    replaced = EngineCoreProc.run_engine_core
    EngineCoreProc.run_engine_core = staticmethod(run_engine_core)  # pyright: ignore[reportAttributeAccessIssue]


def run_engine_core(*args: Any, **kwargs: Any) -> None:
    """Run vLLM's engine with the checks of this server; replaces `EngineCoreProc.run_engine_core` as process target."""
    os.environ[GUARDED_VARIABLE] = "1"
    threading.Thread(target=_end_with_parent, name="lifeline", daemon=True).start()

    from vllm.v1.engine.core import EngineCoreProc

    from vllm_server.patches import patch_vllm

    patch_vllm("engine")
    forking.allow_forked_workers()
    run = replaced or EngineCoreProc.run_engine_core
    run(*args, **kwargs)


def _end_with_parent() -> None:
    """Wait for the parent's end. Then send SIGTERM to this process, and SIGKILL after a grace period."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "runs in a process that multiprocessing started"
    parent.join()
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE_S)
    os.kill(os.getpid(), signal.SIGKILL)
