"""Our routes on vLLM's app."""

import asyncio
import os
from argparse import Namespace

from starlette.applications import Starlette
from starlette.routing import Route

from vllm_server import compat, protocol
from vllm_server.http import guarded
from vllm_server.routes import bridge, generate, lora
from vllm_server.routes.openai import RouteToNewest
from vllm_server.server import PolicyServer


def extend(app: Starlette, args: Namespace) -> None:
    """Put our routes before vLLM's, whose /health knows nothing of publishes."""
    keys = tuple(key for key in (args.api_key or [os.environ.get("VLLM_API_KEY")]) if key)
    ours = [
        Route(protocol.HEALTH_ROUTE, guarded(bridge.health)),  # open even with --api-key: probes carry no key
        Route(protocol.HEALTH_GENERATE_ROUTE, guarded(generate.health_generate, keys)),
        Route(protocol.GENERATE_ROUTE, guarded(generate.generate, keys), methods=["POST"]),
        Route(protocol.LORA_LOAD_ROUTE, guarded(lora.load, keys), methods=["POST"]),
        Route(protocol.LORA_UNLOAD_ROUTE, guarded(lora.unload, keys), methods=["POST"]),
        Route(protocol.LORA_CHANNEL_ROUTE, guarded(lora.open_channel, keys), methods=["POST"]),
        Route(protocol.LORA_CHANNEL_CLOSE_ROUTE, guarded(lora.close_channel, keys), methods=["POST"]),
        Route(protocol.LORA_STATUS_ROUTE, guarded(lora.status, keys)),
        Route(protocol.BRIDGE_INFO_ROUTE, guarded(bridge.info, keys)),
        Route(protocol.BRIDGE_IS_PAUSED_ROUTE, guarded(bridge.is_paused, keys)),
        Route(protocol.BRIDGE_PAUSE_ROUTE, guarded(bridge.pause, keys), methods=["POST"]),
        Route(protocol.BRIDGE_RESUME_ROUTE, guarded(bridge.resume, keys), methods=["POST"]),
        Route(protocol.BRIDGE_UPDATE_BEGIN_ROUTE, guarded(bridge.begin_update, keys), methods=["POST"]),
        Route(protocol.BRIDGE_UPDATE_END_ROUTE, guarded(bridge.end_update, keys), methods=["POST"]),
        Route(protocol.BRIDGE_SLEEP_ROUTE, guarded(bridge.sleep, keys), methods=["POST"]),
        Route(protocol.BRIDGE_WAKE_UP_ROUTE, guarded(bridge.wake_up, keys), methods=["POST"]),
        Route(protocol.BRIDGE_IS_SLEEPING_ROUTE, guarded(bridge.is_sleeping, keys)),
        Route(protocol.BRIDGE_STATE_DICT_INFO_ROUTE, guarded(bridge.state_dict_info, keys)),
        Route(protocol.BRIDGE_DEBUG_ROUTE, guarded(bridge.debug, keys)),
        Route(protocol.BRIDGE_LIST_ENDPOINTS_ROUTE, guarded(bridge.list_endpoints, keys)),
    ]
    app.router.routes[:0] = ours


def serve(args: Namespace) -> None:
    """Serve until a signal comes; blocks."""
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
