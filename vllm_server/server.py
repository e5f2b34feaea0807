"""One running server: vLLM's engine as it uses it, its versions, and the reports about them."""

from __future__ import annotations

import asyncio
import importlib
import logging
import os
import time
from argparse import Namespace
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import msgspec

from vllm_server import output_blocks, seams
from vllm_server.bridge_file import BridgeFile, export
from vllm_server.channels import Channels
from vllm_server.errors import FatalError, ServeError, engine_is_dead, not_finite
from vllm_server.fence import Fence
from vllm_server.policy import Lease, PolicyRegistry, Version
from vllm_server.protocol import FORMAT, BridgeDebug, BridgeInfo, LoraStatus, VersionStatus, WorkerInfo, machine_id
from vllm_server.protocol.routed_experts import RoutedShape
from vllm_server.publisher import Delivery, Installed, Publisher
from vllm_server.seams import Engine
from vllm_server.worker.shared_weights import Exported

logger = logging.getLogger("vllm.grpo.server")  # below "vllm": vLLM's handler and format


async def call_workers(engine: Engine, method: str, *, args: tuple[Any, ...] = (), kwargs: Any = None) -> list[Any]:
    """Return what a method of every worker answers. Of several replicas vLLM's own call returns the first's answers."""
    if engine.vllm_config.parallel_config.data_parallel_size == 1:
        return await engine.collective_rpc(method, args=args, kwargs=kwargs)
    core, call = engine.engine_core, ("collective_rpc", method, None, args, kwargs)
    replicas = await asyncio.gather(*(core._call_utility_async(*call, engine=replica) for replica in core.core_engines))
    return [answer for answers in replicas for answer in answers]


async def describe_workers(engine: Engine) -> tuple[WorkerInfo, ...]:
    """Return the engine's workers, ordered by rank.

    Raises:
        IncompatibleError: this vLLM starts engines elsewhere, so that none would end with a killed server.
    """
    found = await call_workers(engine, "grpo_describe")
    if not engine.vllm_config.parallel_config.use_ray and not all(worker.pop("guarded", True) for worker in found):
        raise seams.moved("process manager that starts EngineCoreProc.run_engine_core")
    return tuple(sorted((msgspec.convert(worker, WorkerInfo) for worker in found), key=lambda worker: worker.rank))


# ----------------------------------------------------------------------------------------------------------------------
# Adapters.


@dataclass(frozen=True)
class Adapters:
    """The engine's adapters, and the table in which vLLM's /v1 routes find them by name.

    `models` is vLLM's OpenAIServingModels. Ids come from its counter, so adapters loaded by vLLM's own `--lora-modules`
    or load route never share an id with ours.
    """

    engine: Engine
    models: Any

    def __post_init__(self) -> None:
        for name in ("lora_requests", "lora_id_counter"):
            if not hasattr(self.models, name):
                raise seams.moved(f"OpenAIServingModels.{name}")

    def next_id(self) -> int:
        """Return an adapter id that this process has never used."""
        return self.models.lora_id_counter.inc(1)

    async def add(self, name: str, adapter_id: int, delivery: Delivery) -> Installed:
        """Write the adapter into a slot of every worker, then register it for /v1.

        Raises:
            ServeError: 422, the adapter is not finite.
            Exception: any error of the engine. The adapter may be installed or not; `remove` it.
        """
        config = msgspec.json.encode(delivery.config).decode()
        where = {"file": delivery.file, "channel": delivery.channel}
        answers = await call_workers(self.engine, "grpo_install_adapter", args=(adapter_id, config), kwargs=where)
        for answer in answers:
            if "field" in answer:
                raise not_finite(answer["field"], answer["refused"])
            if "refused" in answer:
                raise RuntimeError(answer["refused"])
        # With pipeline parallelism a worker has only some layers. A module is unserved if no worker has a place for it.
        unserved = set.intersection(*(set(answer["unserved"]) for answer in answers))
        if unserved:
            raise RuntimeError(f"no place in this model for {', '.join(sorted(unserved)[:5])} ({len(unserved)} in all)")
        self.models.lora_requests[name] = self.request(name, adapter_id, delivery.origin)
        return Installed(
            slot=answers[0]["slot"],
            replayed=all(answer["replayed"] for answer in answers),
            stall_seconds=max(answer["seconds"] for answer in answers),
        )

    async def remove(self, name: str, adapter_id: int) -> None:
        """Free the adapter's slot and its place in the engine's cache. No in-flight request may use it."""
        self.models.lora_requests.pop(name, None)
        await self.engine.remove_lora(adapter_id)
        # vLLM's metric of running and waiting adapters keeps a series for each set of names there ever was.
        registry = importlib.import_module("prometheus_client").REGISTRY
        if (gauge := registry._names_to_collectors.get("vllm:lora_requests_info")) is not None:
            gauge.clear()

    def request(self, name: str, adapter_id: int, path: str) -> Any:
        """Return the `LoRARequest` of a request that this adapter answers."""
        kind = seams.require("vllm.lora.request", "LoRARequest")
        return kind(lora_name=name, lora_int_id=adapter_id, lora_path=path)


