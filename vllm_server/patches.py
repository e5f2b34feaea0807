"""Every place where this server replaces something inside vLLM, in one table.

`patch_vllm` is the only caller. Importing a module of this project changes nothing in vLLM. The table is also in
docs/server.md.
"""

from __future__ import annotations

import importlib
import logging
from dataclasses import dataclass
from typing import Any, Literal

from grpo_common.text import PrintableRecords

Process = Literal["server", "engine", "worker"]


@dataclass(frozen=True)
class Patch:
    """One replacement."""

    by: str
    """`module:function` of this project that makes it; it raises an IncompatibleError if vLLM lacks the place.
    `module` alone: it is made there for one engine object."""
    process: Process  # a worker may be in the engine's process
    why: str
    replaces: str  # the places in vLLM, with a space between them
    test: str  # that fails when the place moves; a file below tests/
    until: str  # what makes it unnecessary
    device: Literal["cpu", "cuda"] | None = None  # the only platform with it; None: all
    writable: bool = False  # only a server whose weights a trainer writes has it


_RUNNER = "vllm.v1.worker.gpu_model_runner.GPUModelRunner"
_IN_BLOCKS = "a vLLM that is within 5 % without it; 1.5B on an H200: 21,100 tokens/s with it, 16,640 without"
_FASTER = "a vLLM that is within 5 % without it; all three: the 1.5B loop is 9 % behind without, 1 % with them"
_EXPERTS = "vllm.model_executor.layers.fused_moe.experts.cpu_moe.CPUUnquantizedExperts"

PATCHES = (
    Patch(
        "vllm_server.forking:guard_engines", "server",
        "an engine ends with its server, also when the server is killed: vLLM's keeps running",
        "vllm.v1.engine.core.EngineCoreProc.run_engine_core",
        "integration/test_server_life.py", until="a vLLM whose engine watches its parent",
    ),
    Patch(
        "vllm_server.forking:fork_engines", "server",
        "the engine is forked from a process that imports while the server imports: ready 6 s sooner on 2 cores",
        "vllm.v1.engine.utils.get_mp_context vllm.v1.engine.coordinator.get_mp_context",
        "integration/test_server_life.py", until="a vLLM whose `serve` takes a running fork server",
    ),
    Patch(
        "vllm_server.fence", "server",
        "a completion waits while weights are written, and finds no cache of older ones",
        "vllm.v1.engine.core_client.AsyncMPClient.add_request_async",
        "unit/test_engine.py", until="a vLLM whose cache keys have the version of the weights", writable=True,
    ),
    Patch(
        "vllm_server.output_blocks:unpack", "server",
        "logprobs of a block of tokens are converted together, and not decoded to text: speed",
        "vllm.v1.engine.core_client.AsyncMPClient.get_output_async "
        "vllm.v1.engine.logprobs.LogprobsProcessor._update_sample_logprobs",
        "unit/test_output_blocks.py", until=_IN_BLOCKS,
    ),
    Patch(
        "vllm_server.worker.speed:skip_needless_bookkeeping", "engine",
        "vLLM's bookkeeping of the KV cache runs when a block is full, not at each token: speed",
        "vllm.v1.core.kv_cache_manager.KVCacheManager.allocate_slots "
        "vllm.v1.core.kv_cache_manager.KVCacheManager.cache_blocks",
        "unit/test_speed.py", until=_FASTER,
    ),
    Patch(
        "vllm_server.output_blocks:send_in_blocks", "engine",
        "tokens of requests that are not streamed leave the engine 16 at a time: speed",
        "vllm.v1.core.sched.scheduler.Scheduler.update_from_output "
        "vllm.v1.engine.core.EngineCoreProc.pause_scheduler",
        "unit/test_output_blocks.py", until=_IN_BLOCKS,
    ),
    Patch(
        "vllm_server.worker.lora:prepare_worker", "worker",
        "tokens are grouped by adapter without waiting for the GPU, and kernels take tokens of several versions",
        "vllm.lora.punica_wrapper.punica_gpu.PunicaWrapperGPU.update_metadata torch.ops.vllm.lora_shrink",
        "gpu/test_lora_kernels_gpu.py",
        until="a vLLM whose own kernels are within 3 % (`--lora-kernels vllm`)", device="cuda",
    ),
    Patch(
        "vllm_server.worker.speed:copy_when_changed", "worker",
        "sampling parameters are copied to the GPU when they change: speed",
        "vllm.v1.worker.gpu.sample.states.SamplingStates.add_request "
        "vllm.v1.worker.gpu.sample.states.SamplingStates.apply_staged_writes",
        "unit/test_speed.py", until=_FASTER, device="cuda",
    ),
    Patch(
        "vllm_server.worker.speed:compute_logprobs_once", "worker",
        "logprobs are computed of the sampled tokens only: speed",
        "vllm.v1.worker.gpu.sample.sampler.compute_topk_scores",
        "unit/test_sampled_logprobs.py", until=_FASTER, device="cuda",
    ),
    Patch(
        "vllm_server.worker.routed_experts:prepare_worker", "worker",
        "`--return-routed-experts` records experts on CPUs and in the older model runner",
        f"{_RUNNER}.initialize_kv_cache {_RUNNER}.execute_model {_RUNNER}._sample",
        "unit/test_routed_experts.py", until="vLLM's own, where its outputs are proved equal",
    ),
    Patch(
        "vllm_server.worker.on_cpu:rewind_generators", "worker",
        "a seeded request whose sample vLLM discards ends the engine on a CPU, whose generators have no offset",
        f"{_RUNNER}._sample {_RUNNER}._bookkeeping_sync",
        "integration/test_server_generate.py", until="a vLLM that rewinds CPU generators", device="cpu",
    ),
    Patch(
        "vllm_server.worker.on_cpu:keep_weights_plain", "worker",
        "a CPU's engine computes with the parameters, not with packed copies that no trainer can write",
        "vllm._custom_ops._supports_onednn vllm.model_executor.layers.utils.check_cpu_sgl_kernel "
        f"{_EXPERTS}.process_weights_after_loading {_EXPERTS}.apply",
        "integration/test_shared_server.py",
        until="a vLLM with a flag for plain weights on a CPU", device="cpu", writable=True,
    ),
)  # fmt: skip

