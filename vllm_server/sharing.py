"""A server whose weights a trainer writes: what it refuses, what it uses of vLLM, and the bridge file."""

import asyncio
import inspect
import logging
import os
from argparse import Namespace
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from grpo_common.errors import Problem
from grpo_common.http import address
from grpo_common.models import config_parts
from grpo_common.sharing import indivisible, unreceivable, unshareable
from vllm_server import compat, model_check, seams
from vllm_server.bridge_file import BridgeFile
from vllm_server.errors import FatalError
from vllm_server.protocol import ParameterInfo, WorkerInfo, machine_id
from vllm_server.protocol.bridge_config import SCHEMA_VERSION, BridgeConfigFile, ParamMapping, RankWeights
from vllm_server.worker.shared_weights import Exported

# ----------------------------------------------------------------------------------------------------------------------
# Refuse settings that prevent a trainer from writing the weights, before anything is loaded.


_ALLOCATOR_SETTINGS = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")

_REPACKING_FORMATS = ("bitsandbytes", "gguf")


def check_shareable(
    args: Namespace, config: Mapping[str, Any], device: str, environment: Mapping[str, str], kernel: str
) -> None:
    """Raise for the first setting that does not work with shared weights.

    Args:
        args: the parsed command line.
        config: the model's config.json.
        device: "cpu" or "cuda".
        kernel: the kernel's release, `os.uname().release`.

    Raises:
        FatalError: it names everything that cannot work; exit status 2.
    """
    refusals = _refusals(args, config, device, environment, kernel)
    if problems := [replace(refusal, field="--shared-weights") for refusal in refusals]:
        raise FatalError.of(problems)


def check_receivable(args: Namespace, config: Mapping[str, Any], device: str) -> None:
    """Raise for settings with which no trainer could send weights; see `check_shareable`."""
    found = [replace(each, got=f"{flag(each.field)} {each.got}".rstrip()) for each in unreceivable(vars(args))]
    latent = _latent_attention(config, "computing its copies of weights again was tried on CPUs only")
    refusals = [*found, *_plain_weights(args, config, device), *(latent if device == "cuda" else ())]
    if len(config_parts(config)) > 1 and not args.language_model_only:
        wanted = "the model's text part alone, since a trainer sends no other part"
        refusals.append(Problem(got="--no-language-model-only", wanted=wanted, fix="leave it out"))
    if problems := [replace(refusal, field="--receive-weights") for refusal in refusals]:
        raise FatalError.of(problems)


def _refusals(
    args: Namespace, config: Mapping[str, Any], device: str, environment: Mapping[str, str], kernel: str
) -> Iterator[Problem]:
    for refusal in unshareable(vars(args)):
        yield replace(refusal, got=f"{flag(refusal.field)} {refusal.got}")
    for text in config_parts(config):
        for refusal in indivisible(text, args.tensor_parallel_size):
            size = f"--tensor-parallel-size {args.tensor_parallel_size}"
            yield replace(refusal, got=f"{size}, and a {refusal.field} of {refusal.got}")
    if args.port == 0 and not args.uds:
        yield Problem(
            got="--port 0",
            wanted="a port's number, since the bridge file tells the trainer where the server is",
            fix="choose a port",
        )
    yield from _plain_weights(args, config, device)
    yield from _latent_attention(config, "vLLM computes with copies of its weights, which a write in place leaves old")
    if device != "cuda":
        return
    for name in _ALLOCATOR_SETTINGS:
        if "expandable_segments:true" in environment.get(name, "").lower().replace(" ", ""):
            yield Problem(
                got=f"{name}={environment[name]}",
                wanted="no expandable_segments, since their memory cannot be shared",
                fix=f"unset {name}",
            )
    if "microsoft" in kernel.lower():
        yield Problem(
            got=f"WSL ({kernel})",
            wanted="Linux itself, since WSL has no CUDA IPC",
            fix="use lora_only or a Linux machine",
        )


def _plain_weights(args: Namespace, config: Mapping[str, Any], device: str) -> Iterator[Problem]:
    """Yield what keeps the engine from computing with the parameters as a checkpoint has them."""
    if args.load_format in _REPACKING_FORMATS:
        yield Problem(
            got=f"--load-format {args.load_format}",
            wanted="plain weights, since packed ones cannot be trained in place",
            fix="use safetensors",
        )
    for text in config_parts(config):
        yield from _model_refusals(text)
    if device == "cuda" and args.moe_backend not in ("auto", "triton"):
        yield Problem(
            got=f"--moe-backend {args.moe_backend}",
            wanted="triton, since the others reorder experts' weights",
            fix="leave it out",
        )


