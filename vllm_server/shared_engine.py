"""vLLM's side of shared weights: further seams, checked like those of `compat` when weights are shared."""

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from vllm_server import compat, seams
from vllm_server.errors import FatalError
from vllm_server.protocol import ParameterInfo
from vllm_server.worker.shared_weights import Exported

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