# ----------------------------------------------------------------------------------------------------------------------
# Weights that a trainer writes.


@dataclass(frozen=True)
class SharedEngine:
    """The engine, as the fence uses it.

    It calls the engine's core directly: `AsyncLLM.pause_generation` sleeps another 20 ms after the pause.
    """

    engine: Engine

    async def pause(self, mode: str) -> None:
        """Pause generation; return when vLLM has done with requests in flight what the mode says."""
        # With "wait" vLLM would clear caches when requests have ended, even if generation was resumed meanwhile.
        await self.engine.pause_generation(mode=mode, clear_cache=mode == "abort")

    async def forget(self) -> None:
        """Empty the prefix cache."""
        await self.engine.reset_prefix_cache()

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


# ----------------------------------------------------------------------------------------------------------------------
# The server.


@dataclass(frozen=True)
class PolicyServer:
    """The server object in `app.state.policy_server`; `boot_id` is new for each process."""

    engine: Engine
    adapters: Adapters
    publisher: Publisher
    fence: Fence
    channels: Channels
    args: Namespace
    boot_id: str
    workers: tuple[WorkerInfo, ...]
    bridge_file: BridgeFile | None
    started: float

    @classmethod
    async def start(cls, engine: Engine, models: Any, args: Namespace) -> PolicyServer:
        """Create the server, after vLLM has filled its application's state and before the first request.

        Args:
            models: vLLM's OpenAIServingModels.

        Raises:
            FatalError: the weights cannot be shared.
        """
        served = list(args.served_model_name or [args.model])
        lora = engine.vllm_config.lora_config
        registry = PolicyRegistry(
            served_name=served[0],
            aliases=tuple(served[1:]),
            lora_name=args.lora_name,
            keep=args.lora_keep_versions,
            capacity=lora.max_cpu_loras if lora else args.lora_keep_versions + 1,
            base_version=args.policy_version,
        )
        workers = await describe_workers(engine)
        boot_id = str(uuid4())
        shared = SharedEngine(engine)
        writable = args.shared_weights or args.receive_weights
        fence = Fence(boot_id, shared, on_version=registry.rebase, writable=writable, sent=args.receive_weights)
        if args.return_routed_experts:
            output_blocks.check_experts(engine.vllm_config, workers)
            output_blocks.collect_experts()
        if writable:
            shared.salt_caches(fence.passage, lambda: fence.salt)
        file = await export(shared, args, boot_id, workers) if args.shared_weights else None
        adapters = Adapters(engine, models)
        call = partial(call_workers, engine)
        channels = Channels(call, fence, accepts=args.receive_weights, max_rank=lora.max_lora_rank if lora else None)
        roots = tuple(Path(root).resolve() for root in args.lora_root)
        publisher = Publisher(registry, adapters, channels, roots)
        return cls(engine, adapters, publisher, fence, channels, args, boot_id, workers, file, time.monotonic())

    def close(self) -> None:
        """Remove the bridge file."""
        if self.bridge_file is not None:
            self.bridge_file.remove(self.boot_id)

    @property
    def registry(self) -> PolicyRegistry:
        return self.publisher.registry

    @property
    def has_trainer(self) -> bool:
        """Return whether a trainer updates this server: by writing its weights, or by adapters that are loaded."""
        writable = self.args.shared_weights or self.args.receive_weights
        return writable or self.channels.is_open or bool(self.registry.versions)

    @asynccontextmanager
    async def serving(self, model: str | None = None, policy_version: int | None = None) -> AsyncIterator[Lease]:
        """Yield the version that answers a request; wait while a trainer writes weights.

        Raises:
            ServeError: 404 no such version, 503 a publish or an update of shared weights failed half-way.
        """
        await self.fence.passage()
        with self.publisher.serving(model, policy_version) as version:
            yield Lease(version)

    def check_healthy(self) -> None:
        """Raise a ServeError, 503, if weights or adapters are in an unknown state."""
        self.publisher.check_healthy()
        self.fence.check_healthy()

    async def check_engine(self) -> None:
        """Raise a ServeError, 503, if the engine has ended or its outputs can no longer be read."""
        try:
            await self.engine.check_health()
        except seams.engine_dead_error() as error:
            raise engine_is_dead() from error

    async def generate(
        self, prompt: str | list[int], params: Any, request_id: str, version: Version
    ) -> AsyncGenerator[Any, None]:
        """Yield the engine's outputs for a prompt, answered by `version`. Closing the generator aborts the request."""
        lora = None
        if version is not self.registry.base:
            lora = self.adapters.request(version.name, version.adapter_id, version.path)
        text = prompt if isinstance(prompt, str) else None
        asked = {"prompt_token_ids": prompt} if text is None else {"prompt": text}
        (ready,) = await self.engine.renderer.render_cmpl_async([asked])  # text is tokenised, and the prompt checked
        running = self.engine.generate(ready, params, request_id, lora_request=lora, prompt_text=text)
        async with aclosing(running) as outputs:
            async for output in outputs:
                if any(part.finish_reason == "abort" for part in output.outputs):
                    self.fence.check_healthy()  # raises if torn weights ended the request
                if any(part.finish_reason == "error" for part in output.outputs):
                    fix = "omit structured outputs that no token can satisfy"
                    raise ServeError(422, "request", "an error of the engine", "a request that it can complete", fix)
                yield output

    @property
    def routed_shape(self) -> RoutedShape | None:
        """What the workers record of a mixture of experts; None: nothing, or not by request."""
        return self.workers[0].routed_experts if self.args.return_routed_experts else None

    def lora_status(self) -> LoraStatus:
        """Return the answer of `GET /lora/status`."""
        registry, now = self.registry, time.monotonic()
        newest = registry.newest
        active = newest if newest is not registry.base else None
        return LoraStatus(
            lora_available=self.channels.max_rank is not None,
            active_adapter_path=active.path if active else None,
            active_adapter_name=active.name if active else None,
            active_adapter_id=active.adapter_id if active else None,
            load_count=registry.load_count,
            available_adapters=[v.name for v in registry.versions if not v.retired],
            policy_version=newest.version,
            versions=[
                VersionStatus(
                    name=v.name,
                    version=v.version,
                    adapter_id=v.adapter_id,
                    adapter_path=v.path,
                    slot=v.slot,
                    in_flight=v.in_flight,
                    served=v.served,
                    age_seconds=now - v.loaded_at,
                    active=v is newest,
                    draining=v.retired,
                )
                for v in registry.versions
            ],
        )

    def bridge_info(self) -> BridgeInfo:
        """Return the answer of `GET /bridge/info`."""
        config = self.engine.vllm_config
        model, lora = config.model_config, config.lora_config
        return BridgeInfo(
            format=FORMAT,
            enabled=lora is not None,
            shared_weights=self.args.shared_weights,
            receives_weights=self.args.receive_weights,
            update_count=self.registry.load_count + self.fence.updates,
            last_update_time=max(self.publisher.last_update_time, self.fence.last_update_time),
            model_name=str(model.model),
            served_model_name=self.registry.base.name,
            device=seams.device_type(),
            dtype=str(model.dtype).removeprefix("torch."),
            boot_id=self.boot_id,
            pid=os.getpid(),
            policy_version=self.registry.newest.version,
            lora_name=self.registry.lora_name,
            max_lora_rank=lora.max_lora_rank if lora else None,
            max_loras=lora.max_loras if lora else 0,
            keep_versions=self.registry.keep,
            max_model_len=model.max_model_len,
            logprobs_mode=str(model.logprobs_mode),
            vllm_version=seams.vllm_version(),
            lora_dtype=str(lora.lora_dtype).removeprefix("torch.") if lora else None,
            machine=machine_id(),
            workers=list(self.workers),
            bridge_config_path=str(self.bridge_file.path) if self.bridge_file else None,
            logits_dtype=str(model.head_dtype).removeprefix("torch."),
            max_num_seqs=config.scheduler_config.max_num_seqs,
            quantization=model.quantization,
            kv_cache_dtype=str(config.cache_config.cache_dtype),
        )

    async def bridge_debug(self) -> BridgeDebug:
        """Return the answer of `GET /bridge/debug`."""
        return BridgeDebug(
            info=self.bridge_info(),
            uptime_seconds=time.monotonic() - self.started,
            paused=await self.engine.is_paused(),
            updating=self.fence.updating,
            fault=self.fence.fault or self.publisher.fault,
            last_stall_seconds=self.fence.last_stall_seconds,
            in_flight={v.name: v.in_flight for v in (self.registry.base, *self.registry.versions)},
        )
