"""`/bridge/…` and `/health`: who this server is, whether it is well, and holding generation still."""

from starlette.requests import Request
from starlette.responses import Response

from vllm_server.compat import engine_dead_error
from vllm_server.errors import engine_is_dead
from vllm_server.http import json_response, read_body
from vllm_server.protocol import BridgeStatus, PausedState, PauseRequest
from vllm_server.server import PolicyServer


async def health(request: Request) -> Response:
    """200, or 503 when the engine is dead or a publish failed half-way."""
    server = PolicyServer.of(request)
    server.publisher.check_healthy()
    try:
        await server.engine.check_health()
    except engine_dead_error() as error:
        raise engine_is_dead() from error
    return Response(status_code=200)


async def info(request: Request) -> Response:
    """Who this server is, as `BridgeInfo`."""
    return json_response(PolicyServer.of(request).bridge_info())


async def is_paused(request: Request) -> Response:
    """Whether generation stands still."""
    return json_response(PausedState(await PolicyServer.of(request).engine.is_paused()))


async def pause(request: Request) -> Response:
    """Hold generation still; what becomes of running requests is `PauseRequest.mode`."""
    mode = (await read_body(request, PauseRequest)).mode
    # vLLM's docstring says that "keep" leaves the cache alone; its code resets it unless told otherwise.
    await PolicyServer.of(request).engine.pause_generation(mode=mode, clear_cache=mode != "keep")
    return json_response(BridgeStatus("paused"))


async def resume(request: Request) -> Response:
    """Let generation go on."""
    await PolicyServer.of(request).engine.resume_generation()
    return json_response(BridgeStatus("resumed"))
