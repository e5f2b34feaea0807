"""What this server uses of vLLM's internals, in one table; `probe` checks it at start and names what has moved.

The places are those of vLLM 0.32. What this server *replaces* in vLLM is in `patches`.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any, Literal, Protocol

from vllm_server.errors import IncompatibleError
from vllm_server.protocol import VLLM_RUN

CLI = "vllm.entrypoints.launchers.cli_args"
_CORE_CLIENT = "vllm.v1.engine.core_client"


class Engine(Protocol):
    """The part of vLLM's AsyncLLM that this server uses."""

    vllm_config: Any
    renderer: Any
    engine_core: Any
    output_processor: Any

    def generate(
        self,
        prompt: Any,
        sampling_params: Any,
        request_id: str,
        *,
        lora_request: Any = None,
        prompt_text: str | None = None,
    ) -> AsyncGenerator[Any, None]: ...
    async def remove_lora(self, lora_id: int) -> bool: ...
    async def pause_generation(self, *, mode: str, clear_cache: bool) -> None: ...
    async def reset_prefix_cache(self) -> bool: ...
    async def is_paused(self) -> bool: ...
    async def check_health(self) -> None: ...
    async def sleep(self, level: int = 1) -> None: ...
    async def wake_up(self) -> Any: ...
    async def is_sleeping(self) -> bool: ...
    async def collective_rpc(self, method: str, *, args: tuple[Any, ...] = (), kwargs: Any = None) -> list[Any]: ...
    def get_tokenizer(self) -> Any: ...


Seams = dict[str, dict[str, tuple[str, ...]]]

SEAMS: Seams = {
    "vllm.entrypoints.launchers.launcher": {
        "setup_server": ("args", "reuse_port"),
        "NoSignalServer": (),
        "watchdog_loop": (),
    },
    "vllm.entrypoints.launchers.api_server.entry": {"build_async_engine_client": ("args",)},
    "vllm.entrypoints.launchers.api_server.app_state": {
        "init_app_state": ("engine_client", "state", "args", "supported_tasks")
    },
    "vllm.entrypoints.launchers.app": {"build_app": ("args", "supported_tasks", "model_config")},
    "vllm.entrypoints.launchers.utils.server_utils": {"get_uvicorn_log_config": ("args",)},
    "vllm.entrypoints.launchers.utils.ssl": {"SSLCertRefresher": ()},
    "vllm.entrypoints.serve.utils.api_utils": {"cli_env_setup": ()},
    CLI: {"make_arg_parser": (), "validate_parsed_serve_args": ("args",)},
    "vllm.utils.argparse_utils": {"FlexibleArgumentParser": ()},
    "vllm.utils.system_utils": {"decorate_logs": ()},
    "vllm.v1.engine.core": {"EngineCoreProc.run_engine_core": ()},
    "vllm.v1.engine.utils": {"get_mp_context": ()},
    "vllm.v1.engine.coordinator": {"get_mp_context": ()},
    "vllm.v1.engine.exceptions": {"EngineDeadError": (), "EngineGenerateError": ()},
    "vllm.exceptions": {"VLLMClientError": ()},
    "vllm.sampling_params": {"SamplingParams": (), "RequestOutputKind": ()},
    "vllm.lora.request": {"LoRARequest": ()},
    "vllm.renderers.base": {"BaseRenderer.render_cmpl_async": ()},
    "vllm.v1.engine.async_llm": {
        f"AsyncLLM.{name}": tuple(inspect.signature(function).parameters)[1:]
        for name, function in vars(Engine).items()
        if not name.startswith("_")
    },
    _CORE_CLIENT: {
        "AsyncMPClient._call_utility_async": ("method", "engine"),
        "AsyncMPClient.resume_scheduler_async": (),
    },
}
"""By module: functions, classes and methods, with the parameters that this server passes by name."""

WRITABLE_SEAMS: Seams = {
    _CORE_CLIENT: {
        "AsyncMPClient.pause_scheduler_async": ("mode", "clear_cache"),
        "AsyncMPClient.reset_prefix_cache_async": ("reset_running_requests",),
        "AsyncMPClient.reset_encoder_cache_async": (),
        "AsyncMPClient.add_request_async": ("request",),
    },
    "vllm.v1.engine.output_processor": {"OutputProcessor.abort_requests": ("request_ids", "internal")},
}
"""The same for a server whose weights a trainer writes."""


