"""Import everything that engines import, in the forkserver from which they are forked (`vllm_server.forking`).

The import of this module does it, and only the forkserver imports it. A fork is safe after these imports: vLLM as a
library forks its engines by default, from a process that has imported the same. CUDA is first initialised in a worker's
`init_device`; until then vLLM has torch ask NVML (`PYTORCH_NVML_BASED_CUDA_CHECK`). The only threads observed are those
of OpenBLAS, which starts them again in a forked process. `forking.spoiled` checks what can be checked.
"""

from __future__ import annotations

import importlib
import os
import signal

from grpo_common.processes import end_with_parent
from vllm_server import forking

started_with = dict(os.environ)
"""The environment that libraries may have read while they were loaded."""

unfit = ""
"""Why a fork from this process is not safe; empty if it is safe."""

_MODULES = (
    "vllm.v1.engine.core",
    "vllm.v1.executor.uniproc_executor",
    "vllm.v1.executor.multiproc_executor",
    "vllm.model_executor.model_loader",
    "vllm.model_executor.models.registry",
    "vllm.model_executor.models.qwen2",  # imports the layers of most of vLLM's language models
)
_WORKERS = {"cpu": "vllm.v1.worker.cpu_worker", "cuda": "vllm.v1.worker.gpu_worker"}


def _load() -> None:
    from vllm_server import seams  # imports for seconds, so only after `end_with_parent` and the signal handler

    for name in (*_MODULES, _WORKERS[seams.device_type()]):
        importlib.import_module(name)
    if seams.device_type() == "cpu":
        # vLLM sets TORCHINDUCTOR_CPP_DYNAMIC_THREADS in the engine, but torch reads it when it is imported, as here.
        importlib.import_module("torch._inductor.config").cpp.dynamic_threads = True
    # Set here: in an engine it has no effect, since its environment is no longer where the kernel put it.
    importlib.import_module("vllm.utils.system_utils").set_process_title("Forkserver")


end_with_parent()
signal.signal(signal.SIGINT, signal.SIG_IGN)  # the server handles Ctrl-C; forked engines restore the handler
try:
    with forking.silence():  # the server prints the same messages for its own imports
        _load()
    unfit = forking.spoiled()
except Exception as error:  # the engine is spawned then, and reports the full error
    unfit = f"{type(error).__name__}: {error}"
