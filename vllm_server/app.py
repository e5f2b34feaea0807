"""Add this server's routes to vLLM's app."""

import asyncio
from argparse import Namespace

from starlette.applications import Starlette
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Scope

from grpo_common.gate import Gate, Refusal
from vllm_server import compat, protocol
from vllm_server.errors import ServeError
from vllm_server.http import error_response, guarded
from vllm_server.routes import bridge, generate, lora
from vllm_server.routes.openai import RouteToNewest
from vllm_server.server import PolicyServer
from vllm_server.start_checks import keys_of


def extend(app: Starlette, args: Namespace) -> None:
    """Put our routes before vLLM's, whose /health ignores publishes; put the gate before all routes."""
    ours = [
        Route(protocol.HEALTH_ROUTE, guarded(bridge.health)),
        Route(protocol.HEALTH_GENERATE_ROUTE, guarded(generate.health_generate)),
        Route(protocol.GENERATE_ROUTE, guarded(generate.generate), methods=["POST"]),
        Route(protocol.LORA_LOAD_ROUTE, guarded(lora.load), methods=["POST"]),
        Route(protocol.LORA_UNLOAD_ROUTE, guarded(lora.unload), methods=["POST"]),
        Route(protocol.LORA_CHANNEL_ROUTE, guarded(lora.open_channel), methods=["POST"]),
        Route(protocol.LORA_CHANNEL_CLOSE_ROUTE, guarded(lora.close_channel), methods=["POST"]),
        Route(protocol.LORA_STATUS_ROUTE, guarded(lora.status)),
        Route(protocol.BRIDGE_INFO_ROUTE, guarded(bridge.info)),
        Route(protocol.BRIDGE_IS_PAUSED_ROUTE, guarded(bridge.is_paused)),
        Route(protocol.BRIDGE_PAUSE_ROUTE, guarded(bridge.pause), methods=["POST"]),
        Route(protocol.BRIDGE_RESUME_ROUTE, guarded(bridge.resume), methods=["POST"]),
        Route(protocol.BRIDGE_UPDATE_BEGIN_ROUTE, guarded(bridge.begin_update), methods=["POST"]),
        Route(protocol.BRIDGE_UPDATE_END_ROUTE, guarded(bridge.end_update), methods=["POST"]),
        Route(protocol.BRIDGE_WEIGHTS_OPEN_ROUTE, guarded(bridge.open_weights), methods=["POST"]),
        Route(protocol.BRIDGE_WEIGHTS_STAGE_ROUTE, guarded(bridge.stage_weights), methods=["POST"]),
        Route(protocol.BRIDGE_WEIGHTS_APPLY_ROUTE, guarded(bridge.apply_weights), methods=["POST"]),
        Route(protocol.BRIDGE_WEIGHTS_CLOSE_ROUTE, guarded(bridge.close_weights), methods=["POST"]),
        Route(protocol.BRIDGE_SLEEP_ROUTE, guarded(bridge.sleep), methods=["POST"]),
        Route(protocol.BRIDGE_WAKE_UP_ROUTE, guarded(bridge.wake_up), methods=["POST"]),
        Route(protocol.BRIDGE_IS_SLEEPING_ROUTE, guarded(bridge.is_sleeping)),
        Route(protocol.BRIDGE_STATE_DICT_INFO_ROUTE, guarded(bridge.state_dict_info)),
        Route(protocol.BRIDGE_CHECKSUMS_ROUTE, guarded(bridge.checksums)),
        Route(protocol.BRIDGE_DEBUG_ROUTE, guarded(bridge.debug)),
        Route("/scale_elastic_ep", guarded(bridge.scale_elastic_ep), methods=["POST"]),  # vLLM's answers 500
        Route(protocol.BRIDGE_LIST_ENDPOINTS_ROUTE, guarded(bridge.list_endpoints)),
    ]
    app.router.routes[:0] = ours
    # Not by `add_middleware`: vLLM may have built the stack already, and the gate must run before everything in it.
    stack = app.middleware_stack or app.build_middleware_stack()
    keys, origins = keys_of(args.api_key), args.allowed_origins
    app.middleware_stack = Gate(stack, host=args.host, keys=keys, origins=origins, answer=_refuse)


def _refuse(_: Scope, refusal: Refusal) -> Response:
    problem = refusal.problem
    error = ServeError(refusal.status, problem.field, got=problem.got, wanted=problem.wanted, fix=problem.fix)
    return error_response(error)


def serve(args: Namespace) -> None:
    """Serve until a signal arrives; block until then."""
    announcing: list[asyncio.Task[None]] = []
    servers: list[PolicyServer] = []

    async def engine_is_up(app: Starlette, engine: compat.Engine) -> None:
        servers.append(await PolicyServer.start(app, engine, args))
        scheme = "https" if args.ssl_keyfile else "http"
        announcing.append(asyncio.create_task(compat.announce(app, scheme, args.host)))

    args.middleware = [*args.middleware, f"{RouteToNewest.__module__}.{RouteToNewest.__qualname__}"]
    try:
        compat.run(args, extend=lambda app: extend(app, args), ready_state=engine_is_up)
    finally:
        for server in servers:
            server.close()
