"""What a process imports so that engines can be forked from it (`vllm_server.forking`): all that engines import.

Importing this does it, in the forkserver and nowhere else. Why a fork is safe after these imports: vLLM, where it is
used as a library, forks its engines by default, from a process that has imported the same. CUDA is first initialised
in a worker's `init_device`; until then vLLM has torch ask NVML (`PYTORCH_NVML_BASED_CUDA_CHECK`). The threads of
OpenBLAS, the only ones seen, are made anew by OpenBLAS in what is forked. What can be checked is: `forking.spoiled`.

`worker.extension` and `worker.sharing` are left out: they change vLLM when imported, by what the server was asked for.
"""

from __future__ import annotations

import importlib
import os
import signal

from vllm_server import forking

started_with = dict(os.environ)
"""What libraries have read, or could have, while they were loaded."""

unfit = ""
"""Why no engine may be forked from here."""

_MODULES = (
    "vllm.v1.engine.core",
    "vllm.v1.executor.uniproc_executor",
    "vllm.v1.executor.multiproc_executor",
    "vllm.model_executor.model_loader",
    "vllm.model_executor.models.registry",
    "vllm.model_executor.models.qwen2",  # brings what most of vLLM's language models are made of
)
_WORKERS = {"cpu": "vllm.v1.worker.cpu_worker", "cuda": "vllm.v1.worker.gpu_worker"}


def _load() -> None:
    from vllm_server import compat  # seconds of imports: what is below comes first

    for name in (*_MODULES, _WORKERS[compat.device_type()]):
        importlib.import_module(name)
    if compat.device_type() == "cpu":
        # vLLM sets TORCHINDUCTOR_CPP_DYNAMIC_THREADS for an engine that is yet to import this.
        importlib.import_module("torch._inductor.config").cpp.dynamic_threads = True
    # Now, or it would have no effect in an engine, whose environment lies elsewhere than where the kernel has put it.
    importlib.import_module("vllm.utils.system_utils").set_process_title("Forkserver")


forking.end_with_parent()
signal.signal(signal.SIGINT, signal.SIG_IGN)  # the server answers Ctrl-C; what is forked from here hears it again
try:
    with forking.silence():  # the server itself says the same of its imports
        _load()
    unfit = forking.spoiled()
except Exception as error:  # the engine, which is spawned then, will say it at length
    unfit = f"{type(error).__name__}: {error}"
