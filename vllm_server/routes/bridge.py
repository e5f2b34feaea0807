"""`/bridge/…` and `/health`: identity, health, and holding generation."""

from collections.abc import Iterator, Sequence

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route, WebSocketRoute

from vllm_server import sharing
from vllm_server.errors import ServeError
from vllm_server.http import json_response, passing_on, read_body
from vllm_server.protocol import (
    BridgeStatus,
    ChannelCloseRequest,
    Checksums,
    EndpointList,
    PausedState,
    PauseRequest,
    SleepingState,
    StateDictInfo,
    UpdateBeginRequest,
    UpdateEndRequest,
    WeightsApplyRequest,
    WeightsOpenRequest,
    WeightsStageRequest,
)
from vllm_server.server import PolicyServer


async def health(request: Request) -> Response:
    """Answer 200, or 503 if the engine, a publish or an update of shared weights has failed."""
    server = PolicyServer.of(request)
    server.check_healthy()
    await server.check_engine()
    return Response(status_code=200)


async def info(request: Request) -> Response:
    """Return the server's `BridgeInfo`."""
    return json_response(PolicyServer.of(request).bridge_info())


async def is_paused(request: Request) -> Response:
    """Return whether generation is paused."""
    return json_response(PausedState(await PolicyServer.of(request).engine.is_paused()))


async def pause(request: Request) -> Response:
    """Pause generation; `PauseRequest.mode` decides what happens to in-flight requests."""
    server, mode = PolicyServer.of(request), (await read_body(request, PauseRequest)).mode
    server.fence.check_idle()
    server.fence.paused = True
    # vLLM's docstring says that "keep" keeps the cache, but its code clears it by default.
    await server.engine.pause_generation(mode=mode, clear_cache=mode != "keep")
    return json_response(BridgeStatus("paused"))


async def resume(request: Request) -> Response:
    """Resume generation."""
    server = PolicyServer.of(request)
    server.fence.check_idle()
    server.fence.check_healthy()
    server.fence.paused = False
    await server.engine.resume_generation()
    return json_response(BridgeStatus("resumed"))


async def begin_update(request: Request) -> Response:
    """Hold generation for an `UpdateBeginRequest`: a trainer is about to write shared weights."""
    asked = await read_body(request, UpdateBeginRequest)
    return json_response(await PolicyServer.of(request).fence.begin(asked))


async def end_update(request: Request) -> Response:
    """Resume generation, or refuse it, as the `UpdateEndRequest` says."""
    asked = await read_body(request, UpdateEndRequest)
    return json_response(await PolicyServer.of(request).fence.end(asked))


# These do what the messages' docstrings say.
open_weights = passing_on(WeightsOpenRequest, lambda request: PolicyServer.of(request).weights.open)
stage_weights = passing_on(WeightsStageRequest, lambda request: PolicyServer.of(request).weights.stage)
apply_weights = passing_on(WeightsApplyRequest, lambda request: PolicyServer.of(request).weights.apply)
close_weights = passing_on(ChannelCloseRequest, lambda request: PolicyServer.of(request).weights.close)


async def sleep(request: Request) -> Response:
    """Free GPU memory until `wake_up`. This is vLLM's sleep mode, which the server must be started with."""
    server = PolicyServer.of(request)
    _check_may_sleep(server)
    await server.engine.sleep(1)
    return json_response(BridgeStatus("asleep"))


async def wake_up(request: Request) -> Response:
    """Undo `sleep`."""
    server = PolicyServer.of(request)
    _check_may_sleep(server)
    await server.engine.wake_up()
    return json_response(BridgeStatus("awake"))


async def is_sleeping(request: Request) -> Response:
    """Return whether the server sleeps."""
    server = PolicyServer.of(request)
    sleeping = server.args.enable_sleep_mode and await server.engine.is_sleeping()
    return json_response(SleepingState(sleeping))


def _check_may_sleep(server: PolicyServer) -> None:
    if server.args.shared_weights:
        raise ServeError(
            409, "sleep", got="a server that shares its weights", wanted="one that does not share them",
            fix="stop the trainer and the server instead, since the trainer computes in this memory",
        )  # fmt: skip
    if not server.args.enable_sleep_mode:
        raise ServeError(
            409,
            "sleep",
            got="a server without sleep mode",
            wanted="one with it",
            fix="start it with --enable-sleep-mode",
        )


async def scale_elastic_ep(request: Request) -> Response:
    """Refuse vLLM's change of its number of engines: the new ones would not have the trained weights."""
    raise ServeError(
        409,
        "scale_elastic_ep",
        got="a change of the number of engines",
        wanted="the number that the server was started with",
        fix="start another server: grpo servers add",
    )


async def state_dict_info(request: Request) -> Response:
    """Return the model's parameters, as `StateDictInfo`."""
    params = await sharing.parameters(PolicyServer.of(request).engine)
    return json_response(StateDictInfo(len(params), params))


async def checksums(request: Request) -> Response:
    """Return the `Checksums` of the weights that are served now."""
    server = PolicyServer.of(request)
    server.fence.check_writable("checksums")
    return json_response(Checksums(await server.engine.collective_rpc("grpo_checksums")))


async def debug(request: Request) -> Response:
    """Return what holds generation, as `BridgeDebug`."""
    return json_response(await PolicyServer.of(request).bridge_debug())


async def list_endpoints(request: Request) -> Response:
    """Return every route of the server, vLLM's included, as `EndpointList`."""
    found = set(_endpoints(request.app.routes))
    return json_response(EndpointList(sorted(found, key=lambda line: line.partition(" ")[::-1])))


def _endpoints(routes: Sequence[BaseRoute], prefix: str = "") -> Iterator[str]:
    """Yield "METHOD /path" of each route. A mounted application whose routes are not visible counts as one route."""
    for route in routes:
        path = prefix + getattr(route, "path", "")
        if isinstance(route, WebSocketRoute):
            yield f"WEBSOCKET {path}"
        elif isinstance(route, Route):
            yield from (f"{method} {path}" for method in (route.methods or {"GET"}) if method != "HEAD")
        elif below := list(getattr(route, "routes", None) or []):
            yield from _endpoints(below, path)
        else:
            yield f"GET {path}"
