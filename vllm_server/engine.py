"""vLLM's engine as this server uses it: adapters in its slots, its workers, and holding it while weights change."""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from vllm_server import seams
from vllm_server.errors import FatalError, not_finite
from vllm_server.protocol import ParameterInfo, WorkerInfo
from vllm_server.publisher import Delivery, Installed
from vllm_server.seams import Engine
from vllm_server.worker.shared_weights import Exported


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


async def parameters(engine: Engine) -> dict[str, ParameterInfo]:
    """Return the parameters of all workers by name. A sharded tensor has the shape of one shard."""
    found: dict[str, ParameterInfo] = {}
    for answer in await engine.collective_rpc("grpo_parameters"):
        found |= msgspec.convert(answer, dict[str, ParameterInfo])
    return found


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
        answers = await self._call("grpo_install_adapter", adapter_id, config, **where)
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

    async def _call(self, method: str, *args: Any, **kwargs: Any) -> list[dict[str, Any]]:
        """Call a method of every worker's extension. Raise if a worker refuses."""
        answers = await call_workers(self.engine, method, args=args, kwargs=kwargs)
        for answer in answers:
            if "field" in answer:
                raise not_finite(answer["field"], answer["refused"])
            if "refused" in answer:
                raise RuntimeError(answer["refused"])
        return answers

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
