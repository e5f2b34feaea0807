"""Every place where this server replaces something inside vLLM, in one table.

`patch_vllm` is the only caller. Importing a module of this project changes nothing in vLLM. The table is also in
docs/server.md.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any, Literal

Process = Literal["server", "engine", "worker"]


@dataclass(frozen=True, kw_only=True)
class Patch:
    """One replacement.

    Attributes:
        replaces: the places in vLLM.
        process: the kind of process in which it is made. A worker may be in the engine's process.
        by: "module:function" of this project that makes it; it raises an IncompatibleError if vLLM lacks the place.
            "module" alone: it is made there for one engine object.
        why: the reason.
        until: what makes it unnecessary.
        test: the test that fails when the place moves.
        device: the only platform with it; None: all.
        writable: only a server whose weights a trainer writes has it.
    """

    replaces: tuple[str, ...]
    process: Process
    by: str
    why: str
    until: str
    test: str
    device: Literal["cpu", "cuda"] | None = None
    writable: bool = False


_RUNNER = "vllm.v1.worker.gpu_model_runner.GPUModelRunner"
_EXPERTS = "vllm.model_executor.layers.fused_moe.experts.cpu_moe.CPUUnquantizedExperts"

PATCHES = (
    Patch(
        replaces=("vllm.v1.engine.core.EngineCoreProc.run_engine_core",),
        process="server",
        by="vllm_server.forking:guard_engines",
        why="an engine ends with its server, also when the server is killed: vLLM's keeps running",
        until="a vLLM whose engine watches its parent",
        test="tests/integration/test_server_life.py",
    ),
    Patch(
        replaces=("vllm.v1.engine.utils.get_mp_context", "vllm.v1.engine.coordinator.get_mp_context"),
        process="server",
        by="vllm_server.forking:fork_engines",
        why="the engine is forked from a process that imports while the server imports: ready 6 s sooner on 2 cores",
        until="a vLLM whose `serve` takes a running fork server",
        test="tests/integration/test_server_life.py",
    ),
    Patch(
        replaces=("vllm.v1.engine.core_client.AsyncMPClient.add_request_async",),
        process="server",
        by="vllm_server.engine",
        why="completions from any route wait for an update of the weights, and find no cache of older weights",
        until="a vLLM whose cache keys have the version of the weights, and whose requests wait for an update",
        test="tests/unit/test_engine.py",
        writable=True,
    ),
    Patch(
        replaces=(
            "vllm.v1.engine.core_client.AsyncMPClient.get_output_async",
            "vllm.v1.engine.logprobs.LogprobsProcessor._update_sample_logprobs",
        ),
        process="server",
        by="vllm_server.output_blocks:unpack",
        why="logprobs of a block of tokens are converted together, and not decoded to text: speed",
        until="a vLLM in which it brings less than 3 %",
        test="tests/unit/test_output_blocks.py",
    ),
    Patch(
        replaces=("vllm.v1.core.kv_cache_manager.KVCacheManager.allocate_slots",),
        process="engine",
        by="vllm_server.worker.kv_blocks:skip_needless_bookkeeping",
        why="vLLM's bookkeeping of the KV cache runs when a block is full, not at each token: speed",
        until="a vLLM in which it brings less than 3 %",
        test="tests/unit/test_kv_blocks.py",
    ),
    Patch(
        replaces=("vllm.v1.core.sched.scheduler.Scheduler.update_from_output",),
        process="engine",
        by="vllm_server.worker.output_blocks:send_in_blocks",
        why="tokens of requests that are not streamed leave the engine 16 at a time: speed",
        until="a vLLM in which it brings less than 3 %",
        test="tests/unit/test_output_blocks.py",
    ),
    Patch(
        replaces=("vllm.lora.punica_wrapper.punica_gpu.PunicaWrapperGPU.update_metadata", "torch.ops.vllm.lora_shrink"),
        process="worker",
        by="vllm_server.lora_kernels.install:prepare_worker",
        why="tokens are grouped by adapter without waiting for the GPU, and kernels take tokens of several versions",
        until="a vLLM whose own kernels are within 3 % (`--lora-kernels vllm`)",
        test="tests/gpu/test_lora_kernels_gpu.py",
        device="cuda",
    ),
    Patch(
        replaces=("vllm.v1.worker.gpu.sample.states.SamplingStates",),
        process="worker",
        by="vllm_server.worker.sampling_parameters:copy_when_changed",
        why="sampling parameters are copied to the GPU when they change: speed",
        until="a vLLM in which it brings less than 3 %",
        test="tests/unit/test_sampling_parameters.py",
        device="cuda",
    ),
    Patch(
        replaces=("vllm.v1.worker.gpu.sample.sampler.compute_topk_scores",),
        process="worker",
        by="vllm_server.worker.sampled_logprobs:prepare_worker",
        why="logprobs are computed of the sampled tokens only: speed",
        until="a vLLM in which it brings less than 3 %",
        test="tests/unit/test_sampled_logprobs.py",
        device="cuda",
    ),
    Patch(
        replaces=(f"{_RUNNER}.initialize_kv_cache", f"{_RUNNER}.execute_model", f"{_RUNNER}._sample"),
        process="worker",
        by="vllm_server.worker.routed_experts:prepare_worker",
        why="`--return-routed-experts` records experts on CPUs and in the older model runner",
        until="vLLM's own, where its outputs are proved equal",
        test="tests/unit/test_routed_experts.py",
    ),
    Patch(
        replaces=(f"{_RUNNER}._sample", f"{_RUNNER}._bookkeeping_sync"),
        process="worker",
        by="vllm_server.worker.seeds:prepare_worker",
        why="a seeded request whose sample vLLM discards ends the engine on a CPU, whose generators have no offset",
        until="a vLLM that rewinds CPU generators",
        test="tests/integration/test_server_generate.py",
        device="cpu",
    ),
    Patch(
        replaces=(
            "vllm._custom_ops._supports_onednn",
            "vllm.model_executor.layers.utils.check_cpu_sgl_kernel",
            f"{_EXPERTS}.process_weights_after_loading",
            f"{_EXPERTS}.apply",
        ),
        process="worker",
        by="vllm_server.worker.shared_weights:keep_weights_plain",
        why="a CPU's engine computes with the parameters, not with packed copies that no trainer can write",
        until="a vLLM with a flag for plain weights on a CPU",
        test="tests/integration/test_shared_server.py",
        device="cpu",
        writable=True,
    ),
)

_applied: set[str] = set()
"""Names of functions that have run in this process, or in the one that it was forked from."""


def patch_vllm(process: Process, *, writable: bool = False) -> None:
    """Make this process's replacements in vLLM, each once.

    Raises:
        IncompatibleError: this vLLM lacks a place.
    """
    device = importlib.import_module("vllm_server.seams").device_type()
    for patch in PATCHES:
        wanted = patch.process == process and patch.device in (None, device) and (writable or not patch.writable)
        module, _, function = patch.by.partition(":")
        if wanted and function and patch.by not in _applied:
            _applied.add(patch.by)
            getattr(importlib.import_module(module), function)()


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
