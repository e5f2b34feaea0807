"""Every place where this server depends on vLLM's internals.

The places are those of vLLM 0.32. `assert_seams` runs at start: if another vLLM has moved something, the server refuses
to start and names the symbol.
"""

import asyncio
import importlib
import inspect
import signal
import socket
from argparse import ArgumentParser, Namespace
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Literal, Protocol

import msgspec
import uvicorn
from starlette.applications import Starlette

from grpo_common.http import address, connection_limit
from vllm_server import forking, output_blocks
from vllm_server.errors import EngineEndedError, ServeError, not_finite
from vllm_server.protocol import ChannelRequest, WorkerInfo
from vllm_server.publisher import Delivery, Installed
from vllm_server.seams import found, moved, seam
from vllm_server.worker import lifeline

_LAUNCHER = "vllm.entrypoints.launchers.api_server.entry"
_CLI_ARGS = "vllm.entrypoints.launchers.cli_args"

# In the launcher: callers of the functions that we replace.
_REPLACED = (
    ("build_and_serve", "build_app"),
    ("build_and_serve", "init_app_state"),
    ("run_server", "run_server_worker"),
)

# Modules that start engine processes, with the context that `get_mp_context` returns.
_STARTERS = ("vllm.v1.engine.utils", "vllm.v1.engine.coordinator")

_LAST_WORDS_S = 2  # time limit for in-flight requests after the server was asked to stop


class Engine(Protocol):
    """The part of vLLM's AsyncLLM that this server uses; `assert_seams` looks for these methods and parameters."""

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
    async def resume_generation(self) -> None: ...
    async def is_paused(self) -> bool: ...
    async def check_health(self) -> None: ...
    def shutdown(self) -> None: ...
    async def sleep(self, level: int = 1) -> None: ...
    async def wake_up(self) -> Any: ...
    async def is_sleeping(self) -> bool: ...
    async def collective_rpc(self, method: str, *, args: tuple[Any, ...] = (), kwargs: Any = None) -> list[Any]: ...
    def get_tokenizer(self) -> Any: ...


def device_type() -> Literal["cpu", "cuda"]:
    """Return the platform that this vLLM serves on."""
    platform = importlib.import_module("vllm.platforms").current_platform
    return "cpu" if platform.is_cpu() else "cuda"


def dispatch_key() -> str:
    """Return the dispatch key of this platform's torch operators."""
    return importlib.import_module("vllm.platforms").current_platform.dispatch_key


def cpu_head_sizes() -> list[int]:
    """Return head sizes for which the CPU build has attention kernels."""
    return list(found("vllm.v1.attention.backends.cpu_attn", "CPUAttentionBackend").get_supported_head_sizes())


def default_max_num_seqs(world_size: int) -> int:
    """Return how many sequences this vLLM's server computes at one time by default, on this GPU."""
    usage = found("vllm.usage.usage_lib", "UsageContext").OPENAI_API_SERVER
    _, sequences = found("vllm.engine.arg_utils", "EngineArgs", "get_batch_defaults").get_batch_defaults(world_size)
    return sequences[usage]


def server_parser(program: str, description: str) -> ArgumentParser:
    """Return vLLM's argument parser, with every flag of `vllm serve`."""
    parser_class = found("vllm.utils.argparse_utils", "FlexibleArgumentParser")
    cli = seam(_CLI_ARGS, "make_arg_parser", "validate_parsed_serve_args")
    return cli.make_arg_parser(parser_class(prog=program, description=description))


def validate_args(args: Namespace) -> None:
    """Run vLLM's checks of parsed arguments."""
    seam(_CLI_ARGS, "validate_parsed_serve_args").validate_parsed_serve_args(args)


def assert_seams() -> None:
    """Raise a FatalError that names the first seam this vLLM does not have."""
    found("vllm.renderers.base", "BaseRenderer", "render_cmpl_async")
    _launcher()
    _engine_process()
    for module in _STARTERS:
        seam(module, "get_mp_context")
    sampling_params_class()
    lora_request_class()
    output_kind(stream=False)
    ours = {name: function for name, function in vars(Engine).items() if not name.startswith("_")}
    parameters = {name: tuple(inspect.signature(function).parameters)[1:] for name, function in ours.items()}
    assert_callable("vllm.v1.engine.async_llm", "AsyncLLM", parameters)
    assert_callable("vllm.v1.engine.core_client", "AsyncMPClient", {"_call_utility_async": ("method", "engine")})


def assert_callable(module: str, owner: str, methods: dict[str, tuple[str, ...]]) -> None:
    """Raise a FatalError if the class lacks one of these methods, or a method lacks one of its parameters."""
    engine = found(module, owner)
    for method, parameters in methods.items():
        function = getattr(engine, method, None)
        known = inspect.signature(function).parameters if function else {}
        missing = [name for name in parameters if name not in known]
        if function is None or missing:
            raise moved(f"{owner}.{method}({', '.join(missing)})")


