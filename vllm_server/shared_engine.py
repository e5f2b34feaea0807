"""vLLM's end of shared weights: the seams beside those of `compat`, and asserted with them when weights are shared."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from vllm_server import compat
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
    """As `compat.assert_seams`, for what is called here.

    Raises:
        FatalError: names what this vLLM does not have.
    """
    compat.assert_callable("vllm.v1.engine.core_client", "AsyncMPClient", _CORE_SEAMS)
    request = compat.seam(("vllm.v1.engine",), "EngineCoreRequest").EngineCoreRequest
    if "cache_salt" not in request.__struct_fields__ or request.__struct_config__.frozen:
        raise compat.moved("EngineCoreRequest.cache_salt that can be set")
    hashing = compat.seam(("vllm.v1.core.kv_cache_utils",), "generate_block_hash_extra_keys")
    if "cache_salt" not in inspect.getsource(hashing.generate_block_hash_extra_keys):
        raise compat.moved("generate_block_hash_extra_keys that reads cache_salt")


@dataclass(frozen=True)
class SharedEngine:
    """The engine as the fence holds it.

    The engine's core is told directly: `AsyncLLM.pause_generation` sleeps 20 ms after the pause, to no end here.
    """

    engine: compat.Engine

    async def hold(self, *, abort: bool) -> None:
        """vLLM answers a pause when its queue of batches is empty; what they launched on the device may still run."""
        mode = "abort" if abort else "keep"
        await self.engine.engine_core.pause_scheduler_async(mode=mode, clear_cache=False)
        await self.engine.collective_rpc("grpo_synchronize")

    async def renew(self, *, recompute: bool) -> None:
        """Requests that begin now find nothing old by their salt. What runs loses its cache only if it is put back
        into the queue; without that vLLM resets nothing while anything runs. Of images, encoded ones are kept by
        content alone: they go, and whoever runs on them is put back.
        """
        images = self.engine.vllm_config.model_config.is_multimodal_model
        if recompute or images:
            await self.engine.engine_core.reset_prefix_cache_async(reset_running_requests=True)
        if images:
            await self.engine.engine_core.reset_encoder_cache_async()

    async def release(self) -> None:
        """The scheduler goes on."""
        await self.engine.engine_core.resume_scheduler_async()

    def salt_caches(self, salt: Callable[[], str]) -> None:
        """Key every request's cache by what `salt` says when the engine gets it, whichever route it came by."""
        core = self.engine.engine_core
        add = core.add_request_async

        async def add_salted(request: Any) -> None:
            request.cache_salt = f"{salt()} {request.cache_salt or ''}"
            await add(request)

        core.add_request_async = add_salted

    async def export(self) -> Exported:
        """Have the worker share its parameters.

        Raises:
            FatalError: it can't; the message says why.
        """
        (answer,) = await self.engine.collective_rpc("grpo_export_weights")
        if "refused" in answer:
            raise FatalError(answer["refused"], field="--shared-weights")
        return msgspec.json.decode(answer["exported"], type=Exported)


async def parameters(engine: compat.Engine) -> dict[str, ParameterInfo]:
    """The parameters of all workers by name; those of one shard of a tensor have its shape."""
    found: dict[str, ParameterInfo] = {}
    for answer in await engine.collective_rpc("grpo_parameters"):
        found |= msgspec.convert(answer, dict[str, ParameterInfo])
    return found