def probe(*, writable: bool = False) -> None:
    """Raise an IncompatibleError that names every place that this server uses and this vLLM does not have."""
    missing: list[str] = []
    for table in (SEAMS, WRITABLE_SEAMS) if writable else (SEAMS,):
        for module, names in table.items():
            for name, parameters in names.items():
                try:
                    known = inspect.signature(require(module, name)).parameters if parameters else require(module, name)
                except IncompatibleError:
                    missing.append(f"{module}.{name}")
                    continue
                if lacking := [each for each in parameters if each not in known]:
                    missing.append(f"{module}.{name}({', '.join(lacking)})")
    if writable and not _salts_cache_keys():
        missing.append("EngineCoreRequest.cache_salt that becomes part of cache keys")
    if missing:
        raise moved(", no ".join(missing))


def _salts_cache_keys() -> bool:
    """Return whether a request's salt can be set, and is part of the key of its first block in the prefix cache."""
    try:
        request = require("vllm.v1.engine", "EngineCoreRequest")
        if "cache_salt" not in request.__struct_fields__ or request.__struct_config__.frozen:
            return False
        stand_in = SimpleNamespace(cache_salt="salt", mm_features=[], lora_request=None, prompt_embeds=None)
        keys, _ = require("vllm.v1.core.kv_cache_utils", "generate_block_hash_extra_keys")(stand_in, 0, 1, 0)
    except (IncompatibleError, AttributeError, TypeError, ValueError):
        return False
    return "salt" in str(keys)


def require(module: str, name: str = "", *members: str) -> Any:
    """Return one of vLLM's modules, or what is called `name` in it; `name` may have dots.

    Raise an IncompatibleError that names it if the module, the name or one of its `members` does not exist.
    """
    try:
        value: Any = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if not module.startswith(error.name or "\0"):
            raise  # the module exists, but one of its imports does not
        raise moved(module) from error
    place = module
    for part in filter(None, name.split(".")):
        place = f"{place}.{part}"
        if not hasattr(value, part):
            raise moved(place)
        value = getattr(value, part)
    for member in members:
        if not hasattr(value, member):
            raise moved(f"{place}.{member}")
    return value


def moved(symbol: str) -> IncompatibleError:
    """Return the error for a symbol that this vLLM does not have."""
    return IncompatibleError(
        f"has no {symbol}", field=f"vLLM {vllm_version()}", wanted=f"vLLM {VLLM_RUN}", fix="install it"
    )


def vllm_version() -> str:
    """Return vLLM's version from its module: the CPU build's distribution has another name in its metadata."""
    return importlib.import_module("vllm.version").__version__


# ----------------------------------------------------------------------------------------------------------------------
# What several modules use.


def device_type() -> Literal["cpu", "cuda"]:
    """Return the platform that this vLLM serves on."""
    return "cpu" if require("vllm.platforms", "current_platform").is_cpu() else "cuda"


def request_errors() -> tuple[type[Exception], ...]:
    """Return what vLLM raises for a bad request."""
    return (ValueError, TypeError, require("vllm.exceptions", "VLLMClientError"))


def engine_dead_error() -> type[Exception]:
    """Return the error that the engine raises when its process has ended, or its outputs can no longer be read."""
    return require("vllm.v1.engine.exceptions", "EngineDeadError")


def engine_generate_error() -> type[Exception]:
    """Return the error that the engine raises for any other failure of one request; the failure is its cause."""
    return require("vllm.v1.engine.exceptions", "EngineGenerateError")


async def call_workers(engine: Engine, method: str, *, args: tuple[Any, ...] = (), kwargs: Any = None) -> list[Any]:
    """Return what a method of every worker answers. Of several replicas vLLM's own call returns the first's answers."""
    if engine.vllm_config.parallel_config.data_parallel_size == 1:
        return await engine.collective_rpc(method, args=args, kwargs=kwargs)
    core, call = engine.engine_core, ("collective_rpc", method, None, args, kwargs)
    replicas = await asyncio.gather(*(core._call_utility_async(*call, engine=replica) for replica in core.core_engines))
    return [answer for answers in replicas for answer in answers]