def _model_refusals(config: Mapping[str, Any]) -> Iterator[Problem]:
    for name in ("quantization_config", "compression_config"):
        if config.get(name):
            found = config[name]
            method = found.get("quant_method", "?") if isinstance(found, Mapping) else found
            yield Problem(
                got=f"a model with {name} ({method}) in its config.json",
                wanted="plain weights, since quantised ones cannot be trained in place",
                fix="use lora_only, or the model before it was quantised",
            )


def _latent_attention(config: Mapping[str, Any], why: str) -> Iterator[Problem]:
    for text in config_parts(config):
        if text.get("kv_lora_rank"):
            got = f"a model with multi-head latent attention (kv_lora_rank {text['kv_lora_rank']})"
            yield Problem(got=got, wanted=f"a model without it, since {why}", fix="use lora_only")


def flag(name: str) -> str:
    """Return the flag of a parsed argument's name."""
    return "--" + name.replace("_", "-")


# ----------------------------------------------------------------------------------------------------------------------
# vLLM's side of shared weights: further seams, checked like those of `compat` when weights are shared.


_CORE_SEAMS: dict[str, tuple[str, ...]] = {
    "pause_scheduler_async": ("mode", "clear_cache"),
    "resume_scheduler_async": (),
    "reset_prefix_cache_async": ("reset_running_requests",),
    "reset_encoder_cache_async": (),
    "add_request_async": ("request",),
}


def assert_seams() -> None:
    """Check the seams that this module uses, as `compat.assert_seams` does.

    Raises:
        FatalError: names what this vLLM does not have.
    """
    compat.assert_callable("vllm.v1.engine.core_client", "AsyncMPClient", _CORE_SEAMS)
    processor = {"abort_requests": ("request_ids", "internal")}
    compat.assert_callable("vllm.v1.engine.output_processor", "OutputProcessor", processor)
    request = seams.found("vllm.v1.engine", "EngineCoreRequest")
    if "cache_salt" not in request.__struct_fields__ or request.__struct_config__.frozen:
        raise seams.moved("EngineCoreRequest.cache_salt that can be set")
    hashing = seams.found("vllm.v1.core.kv_cache_utils", "generate_block_hash_extra_keys")
    if "cache_salt" not in inspect.getsource(hashing):
        raise seams.moved("generate_block_hash_extra_keys that reads cache_salt")


@dataclass(frozen=True)
class SharedEngine:
    """The engine, as the fence uses it.

    It calls the engine's core directly: `AsyncLLM.pause_generation` sleeps another 20 ms after the pause.
    """

    engine: compat.Engine

    async def hold(self, *, abort: bool) -> None:
        """Hold scheduling.

        vLLM confirms a pause when its queue of batches is empty. Their kernels may still run on the device, so wait for
        the device. Both requests are sent at once. An idle engine confirms the pause before it waits for the device.
        One that confirms it afterwards still had batches, so wait for the device again.
        """
        mode = "abort" if abort else "keep"
        pause = asyncio.ensure_future(self.engine.engine_core.pause_scheduler_async(mode=mode, clear_cache=False))

        async def was_idle() -> bool:
            await self.engine.collective_rpc("grpo_synchronize")
            return pause.done()

        _, idle = await asyncio.gather(pause, was_idle())
        if not idle:
            await self.engine.collective_rpc("grpo_synchronize")

    async def renew(self, *, recompute: bool) -> None:
        """Drop caches of the old weights.

        New requests cannot match old prefix-cache entries, because the salt differs. In-flight requests lose their
        caches only if they return to the queue; otherwise vLLM resets nothing while a request runs. Encoded images are
        cached by content alone. That cache must be cleared, and in-flight requests must return to the queue.
        """
        images = self.engine.vllm_config.model_config.is_multimodal_model
        if recompute or images:
            await self.engine.engine_core.reset_prefix_cache_async(reset_running_requests=True)
        if images:
            await self.engine.engine_core.reset_encoder_cache_async()

    async def release(self) -> None:
        """Resume the scheduler."""
        await self.engine.engine_core.resume_scheduler_async()

    def salt_caches(self, passage: Callable[[], Awaitable[None]], salt: Callable[[], str]) -> None:
        """Add `salt()` to the cache key of every completion, from any route, when it is passed to the engine.

        A completion that arrives during an update waits at `passage` first, although its HTTP request has passed the
        fence before: with the old key it would read prefixes that the old weights had computed.
        """
        core, processor = self.engine.engine_core, self.engine.output_processor
        add = core.add_request_async

        async def add_salted(request: Any) -> None:
            try:
                await passage()
            except BaseException:
                # vLLM has entered the completion in its tables, and removes only those that its engine has begun.
                processor.abort_requests([request.request_id], internal=True)
                raise
            request.cache_salt = f"{salt()} {request.cache_salt or ''}"
            await add(request)

        core.add_request_async = add_salted

    async def export(self) -> list[Exported]:
        """Have the workers share their parameters, and return their answers by rank.

        Raises:
            FatalError: a worker cannot; the message says why.
        """
        answers = await self.engine.collective_rpc("grpo_export_weights")
        for answer in answers:
            if "refused" in answer:
                raise FatalError(answer["refused"], field="--shared-weights")
        exported = [msgspec.json.decode(answer["exported"], type=Exported) for answer in answers]
        return sorted(exported, key=lambda each: each.rank)


