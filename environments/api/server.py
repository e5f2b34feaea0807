"""The rollout API as a process: its socket, its signals and its end."""

import asyncio
import contextlib
import errno
import logging
import signal
import socket
import sys
from typing import Any, cast

import uvicorn

from environments.api.app import build_app
from environments.api.errors import SettingsError, StoreError
from environments.api.service import Service
from environments.api.settings import Settings
from grpo_common.formats import FormatError
from grpo_common.http import SERVER_IDLE_S, address, connection_limit
from grpo_common.ports import port_holder

BACKLOG = 2048  # uvicorn's
log = logging.getLogger("rollout-api")


def serve(settings: Settings) -> int:
    """Serve until SIGTERM or SIGINT; the exit code: 0, 1 (the store failed), 2 (it could not start)."""
    try:
        listener = _listen(settings.host, settings.port)
        service = Service(settings)
    except (SettingsError, StoreError, FormatError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    config = uvicorn.Config(
        build_app(service),
        log_config=None,  # its own would print a traceback, and what a request says in it, as it is
        log_level="warning",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=1,
        timeout_keep_alive=SERVER_IDLE_S,
        limit_concurrency=connection_limit(),
    )
    host, port = listener.getsockname()[:2]
    log.info("serving http://%s", address(host, port))
    if settings.store is None:
        log.info("no --store: groups are kept in memory and end with this process")
    try:
        with asyncio.Runner(loop_factory=config.get_loop_factory()) as runner:
            return runner.run(_run(config, service, listener))
    finally:
        service.close()


async def _run(config: uvicorn.Config, service: Service, listener: socket.socket) -> int:
    server = uvicorn.Server(config)
    server.capture_signals = cast("Any", contextlib.nullcontext)  # uvicorn's raises a signal again: no exit code 0

    def stop() -> None:
        """End after the requests in flight, at once when asked twice."""
        service.end_waits()
        server.force_exit = server.should_exit
        server.should_exit = True

    async def stop_on_failure() -> None:
        await service.failed.wait()
        log.critical("stopping, so that nothing is answered that is not written: %s", service.failure)
        stop()

    for each in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(each, stop)
    failed = asyncio.create_task(stop_on_failure())
    await server.serve(sockets=[listener])
    failed.cancel()
    return 1 if service.failed.is_set() else 0


def _listen(host: str, port: int) -> socket.socket:
    """Return a bound socket. Raises SettingsError: the address is busy (with its holder) or not of this machine."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            fix = "stop it or give another port"
            raise SettingsError("in use", field=f"--port {port}", got=port_holder(port), fix=fix) from None
        raise SettingsError(
            field=f"--host {host} --port {port}",
            got=error.strerror or error,
            wanted="an address of this machine",
            fix="give another",
        ) from None
    listener.setblocking(False)
    return listener
