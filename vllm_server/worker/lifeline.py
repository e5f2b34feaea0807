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

from vllm_server import forking, seams

GRACE_S = 5.0

replaced: Callable[..., None] | None = None
"""The function that `run_engine_core` replaces, in the server's process; an engine's process finds vLLM's own."""


def run_engine_core(*args: Any, **kwargs: Any) -> None:
    """Run vLLM's engine with the checks of this server; replaces `EngineCoreProc.run_engine_core` as process target."""
    from vllm.v1.engine.core import EngineCoreProc

    from vllm_server.worker import kv_blocks, output_blocks, stops

    threading.Thread(target=_end_with_parent, name="lifeline", daemon=True).start()
    stops.look_up_in_sets()
    kv_blocks.skip_needless_bookkeeping()
    output_blocks.send_in_blocks()
    _fork_workers()
    run = replaced or EngineCoreProc.run_engine_core
    run(*args, **kwargs)


def _fork_workers() -> None:
    """Have vLLM fork workers from this process, which has made their imports, where this is safe; vLLM spawns them.

    Raises:
        FatalError: this vLLM starts workers elsewhere.
    """
    executor = seams.seam("vllm.v1.executor.multiproc_executor", "get_mp_context")
    vllms = executor.get_mp_context

    def context() -> Any:
        return forking.for_workers() or vllms()

    vars(executor)["get_mp_context"] = context


def _end_with_parent() -> None:
    """Wait for the parent's end. Then send SIGTERM to this process, and SIGKILL after a grace period."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "runs in a process that multiprocessing started"
    parent.join()
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE_S)
    os.kill(os.getpid(), signal.SIGKILL)
