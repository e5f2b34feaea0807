"""Serve: vLLM's own server, with our routes before its routes and one gate around both. Read it from top to bottom."""

import asyncio
import signal
import socket
from argparse import Namespace
from contextlib import closing
from typing import Any

import uvicorn
import uvloop
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.config import LOGGING_CONFIG
from vllm import envs
from vllm.entrypoints.launchers.api_server.app_state import init_app_state
from vllm.entrypoints.launchers.api_server.entry import build_async_engine_client
from vllm.entrypoints.launchers.app import build_app
from vllm.entrypoints.launchers.launcher import NoSignalServer, setup_server, watchdog_loop
from vllm.entrypoints.launchers.utils.server_utils import get_uvicorn_log_config
from vllm.entrypoints.launchers.utils.ssl import SSLCertRefresher
from vllm.entrypoints.serve.utils.api_utils import cli_env_setup
from vllm.utils.system_utils import decorate_logs

from grpo_common.gate import Gate, Refusal
from grpo_common.http import address, connection_limit
from vllm_server import forking, generate, routes
from vllm_server.checks import keys_of
from vllm_server.errors import EngineEndedError, ServeError
from vllm_server.http import ROUTES, BeforeVllm, error_response
from vllm_server.patches import patch_vllm, printable_logs
from vllm_server.server import PolicyServer

HANDLERS = (routes, generate)
"""Modules whose import fills `ROUTES`."""

_LAST_WORDS_S = 2  # for in-flight requests after a signal, unless vLLM's --shutdown-timeout says more
_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def serve(args: Namespace) -> None:
    """Serve until a signal arrives; block until then. Raise an EngineEndedError if the engine ends by itself."""
    decorate_logs("APIServer", skip_if_decorated=True)
    if args.numa_bind:  # works on a new program, not on a fork
        forking.leave()
    patch_vllm("server")
    cli_env_setup()
    uvloop.run(_serve(args))


async def _serve(args: Namespace) -> None:
    for number in _SIGNALS:
        # A signal kills the server until it is ready, and its end ends the engine. A handler in Python would never run
        # while the main thread waits in C code.
        signal.signal(number, signal.SIG_DFL)
    _, sock = setup_server(args, reuse_port=False)
    with closing(sock):
        async with build_async_engine_client(args) as client:
            engine: Any = client
            tasks = await engine.get_supported_tasks()
            app = build_app(args, tasks, engine.model_config)
            await init_app_state(engine, app.state, args, tasks)
            server = await PolicyServer.start(engine, app.state.openai_serving_models, args)
            try:
                app.state.policy_server = server
                app.router.routes[:0] = ROUTES  # before vLLM's, whose /health knows nothing of publishes
                http = _HttpServer(application(app, server, args), args)
                app.state.server = http  # vLLM's handlers of errors end it when the engine has ended
                await _run_until_signal(http, engine, sock)
            finally:
                server.close()


def application(vllms: ASGIApp, server: PolicyServer, args: Namespace) -> ASGIApp:
    """Return vLLM's application with the gate, and what comes before vLLM's routes, around it."""

    def refuse(_: Scope, refusal: Refusal) -> Response:
        problem = refusal.problem
        return error_response(ServeError(refusal.status, problem.field, problem.got, problem.wanted, problem.fix))

    gate = Gate(
        BeforeVllm(vllms, server), host=args.host, keys=keys_of(args.api_key), origins=args.allowed_origins,
        answer=refuse,
    )  # fmt: skip

    async def call(scope: Scope, receive: Receive, send: Send) -> None:
        if args.root_path:  # FastAPI sets it, too, but further inside
            scope["root_path"] = args.root_path
        await gate(scope, receive, send)

    return call


class _HttpServer(NoSignalServer):
    """vLLM's HTTP server, with its options. It prints uvicorn's line when it accepts requests."""

    def __init__(self, app: ASGIApp, args: Namespace) -> None:
        config = uvicorn.Config(
            app,
            host=args.host,
            port=args.port,
            log_level=args.uvicorn_log_level,
            access_log=not args.disable_uvicorn_access_log,
            timeout_keep_alive=envs.VLLM_HTTP_TIMEOUT_KEEP_ALIVE,
            timeout_graceful_shutdown=max(_LAST_WORDS_S, args.shutdown_timeout),
            limit_concurrency=connection_limit(),
            ssl_keyfile=args.ssl_keyfile,
            ssl_certfile=args.ssl_certfile,
            ssl_ca_certs=args.ssl_ca_certs,
            ssl_cert_reqs=args.ssl_cert_reqs,
            ssl_ciphers=args.ssl_ciphers,
            log_config=get_uvicorn_log_config(args) or LOGGING_CONFIG,
        )
        printable_logs()
        limits = {name: getattr(args, name) for name in ("h11_max_incomplete_event_size", "h11_max_header_count")}
        vars(config).update(limits)  # as vLLM's launcher sets them
        config.load()
        super().__init__(config)
        if args.enable_ssl_refresh and config.ssl is not None:
            self._refresher = SSLCertRefresher(config.ssl, args.ssl_keyfile, args.ssl_certfile, args.ssl_ca_certs)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started and sockets:
            name, scheme = sockets[0].getsockname(), "https" if self.config.is_ssl else "http"
            place = f"unix:{name}" if isinstance(name, str) else f"{scheme}://{address(self.config.host, name[1])}"
            print(f"INFO:     Uvicorn running on {place} (Press CTRL+C to quit)", flush=True)


async def _run_until_signal(http: uvicorn.Server, engine: Any, sock: socket.socket) -> None:
    """Answer requests until a signal arrives; in-flight requests then have a moment before the engine ends.

    Raise an EngineEndedError if vLLM has ended the HTTP server because the engine had ended.
    """
    loop, signalled = asyncio.get_running_loop(), False

    def stop() -> None:
        nonlocal signalled
        http.force_exit |= signalled  # the second signal
        signalled = http.should_exit = True

    for number in _SIGNALS:
        loop.add_signal_handler(number, stop)
    watchdog = loop.create_task(watchdog_loop(http, engine))
    try:
        await http.serve(sockets=[sock])
    finally:
        watchdog.cancel()
    if not signalled:
        raise EngineEndedError("the engine has ended", fix="see its last lines above")
