"""`/health`, `/bridge/…` and `/lora/…`: identity, health, holding generation, weights, and versions."""

import logging
from collections.abc import Iterator, Sequence

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route, WebSocketRoute

from grpo_common.http import unless_disconnected
from vllm_server import protocol
from vllm_server.errors import ServeError
from vllm_server.http import parse_body, route
from vllm_server.protocol.channels import ChannelCloseRequest, ChannelRequest, ChannelResponse
from vllm_server.server import PolicyServer

logger = logging.getLogger("vllm.grpo.routes")  # below "vllm": vLLM's handler and format

# ----------------------------------------------------------------------------------------------------------------------
# State.


@route("GET", protocol.HEALTH_ROUTE)
async def health(server: PolicyServer) -> None:
    """Answer 200, or 503 if the engine, a publish or an update of shared weights has failed. vLLM's asks the engine."""
    await server.check_engine()
    server.check_healthy()


@route("GET", protocol.BRIDGE_INFO_ROUTE)
async def info(server: PolicyServer) -> protocol.BridgeInfo:
    return server.bridge_info()


@route("GET", protocol.BRIDGE_DEBUG_ROUTE)
async def debug(server: PolicyServer) -> protocol.BridgeDebug:
    return await server.bridge_debug()


@route("GET", protocol.BRIDGE_STATE_DICT_INFO_ROUTE)
async def state_dict_info(server: PolicyServer) -> protocol.StateDictInfo:
    """Return the parameters of all workers by name. A sharded tensor has the shape of one shard."""
    found: dict[str, protocol.ParameterInfo] = {}
    for answer in await server.engine.collective_rpc("grpo_parameters"):
        found |= msgspec.convert(answer, dict[str, protocol.ParameterInfo])
    return protocol.StateDictInfo(len(found), found)


@route("GET", protocol.BRIDGE_CHECKSUMS_ROUTE)
async def checksums(server: PolicyServer) -> protocol.Checksums:
    """Return checksums of the weights that are served now."""
    server.fence.check_writable("checksums")
    return protocol.Checksums(await server.engine.collective_rpc("grpo_checksums"))


@route("GET", protocol.BRIDGE_LIST_ENDPOINTS_ROUTE)
async def list_endpoints(request: Request) -> protocol.EndpointList:
    """Return every route of the server, vLLM's included."""
    found = set(endpoints(request.app.routes))
    return protocol.EndpointList(sorted(found, key=lambda line: line.partition(" ")[::-1]))


def endpoints(routes: Sequence[BaseRoute], prefix: str = "") -> Iterator[str]:
    """Yield "METHOD /path" of each route. A mounted application whose routes are not visible counts as one route."""
    for each in routes:
        path = prefix + getattr(each, "path", "")
        if isinstance(each, WebSocketRoute):
            yield f"WEBSOCKET {path}"
        elif isinstance(each, Route):
            yield from (f"{method} {path}" for method in (each.methods or {"GET"}) if method != "HEAD")
        elif below := list(getattr(each, "routes", None) or []):
            yield from endpoints(below, path)
        else:
            yield f"GET {path}"


# ----------------------------------------------------------------------------------------------------------------------
# Hold generation.


@route("GET", protocol.BRIDGE_IS_PAUSED_ROUTE)
async def is_paused(server: PolicyServer) -> protocol.PausedState:
    return protocol.PausedState(await server.engine.is_paused())


@route("POST", protocol.BRIDGE_PAUSE_ROUTE)
async def pause(server: PolicyServer, asked: protocol.PauseRequest) -> protocol.BridgeStatus:
    """Pause generation; `mode` decides what happens to in-flight requests."""
    await server.fence.pause(asked.mode)
    return protocol.BridgeStatus("paused")


@route("POST", protocol.BRIDGE_RESUME_ROUTE)
async def resume(server: PolicyServer) -> protocol.BridgeStatus:
    await server.fence.resume()
    return protocol.BridgeStatus("resumed")


@route("GET", protocol.BRIDGE_IS_SLEEPING_ROUTE)
async def is_sleeping(server: PolicyServer) -> protocol.SleepingState:
    return protocol.SleepingState(server.args.enable_sleep_mode and await server.engine.is_sleeping())


@route("POST", protocol.BRIDGE_SLEEP_ROUTE)
async def sleep(server: PolicyServer) -> protocol.BridgeStatus:
    """Free GPU memory until `wake_up`. This is vLLM's sleep mode, which the server must be started with."""
    _check_may_sleep(server)
    async with server.channels.changing:  # after a publish that has begun
        server.fence.check_idle()
        server.fence.asleep = True
        try:
            await server.engine.sleep(1)
        except BaseException:
            server.fence.asleep = await server.engine.is_sleeping()
            raise
    return protocol.BridgeStatus("asleep")


