"""One running server: its parts, a request to the engine, and the reports about versions and engine."""

from __future__ import annotations

import os
import time
from argparse import Namespace
from collections.abc import AsyncGenerator, AsyncIterator
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
from vllm_server.errors import ServeError, engine_is_dead
from vllm_server.fence import Fence, SharedEngine
from vllm_server.policy import Lease, PolicyRegistry, Version
from vllm_server.protocol import FORMAT, BridgeDebug, BridgeInfo, LoraStatus, VersionStatus, WorkerInfo, machine_id
from vllm_server.protocol.routed_experts import RoutedShape
from vllm_server.publisher import Adapters, Publisher
from vllm_server.seams import Engine


async def describe_workers(engine: Engine) -> tuple[WorkerInfo, ...]:
    """Return the engine's workers, ordered by rank.

    Raise an IncompatibleError if this vLLM starts engines elsewhere, so that none would end with a killed server.
    """
    found = await seams.call_workers(engine, "grpo_describe")
    if not engine.vllm_config.parallel_config.use_ray and not all(worker.pop("guarded", True) for worker in found):
        raise seams.moved("process manager that starts EngineCoreProc.run_engine_core")
    return tuple(sorted((msgspec.convert(worker, WorkerInfo) for worker in found), key=lambda worker: worker.rank))


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

        `models` is vLLM's OpenAIServingModels. Raise a FatalError if the weights cannot be shared.
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
        file = await export(engine, args, boot_id, workers) if args.shared_weights else None
        adapters = Adapters(engine, models)
        call = partial(seams.call_workers, engine)
        channels = Channels(call, fence, accepts=args.receive_weights, max_rank=lora.max_lora_rank if lora else None)
        roots = tuple(Path(root).resolve() for root in args.lora_root)
        publisher = Publisher(registry, adapters, channels, roots)
        return cls(engine, adapters, publisher, fence, channels, args, boot_id, workers, file, time.monotonic())

    def close(self) -> None:
        if self.bridge_file is not None:
            self.bridge_file.remove(self.boot_id)

    @property
    def registry(self) -> PolicyRegistry:
        return self.publisher.registry

    @property
    def has_trainer(self) -> bool:
        """Whether a trainer updates this server: by writing its weights, or by adapters that are loaded."""
        writable = self.args.shared_weights or self.args.receive_weights
        return writable or self.channels.is_open or bool(self.registry.versions)

    @asynccontextmanager
    async def serving(self, model: str | None = None, policy_version: int | None = None) -> AsyncIterator[Lease]:
        """Yield the version that answers a request; wait while a trainer writes weights.

        Raise a ServeError: 404 no such version, 503 a publish or an update of shared weights failed half-way.
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
        return BridgeDebug(
            info=self.bridge_info(),
            uptime_seconds=time.monotonic() - self.started,
            paused=await self.engine.is_paused(),
            updating=self.fence.updating,
            fault=self.fence.fault or self.publisher.fault,
            last_stall_seconds=self.fence.last_stall_seconds,
            in_flight={v.name: v.in_flight for v in (self.registry.base, *self.registry.versions)},
        )