_applied: set[str] = set()
"""Names of functions that have run in this process, or in the one that it was forked from."""


def patch_vllm(process: Process, *, writable: bool = False) -> None:
    """Make this process's replacements in vLLM, each once. Raise an IncompatibleError if vLLM lacks a place."""
    printable_logs()
    device = importlib.import_module("vllm_server.seams").device_type()
    for patch in PATCHES:
        wanted = patch.process == process and patch.device in (None, device) and (writable or not patch.writable)
        module, _, function = patch.by.partition(":")
        if wanted and function and patch.by not in _applied:
            _applied.add(patch.by)
            getattr(importlib.import_module(module), function)()


_PRINTABLE = PrintableRecords("vllm.grpo", "uvicorn")


def printable_logs() -> None:
    """Have this process's logs change nothing but the place where they are shown: requests may hold anything."""
    handlers = [each for name in ("", "vllm", "uvicorn", "uvicorn.access") for each in logging.getLogger(name).handlers]
    for handler in filter(None, [*handlers, logging.lastResort]):
        handler.addFilter(_PRINTABLE)


WORKERS = {"PolicyWorker": False, "SharingWorker": True}
"""Classes that vLLM mixes into its worker, and whether a trainer writes the weights of that worker."""


def __getattr__(name: str) -> Any:
    """Patch vLLM in a worker's process, and return the class for `--worker-extension-cls`.

    vLLM asks for the class by name, once in each worker's process and before it creates the worker. There is no
    earlier call into this project there.
    """
    if name not in WORKERS:
        raise AttributeError(f"module {__name__} has no attribute {name}")
    patch_vllm("worker", writable=WORKERS[name])
    return getattr(importlib.import_module("vllm_server.worker.extension"), name)