@route("POST", protocol.BRIDGE_WAKE_UP_ROUTE)
async def wake_up(server: PolicyServer) -> protocol.BridgeStatus:
    _check_may_sleep(server)
    async with server.channels.changing:
        server.fence.check_idle()
        ended = {*server.fence.pauses}
        await server.engine.wake_up()
        server.fence.asleep = False
        server.fence.pauses -= ended  # vLLM resumes generation, too
    return protocol.BridgeStatus("awake")


def _check_may_sleep(server: PolicyServer) -> None:
    if server.args.shared_weights:
        fix = "stop the trainer and the server instead, since the trainer computes in this memory"
        raise ServeError(409, "sleep", "a server that shares its weights", "one that doesn't", fix)
    if not server.args.enable_sleep_mode:
        fix = "start it with --enable-sleep-mode"
        raise ServeError(409, "sleep", "a server without sleep mode", "one with it", fix)


# ----------------------------------------------------------------------------------------------------------------------
# Updates of all weights, and the channel by which weights or adapters come.


@route("POST", protocol.BRIDGE_UPDATE_BEGIN_ROUTE)
async def begin_update(
    server: PolicyServer, request: Request, asked: protocol.UpdateBeginRequest
) -> protocol.UpdateBeginResponse | Response:
    """Begin an update, unless the trainer leaves meanwhile: it would never end it."""
    return await unless_disconnected(request, server.fence.begin(asked)) or Response(status_code=499)


@route("POST", protocol.BRIDGE_UPDATE_END_ROUTE)
async def end_update(server: PolicyServer, asked: protocol.UpdateEndRequest) -> protocol.UpdateEndResponse:
    return await server.fence.end(asked)


@route("POST", protocol.BRIDGE_WEIGHTS_STAGE_ROUTE)
async def stage_weights(
    server: PolicyServer, request: Request, asked: protocol.WeightsStageRequest
) -> protocol.WeightsDone | Response:
    return await unless_disconnected(request, server.channels.stage(asked)) or Response(status_code=499)


@route("POST", protocol.BRIDGE_WEIGHTS_APPLY_ROUTE)
async def apply_weights(server: PolicyServer, asked: protocol.WeightsApplyRequest) -> protocol.WeightsDone:
    return await server.channels.apply(asked)


@route("POST", protocol.CHANNELS_ROUTE)
async def open_channel(server: PolicyServer, asked: ChannelRequest) -> ChannelResponse:
    return await server.channels.open(asked)


@route("POST", protocol.CHANNELS_CLOSE_ROUTE)
async def close_channel(server: PolicyServer, asked: ChannelCloseRequest) -> protocol.BridgeStatus:
    return await server.channels.close(asked)


# ----------------------------------------------------------------------------------------------------------------------
# Versions: publish an adapter, withdraw one, list them.


@route("GET", protocol.LORA_STATUS_ROUTE)
async def lora_status(server: PolicyServer) -> protocol.LoraStatus:
    return server.lora_status()


@route("POST", protocol.LORA_LOAD_ROUTE)
async def load(server: PolicyServer, request: Request) -> protocol.LoraLoadResponse:
    """Publish the adapter of a `LoraLoadRequest`, or the one in the body, even if the client disconnects meanwhile."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != protocol.SAFETENSORS_MEDIA_TYPE:
        return await server.publisher.load(_from_json(await request.body(), kind))
    try:
        async with server.publisher.bodies.holding(request.stream()) as file:
            asked = msgspec.convert(dict(request.query_params), protocol.LoraLoadRequest, strict=False)
            return await server.publisher.load(asked, file)
    except msgspec.ValidationError as error:
        raise ServeError(422, "query", error, "adapter_name, version and activate", "correct it") from error
    except ClientDisconnect:
        logger.warning("An adapter broke off on its way here: nothing of it is published")
        raise


def _from_json(body: bytes, kind: str) -> protocol.LoraLoadRequest:
    """Return the request in a JSON body, whatever its content type.

    A body that is neither JSON nor declared as JSON may be an adapter with a wrong content type, so the error names
    both types.
    """
    try:
        return parse_body(body, protocol.LoraLoadRequest)
    except ServeError as error:
        if kind in ("", "application/json"):
            raise
        got, wanted = f"{kind} ({error.got})", f"application/json or {protocol.SAFETENSORS_MEDIA_TYPE}"
        raise ServeError(422, "content-type", got, wanted, "set the content type to that of the body") from error


@route("POST", protocol.LORA_UNLOAD_ROUTE)
async def unload(server: PolicyServer, asked: protocol.LoraUnloadRequest) -> protocol.LoraUnloadResponse:
    return await server.publisher.unload(asked)
