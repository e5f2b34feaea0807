"""What comes before vLLM's own routes, with a stand-in for its application: the newest version, and refusals."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.testclient import TestClient

from tests.processes import ROOT
from vllm_server import generate, protocol, routes
from vllm_server.before_vllm import CHANGING, GENERATING, SCALING, WITHOUT_VERSIONS, BeforeVllm
from vllm_server.http import ROUTES
from vllm_server.policy import Lease, PolicyRegistry
from vllm_server.server import PolicyServer


def client(*, trainer: bool = False, root_path: str = "") -> TestClient:
    """A client of an application that answers by its request; policy-v1 is the newest version."""
    registry = PolicyRegistry(served_name="base", lora_name="policy", keep=1, capacity=2)
    registry.activate(registry.reserve("policy-v1", 1, adapter_id=1, path="memory://1", now=0.0))

    @asynccontextmanager
    async def serving(model: str | None) -> AsyncIterator[Lease]:
        yield Lease(registry.resolve(model), 1)

    async def vllms(request: Request) -> JSONResponse:
        return JSONResponse(await request.json() if request.method == "POST" else {})

    app = Starlette()
    app.add_route("/{path:path}", vllms, methods=["GET", "POST"])
    server: Any = SimpleNamespace(registry=registry, serving=serving, has_trainer=trainer)
    return TestClient(BeforeVllm(app, server), root_path=root_path)


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
def test_newest_version_where_vllm_generates(path: str, root_path: str, model: str) -> None:
    answer = client(root_path=root_path).post(path, json={"model": "base"})
    assert answer.json()["model"] == model
    assert answer.headers.get("x-policy-version") == ("1" if model == "policy-v1" else None)


@pytest.mark.parametrize("path", sorted(CHANGING))
def test_changing_routes_are_refused_while_there_is_a_trainer(path: str) -> None:
    refused = client(trainer=True).post(path, json={})
    assert refused.status_code == 409 and refused.json()["error"]["param"] == path[1:]
    assert client(trainer=True).get(path).status_code != 409
    assert client().post(path, json={}).status_code == 200


@pytest.mark.parametrize("body", [{"new_data_parallel_size": 2}, [], {}])
def test_scaling_is_always_refused(body: object) -> None:
    """vLLM answers 500, or would start engines without the trained weights."""
    assert client().post(SCALING, json=body).status_code == 409


@pytest.mark.parametrize(
    ("flag", "channel", "loads", "attached"),
    [
        ("", False, 0, False),
        ("shared_weights", False, 0, True),
        ("receive_weights", False, 0, True),
        ("", True, 0, True),
        ("", False, 1, True),
    ],
)
def test_trainer_is_known_by_weights_channel_or_publish(flag: str, channel: bool, loads: int, attached: bool) -> None:
    args = SimpleNamespace(shared_weights=flag == "shared_weights", receive_weights=flag == "receive_weights")
    publisher = SimpleNamespace(has_channel=channel, registry=SimpleNamespace(versions=["policy-v1"] * loads))
    parts: dict[str, Any] = dict.fromkeys(PolicyServer.__dataclass_fields__) | {"args": args, "publisher": publisher}
    assert PolicyServer(**parts).has_trainer is attached


HARMLESS = frozenset(
    {
        "/adapters",
        "/tokenize",
        "/detokenize",
        "/abort_requests",
        "/inference/v1/abort_requests",
        "/is_scaling_elastic_ep",
    }
    | {
        "/ping",
        "/v1/responses/render",
        "/v1/messages/render",
        "/start_profile",
        "/stop_profile",
        "/v1/responses/{response_id}/cancel",
        "/v1/messages/count_tokens",
    }
    | {f"/v1/{kind}/{step}" for kind in ("completions", "chat/completions") for step in ("render", "derender")}
    | {"/v1/load_lora_adapter", "/v1/unload_lora_adapter"}
)
"""They generate nothing and change no weights, caches or schedule. vLLM's own adapters have slots of their own."""


def test_vllm_has_no_writing_route_that_nobody_has_looked_at() -> None:
    """With all that its development mode adds; a new one is entered in one of the lists."""
    pytest.importorskip("vllm")
    code = """
import json, sys
from types import SimpleNamespace
from vllm_server import flags
from vllm.entrypoints.launchers.app import build_app
args = flags.parse(["--model", "none"])
app = build_app(args, ("generate",), None)
print(json.dumps([r.path for r in app.routes if "POST" in (getattr(r, "methods", None) or ())]))
"""
    environment = {**os.environ, "VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    paths = set(json.loads(done.stdout.splitlines()[-1]))
    assert "/v1/completions" in paths and "/collective_rpc" in paths
    assert paths - GENERATING - CHANGING - HARMLESS == {SCALING, WITHOUT_VERSIONS}


def test_every_route_of_the_protocol_has_one_handler() -> None:
    assert {generate.generate, routes.health} <= {getattr(route.endpoint, "__wrapped__", None) for route in ROUTES}
    wanted = {value for name, value in vars(protocol).items() if name.endswith("_ROUTE")}
    assert sorted(route.path for route in ROUTES) == sorted(wanted)
