"""Which requests for vLLM's own routes get the newest version: with a stand-in for vLLM's application."""

from __future__ import annotations

import asyncio
import json
from argparse import Namespace
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.responses import Response
from starlette.routing import Route
from starlette.testclient import TestClient

from vllm_server.app import extend
from vllm_server.policy import Lease, PolicyRegistry
from vllm_server.routes.openai import RouteToNewest


def test_vllms_route_that_changes_the_number_of_engines_is_refused() -> None:
    """vLLM answers 500, or would start engines without the trained weights."""
    app = Starlette(routes=[Route("/scale_elastic_ep", lambda _: Response(status_code=500), methods=["POST"])])
    extend(app, Namespace(api_key=None, allowed_origins=[], host="127.0.0.1"))
    client = TestClient(app, base_url="http://127.0.0.1", raise_server_exceptions=False)
    for body in ({"new_data_parallel_size": 2}, [], {}):
        assert client.post("/scale_elastic_ep", json=body).status_code == 409


async def model_of(path: str, root_path: str = "") -> str:
    """The model that vLLM's application is asked for by a request that names the served one."""
    registry = PolicyRegistry(served_name="base", lora_name="policy", keep=1, capacity=2)
    registry.activate(registry.reserve("policy-v1", 1, adapter_id=1, path="memory://1", now=0.0))

    @asynccontextmanager
    async def serving(model: str | None) -> AsyncIterator[Lease]:
        yield Lease(registry.resolve(model), 1)

    asked: list[Any] = []

    async def vllms(scope: Any, receive: Any, send: Any) -> None:
        asked.append(json.loads((await receive())["body"]))

    async def receive() -> Any:
        return {"type": "http.request", "body": b'{"model": "base"}', "more_body": False}

    async def send(message: Any) -> None:
        raise AssertionError(message)

    server = SimpleNamespace(registry=registry, serving=serving)
    app = SimpleNamespace(state=SimpleNamespace(policy_server=server))
    scope = {"type": "http", "method": "POST", "path": path, "root_path": root_path, "headers": [], "app": app}
    await RouteToNewest(vllms)(scope, receive, send)
    return asked[0]["model"]


@pytest.mark.parametrize(
    ("path", "root_path", "model"),
    [
        ("/v1/completions", "", "policy-v1"),
        ("/v1/messages", "", "policy-v1"),
        ("/cohere/v2/chat", "", "policy-v1"),
        ("/llm/v1/completions", "/llm", "policy-v1"),
        ("/v1/completions", "/llm", "policy-v1"),
        ("/tokenize", "", "base"),
    ],
)
def test_the_served_models_name_means_the_newest_version_where_vllm_generates(
    path: str, root_path: str, model: str
) -> None:
    assert asyncio.run(model_of(path, root_path)) == model
