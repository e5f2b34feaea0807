"""What is around vLLM's application, how the server ends, and how many connections it takes, with stand-ins."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from argparse import Namespace
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.testclient import TestClient

from grpo_common.http import connection_limit
from vllm_server.errors import EngineEndedError
from vllm_server.policy import Lease, Version

ENVIRONMENTS = 200


@pytest.mark.parametrize("ending", ["signal", "two signals", "engine"])
def test_only_an_end_without_a_signal_is_a_failure(ending: str) -> None:
    """vLLM's watchdog ends the HTTP server when it finds the engine ended."""
    serve = pytest.importorskip("vllm_server.serve")
    http: Any = SimpleNamespace(should_exit=False, force_exit=False)

    async def until_exit(sockets: list[object]) -> None:
        signals = {"signal": 1, "two signals": 2}.get(ending, 0)
        for _ in range(signals):
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.sleep(0.01)
        assert http.should_exit == (signals > 0)

    http.serve = until_exit
    engine = SimpleNamespace(errored=False, is_running=True)

    async def run() -> None:
        await serve._run_until_signal(http, engine, None)

    if ending == "engine":
        with pytest.raises(EngineEndedError):
            asyncio.run(run())
    else:
        asyncio.run(run())
    assert http.force_exit == (ending == "two signals")


@pytest.mark.parametrize("root_path", ["", "/llm"])
def test_gate_and_newest_version_are_around_vllms_application(root_path: str) -> None:
    """Also below vLLM's --root-path, which a proxy may keep in the path."""
    serve = pytest.importorskip("vllm_server.serve")

    async def vllms(request: Request) -> JSONResponse:
        return JSONResponse(await request.json() if request.method == "POST" else {})

    @asynccontextmanager
    async def serving(_: str | None) -> AsyncIterator[Lease]:
        yield Lease(Version("policy-v1", 1, 1, "memory://1", 0.0), 1)

    app = Starlette()
    app.add_route("/{path:path}", vllms, methods=["GET", "POST"])
    server: Any = SimpleNamespace(registry=SimpleNamespace(knows=lambda _: True), serving=serving, has_trainer=True)
    args = Namespace(host="127.0.0.1", api_key=["k"], allowed_origins=[], root_path=root_path)
    client = TestClient(serve.application(app, server, args))
    key = {"authorization": "Bearer k"}
    assert client.get(f"{root_path}/health").status_code == 200, "a probe needs no key"
    assert client.get(f"{root_path}/v1/models").status_code == 401
    assert client.post(f"{root_path}/pause", json={}).status_code == 401
    assert client.post(f"{root_path}/pause", json={}, headers=key).status_code == 409
    answer = client.post(f"{root_path}/v1/completions", json={"model": "base"}, headers=key)
    assert answer.json() == {"model": "policy-v1"}


def test_connections_of_many_environments_are_taken() -> None:
    """Each environment has a long poll, and generates and posts on two more connections; uvicorn counts them all."""
    waiting = asyncio.Event()

    async def poll(_: Request) -> Response:
        await waiting.wait()
        return Response()

    async def post(_: Request) -> Response:
        return Response()

    app = Starlette()
    app.add_route("/poll", poll)
    app.add_route("/post", post, methods=["POST"])
    limit = connection_limit()
    server = uvicorn.Server(uvicorn.Config(app, log_level="error", limit_concurrency=limit))

    async def environment(url: str) -> list[int]:
        clients = [httpx.AsyncClient(base_url=url, timeout=60, trust_env=False) for _ in range(3)]
        try:
            polling = asyncio.create_task(clients[0].get("/poll"))
            posts = [(await client.post("/post")).status_code for _ in range(3) for client in clients[1:]]
            while not waiting.is_set():
                await asyncio.sleep(0.05)
            return [*posts, (await polling).status_code]
        finally:
            for client in clients:
                await client.aclose()

    async def run() -> list[list[int]]:
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            serving = asyncio.create_task(server.serve(sockets=[sock]))
            url = f"http://127.0.0.1:{sock.getsockname()[1]}"
            asked = [asyncio.create_task(environment(url)) for _ in range(ENVIRONMENTS)]
            while len(server.server_state.connections) < 3 * ENVIRONMENTS:
                assert not any(each.done() for each in asked)
                await asyncio.sleep(0.05)
            waiting.set()
            found = await asyncio.gather(*asked)
            server.should_exit = True
            await serving
            return found

    assert {status for each in asyncio.run(run()) for status in each} == {200}
    assert limit >= 10 * ENVIRONMENTS, "raise the limit of open files of this machine: ulimit -n"