async def parameters(engine: compat.Engine) -> dict[str, ParameterInfo]:
    """Return the parameters of all workers by name. A sharded tensor has the shape of one shard."""
    found: dict[str, ParameterInfo] = {}
    for answer in await engine.collective_rpc("grpo_parameters"):
        found |= msgspec.convert(answer, dict[str, ParameterInfo])
    return found


logger = logging.getLogger("vllm.grpo.sharing")

_WITHOUT_EFFECT = ("VLLM_SKIP_WEIGHT_DAEMON", "NUM_INFERENCE_NODES")

_REACHED_BY = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}  # servers that listen on all addresses


def prepare(args: Namespace) -> None:
    """Refuse unsupported settings before anything is loaded, and set the vLLM flags that plain weights need.

    Raises:
        FatalError: see `check_shareable`, `check_receivable`, `assert_seams` and `bridge_file`.
    """
    set_in_vain = [name for name in _WITHOUT_EFFECT if name in os.environ]
    if set_in_vain:
        logger.warning("%s: accepted, without effect", ", ".join(set_in_vain))
    if not (args.shared_weights or args.receive_weights):
        return
    if args.shared_weights and args.receive_weights:
        raise FatalError(
            field="--receive-weights", got="--shared-weights with it", wanted="one of them", fix="leave one out"
        )
    config, device = model_check.config_or_nothing(args.model), compat.device_type()
    if args.shared_weights:
        check_shareable(args, config, device, os.environ, os.uname().release)
        bridge_file(args).check()
    else:
        check_receivable(args, config, device)
    assert_seams()
    if device == "cuda":
        args.moe_backend = "triton"  # the triton backend does not reorder experts' weights


def bridge_file(args: Namespace) -> BridgeFile:
    """Return the place of this server's bridge file."""
    return BridgeFile.choose(args.bridge_config_path, os.environ)


async def export(engine: SharedEngine, args: Namespace, boot_id: str, workers: Sequence[WorkerInfo]) -> BridgeFile:
    """Share the weights and write the bridge file.

    Args:
        workers: by rank.

    Raises:
        FatalError: the weights cannot be shared, or the file cannot be written.
    """
    first, *others = await engine.export()
    handles = first.handles
    file = bridge_file(args)
    file.write(
        BridgeConfigFile(
            model=str(engine.engine.vllm_config.model_config.model),
            tp_degree=len(workers),
            dp_shard_degree=1,
            param_names=list(handles),
            param_mappings=_mappings(first),
            ipc_handles=handles,
            shared_weights_enabled=True,
            single_copy_enabled=True,
            num_params=len(handles),
            schema_version=SCHEMA_VERSION,
            kind="cuda_ipc" if compat.device_type() == "cuda" else "file",
            server_url=server_url(args),
            server_pid=os.getpid(),
            boot_id=boot_id,
            machine=machine_id(),
            gpu_uuid=workers[0].gpu_uuid,
            vllm_version=seams.vllm_version(),
            torch_version=first.torch_version,
            further_ranks=[
                RankWeights(
                    rank=each.rank,
                    param_mappings=_mappings(each),
                    ipc_handles=each.handles,
                    gpu_uuid=workers[each.rank].gpu_uuid,
                )
                for each in others
            ],
        )
    )
    logger.info("Exported %d IPC handles for single-copy mode: %s", len(handles), file.path)
    return file


def _mappings(exported: Exported) -> dict[str, ParamMapping]:
    return {
        name: ParamMapping(vllm_name=name, shape=handle.shape, dtype=handle.dtype, device=exported.device)
        for name, handle in exported.handles.items()
    }


def server_url(args: Namespace) -> str:
    """Return the URL by which a trainer on this machine reaches the server."""
    if args.uds:
        return f"unix:{args.uds}"
    host = args.host or ""
    host = _REACHED_BY.get(host, host)
    scheme = "https" if args.ssl_keyfile else "http"
    return f"{scheme}://{address(host, args.port)}"