def _launcher() -> ModuleType:
    module = seam(_LAUNCHER, "build_app", "init_app_state", "run_server", "run_server_worker", "serve_http")
    # We replace module attributes, which has an effect only if the launcher looks them up when it runs.
    for caller, called in _REPLACED:
        if f"{called}(" not in inspect.getsource(found(_LAUNCHER, caller)):
            raise moved(f"{module.__name__}.{caller} that calls {called}")
    return module


def _engine_process() -> type:
    engine_core = found("vllm.v1.engine.core", "EngineCoreProc")
    manager = found("vllm.v1.engine.utils", "CoreEngineProcManager")
    if "target=EngineCoreProc.run_engine_core" not in inspect.getsource(manager):
        raise moved("CoreEngineProcManager that starts run_engine_core")
    return engine_core


def run(
    args: Namespace,
    *,
    extend: Callable[[Starlette], None],
    ready_state: Callable[[Starlette, Engine], Awaitable[None]],
) -> None:
    """Run vLLM's server; block until it ends. Call `extend` with its app and `ready_state` when the engine is up.

    `extend` runs after vLLM has added its routes. `ready_state` runs after `app.state` is filled and before the first
    request.

    Raises:
        FatalError: the engine died.
    """
    launcher = _launcher()
    _extend_app(launcher, extend, ready_state)
    _end_promptly(launcher)
    if not args.numa_bind:  # NUMA binding works on a new program, not on a fork
        _fork_engines()
    output_blocks.unpack()
    found("vllm.entrypoints.serve.utils.api_utils", "cli_env_setup")()
    # vLLM stops the engine first and then waits for in-flight requests, by default without a limit. A stopped engine
    # never answers them.
    serving = launcher.run_server(args, timeout_graceful_shutdown=_LAST_WORDS_S, limit_concurrency=connection_limit())
    with _told_to_stop():
        importlib.import_module("uvloop").run(serving)


def _replace(owner: Any, name: str, value: object) -> Any:
    """Replace `owner.name` by `value` in this process only; return the old value."""
    replaced = getattr(owner, name)
    setattr(owner, name, value)
    return replaced


def _extend_app(
    launcher: ModuleType,
    extend: Callable[[Starlette], None],
    ready_state: Callable[[Starlette, Engine], Awaitable[None]],
) -> None:
    apps: list[Starlette] = []

    def build_extended_app(*positional: Any, **named: Any) -> Starlette:
        app = build_app(*positional, **named)
        extend(app)
        apps.append(app)
        return app

    async def init_extended_state(engine: Engine, *positional: Any, **named: Any) -> None:
        await init_app_state(engine, *positional, **named)
        await ready_state(apps[-1], engine)

    build_app = _replace(launcher, "build_app", build_extended_app)
    init_app_state = _replace(launcher, "init_app_state", init_extended_state)


def _end_promptly(launcher: ModuleType) -> None:
    """Make a signal end the server at any time, and the server's end end the engine."""

    async def start_killable(*positional: Any, **named: Any) -> None:
        # vLLM's handler raises KeyboardInterrupt. A main thread that waits for the engine in C code never runs that
        # handler. Until the engine is ready, a signal therefore kills the server, and lifeline ends the engine. Then
        # vLLM installs handlers for an orderly shutdown.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        await run_server_worker(*positional, **named)

    run_server_worker = _replace(launcher, "run_server_worker", start_killable)
    # After a signal vLLM looks up the command line of another process that holds the server's port. An engine that vLLM
    # itself forks holds it; it is a zombie by then, for which the look-up fails.
    vars(importlib.import_module(launcher.serve_http.__module__))["find_process_using_port"] = lambda port: None
    # An engine process, forked or spawned, sees vLLM's original function, and lifeline's stand-in calls that.
    stand_in = staticmethod(lifeline.run_engine_core)
    lifeline.replaced = _replace(_engine_process(), "run_engine_core", stand_in)


def _fork_engines() -> None:
    """Have vLLM fork engines from the preloaded process, if a fork is safe."""
    for name in _STARTERS:
        module = seam(name, "get_mp_context")

        def context(vllms: Callable[[], Any] = module.get_mp_context) -> Any:
            return forking.context() or vllms()

        _replace(module, "get_mp_context", context)


@contextmanager
def _told_to_stop() -> Iterator[None]:
    """Raise a FatalError if the HTTP server ends without a signal: after the engine died, vLLM exits with status 0.

    A signal makes vLLM end the engine and then cancel the HTTP server. In between, vLLM's watchdog may find the engine
    ended and end the HTTP server as if the engine had died.
    """
    told = ended_by_itself = False

    def shutdown(self: Engine, *positional: Any, **named: Any) -> None:
        nonlocal told
        told = True
        vllms_shutdown(self, *positional, **named)

    async def serve(self: uvicorn.Server, sockets: list[socket.socket] | None = None) -> None:
        nonlocal ended_by_itself
        await vllms_serve(self, sockets)  # a signal cancels it
        ended_by_itself = not told

    vllms_shutdown = _replace(found("vllm.v1.engine.async_llm", "AsyncLLM"), "shutdown", shutdown)
    vllms_serve = _replace(uvicorn.Server, "serve", serve)
    yield
    if ended_by_itself:
        raise EngineEndedError("the engine has ended", fix="see its last lines above")


