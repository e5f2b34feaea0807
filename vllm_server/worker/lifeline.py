"""The engine's process ends when the server's has, however that came about.

vLLM's engine process waits for requests on a socket and does not notice that the server was killed: it would stay,
with the model in memory. Its own workers do notice when *it* ends.
"""

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

GRACE_S = 5.0

replaced: Callable[..., None] | None = None
"""What `run_engine_core` stands in for, in the server's process; an engine's own finds vLLM's in place."""


def run_engine_core(*args: Any, **kwargs: Any) -> None:
    """Stands in for `EngineCoreProc.run_engine_core` as the target of the engine's process."""
    from vllm.v1.engine.core import EngineCoreProc

    from vllm_server.worker import finite

    threading.Thread(target=_end_with_parent, name="lifeline", daemon=True).start()
    finite.zero_new_blocks()  # its scheduler says which; workers in processes of their own do it in `extension`
    run = replaced or EngineCoreProc.run_engine_core
    run(*args, **kwargs)


def _end_with_parent() -> None:
    """Wait for the parent's end; then ask this process to stop, and insist if it does not."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "runs in a process that multiprocessing started"
    parent.join()
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE_S)
    os.kill(os.getpid(), signal.SIGKILL)
