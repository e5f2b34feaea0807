"""A small HTTP server inside an environment's process, for programs on this machine that the environment starts."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext
from typing import Any, cast

import uvicorn
from starlette.applications import Starlette

from grpo_common.http import SERVER_IDLE_S


class Loopback:
    """Serves an application on a free port of 127.0.0.1."""

    def __init__(self, app: Starlette) -> None:
        self.app = app
        config = uvicorn.Config(
            app, host="127.0.0.1", port=0, log_level="warning", lifespan="off", access_log=False,
            timeout_keep_alive=SERVER_IDLE_S,
        )  # fmt: skip
        self._server = uvicorn.Server(config)
        self._server.capture_signals = cast("Any", nullcontext)  # the environment handles signals
        self._serving: asyncio.Task[None] | None = None

    async def start(self) -> str:
        """Start to listen; return the base URL of its routes below /v1."""
        self._serving = asyncio.create_task(self._server.serve())
        while not self._server.started:
            if self._serving.done():
                self._serving.result()
                raise RuntimeError("a server on 127.0.0.1 ended during its start")
            await asyncio.sleep(0.01)
        return f"http://127.0.0.1:{self._server.servers[0].sockets[0].getsockname()[1]}/v1"

    async def close(self) -> None:
        self._server.should_exit = self._server.force_exit = True
        if self._serving is not None:
            await self._serving