async def rendered(engine: Engine, prompt: str | list[int]) -> Any:
    """Return the prompt as the engine takes it: text is tokenised, and the prompt is checked.

    Raises:
        One of `request_errors`: the prompt is too long or not valid for this model.
    """
    raw = {"prompt": prompt} if isinstance(prompt, str) else {"prompt_token_ids": prompt}
    (ready,) = await engine.renderer.render_cmpl_async([raw])
    return ready


def sampling_params_class() -> Any:
    """Return `SamplingParams`, whose fields are the sampling keys that a request may use."""
    return found("vllm.sampling_params", "SamplingParams")


def output_kind(*, stream: bool) -> Any:
    """Return vLLM's output kind: new tokens each time for a stream, else all tokens once at the end."""
    kinds = found("vllm.sampling_params", "RequestOutputKind")
    return kinds.DELTA if stream else kinds.FINAL_ONLY


def lora_request_class() -> Any:
    """Return `LoRARequest`."""
    return found("vllm.lora.request", "LoRARequest")


def request_errors() -> tuple[type[Exception], ...]:
    """Return what vLLM raises for a bad request."""
    return (ValueError, TypeError, found("vllm.exceptions", "VLLMClientError"))


def engine_dead_error() -> type[Exception]:
    """Return the error that the engine raises when its process has ended, or its outputs can no longer be read."""
    return found("vllm.v1.engine.exceptions", "EngineDeadError")


def engine_generate_error() -> type[Exception]:
    """Return the error that the engine raises for any other failure of one request; the failure is its cause."""
    return found("vllm.v1.engine.exceptions", "EngineGenerateError")


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
                raise moved(f"OpenAIServingModels.{name}")

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

    async def open_channel(self, name: str, request: ChannelRequest) -> None:
        """Have every worker map the trainer's memory, or join its communicator.

        Raises:
            ServeError: 422, a worker cannot; the channel is then closed in all workers.
        """
        try:
            await self._call("grpo_open_channel", name, msgspec.json.encode(request).decode())
        except RuntimeError as error:
            await self.close_channel(name)
            raise ServeError(
                422, "channel", got=error, wanted="a trainer that the engine can reach this way",
                fix="publish by another transport (memory works everywhere)",
            ) from error  # fmt: skip

    async def close_channel(self, name: str) -> None:
        """Close the channel in every worker."""
        await call_workers(self.engine, "grpo_close_channel", args=(name,))

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
        _forget_names()

    def request(self, name: str, adapter_id: int, path: str) -> Any:
        """Return the `LoRARequest` of a request that this adapter answers."""
        return lora_request_class()(lora_name=name, lora_int_id=adapter_id, lora_path=path)


def _forget_names() -> None:
    """Clear vLLM's metric of running and waiting adapters: it keeps a series for each set of names there ever was."""
    registry = importlib.import_module("prometheus_client").REGISTRY
    if (gauge := registry._names_to_collectors.get("vllm:lora_requests_info")) is not None:
        gauge.clear()


async def call_workers(engine: Engine, method: str, *, args: tuple[Any, ...] = (), kwargs: Any = None) -> list[Any]:
    """Return what a method of every worker answers. Of several replicas vLLM's own call returns the first's answers."""
    if engine.vllm_config.parallel_config.data_parallel_size == 1:
        return await engine.collective_rpc(method, args=args, kwargs=kwargs)
    core, call = engine.engine_core, ("collective_rpc", method, None, args, kwargs)
    replicas = await asyncio.gather(*(core._call_utility_async(*call, engine=replica) for replica in core.core_engines))
    return [answer for answers in replicas for answer in answers]


async def describe_workers(engine: Engine) -> tuple[WorkerInfo, ...]:
    """Return the engine's workers, ordered by rank."""
    found = await call_workers(engine, "grpo_describe")
    return tuple(sorted((msgspec.convert(worker, WorkerInfo) for worker in found), key=lambda worker: worker.rank))


async def announce(app: Starlette, scheme: str, host: str) -> None:
    """Print uvicorn's line when the server accepts requests: uvicorn prints none when it is given a socket."""
    while not (getattr(app.state, "server", None) and app.state.server.started):
        await asyncio.sleep(0.02)
    sockets = [sock for server in app.state.server.servers for sock in server.sockets]
    port = sockets[0].getsockname()[1] if sockets else 0
    print(f"INFO:     Uvicorn running on {scheme}://{address(host, port)} (Press CTRL+C to quit)", flush=True)
