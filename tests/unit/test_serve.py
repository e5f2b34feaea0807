"""What is around vLLM's application, what is replaced in vLLM, what is probed, and how the server ends."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import os
import signal
import subprocess
import sys
from argparse import Namespace
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.testclient import TestClient
from uvicorn.logging import DefaultFormatter

from grpo_common.text import PrintableRecords
from tests.processes import ROOT
from tests.unit.factories import refusing
from vllm_server import generate, patches, protocol, routes, seams
from vllm_server.errors import EngineEndedError, IncompatibleError, ServeError
from vllm_server.http import ADAPTERS, CHANGING, GENERATING, ROUTES, SCALING, WITHOUT_VERSIONS, BeforeVllm
from vllm_server.policy import Lease, PolicyRegistry
from vllm_server.server import PolicyServer


@pytest.mark.parametrize("ending", ["signal", "two signals", "engine"])
async def test_only_an_end_without_a_signal_is_a_failure(ending: str) -> None:
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
    with pytest.raises(EngineEndedError) if ending == "engine" else nullcontext():
        await serve._run_until_signal(http, engine, None)
    assert http.force_exit == (ending == "two signals")


@pytest.mark.parametrize("root_path", ["", "/llm"])
def test_gate_and_newest_version_are_around_vllms_application(root_path: str) -> None:
    """Also below vLLM's --root-path, which a proxy may keep in the path."""
    serve = pytest.importorskip("vllm_server.serve")
    args = Namespace(host="127.0.0.1", api_key=["k"], allowed_origins=[], root_path=root_path)
    client = TestClient(serve.application(answering_app(), a_server(trainer=True), args))
    key = {"authorization": "Bearer k"}
    assert client.get(f"{root_path}/health").status_code == 200, "a probe needs no key"
    assert client.get(f"{root_path}/v1/models").status_code == 401
    assert client.post(f"{root_path}/pause", json={}).status_code == 401
    assert client.post(f"{root_path}/pause", json={}, headers=key).status_code == 409
    generating = dict.fromkeys(("/v1/completions", "/v1/messages", "/cohere/v2/chat"), "policy-v1")
    for path, model in {**generating, "/tokenize": "base"}.items():
        for whole in (path, root_path + path):
            answer = client.post(whole, json={"model": "base"}, headers=key)
            assert answer.json() == {"model": model}
            assert answer.headers.get("x-policy-version") == ("1" if path in generating else None)


# what comes before vllm's own routes, with a stand-in for its application -----------------------------------


def a_server(*, trainer: bool) -> Any:
    """policy-v1 is the newest version."""
    registry = PolicyRegistry(served_name="base", lora_name="policy", keep=1, capacity=2)
    registry.activate(registry.reserve("policy-v1", 1, adapter_id=1, path="memory://1", now=0.0))

    @asynccontextmanager
    async def serving(model: str | None) -> AsyncIterator[Lease]:
        yield Lease(registry.resolve(model))

    return SimpleNamespace(registry=registry, serving=serving, has_trainer=trainer)


def answering_app() -> Starlette:
    """In the place of vLLM's application: it answers with what it is sent."""

    async def answer(request: Request) -> JSONResponse:
        return JSONResponse(await request.json() if request.method == "POST" else {})

    app = Starlette()
    app.add_route("/{path:path}", answer, methods=["GET", "POST"])
    return app


def client_of(*, trainer: bool = False) -> TestClient:
    return TestClient(BeforeVllm(answering_app(), a_server(trainer=trainer)))


@pytest.mark.parametrize("path", sorted(CHANGING))
def test_changing_routes_are_refused_while_there_is_a_trainer(path: str) -> None:
    refused = client_of(trainer=True).post(path, json={})
    assert refused.status_code == 409 and refused.json()["error"]["param"] == path[1:]
    assert client_of(trainer=True).get(path).status_code != 409
    assert client_of().post(path, json={}).status_code == 200


def test_versions_are_out_of_reach_of_vllms_routes_for_adapters() -> None:
    """They would load other weights in place, or take a version's name away."""
    client = client_of()
    for name, status in (("policy-v1", 409), ("policy-v7", 409), ("policy", 409), ("theirs", 200)):
        for path, key in ADAPTERS.items():
            assert client.post(path, json={key: name, "load_inplace": True}).status_code == status
        assert (client.delete(f"/adapters/{name}").status_code == 409) is (status == 409)


@pytest.mark.parametrize("body", [{"new_data_parallel_size": 2}, [], {}])
def test_scaling_is_always_refused(body: object) -> None:
    """vLLM answers 500, or would start engines without the trained weights."""
    assert client_of().post(SCALING, json=body).status_code == 409


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
    publisher = SimpleNamespace(registry=SimpleNamespace(versions=["policy-v1"] * loads))
    parts: dict[str, Any] = dict.fromkeys(PolicyServer.__dataclass_fields__) | {"args": args, "publisher": publisher}
    parts["channels"] = SimpleNamespace(is_open=channel)
    assert PolicyServer(**parts).has_trainer is attached


HARMLESS = frozenset(
    {"/tokenize", "/detokenize", "/abort_requests", "/inference/v1/abort_requests", "/ping"}
    | {*ADAPTERS, "/adapters/{adapter_name}"}
    | {"/is_scaling_elastic_ep", "/start_profile", "/stop_profile"}
    | {f"/v1/{kind}/{step}" for kind in ("completions", "chat/completions") for step in ("render", "derender")}
    | {"/v1/responses/render", "/v1/messages/render", "/v1/messages/count_tokens"}
    | {"/v1/responses/{response_id}/cancel"}
)
"""They generate nothing and change no weights, versions, caches or schedule."""

REAL = """
import importlib, json, logging, pkgutil, vllm_server
from vllm_server import patches

def place(name):
    parts = name.split(".")
    for end in range(len(parts) - 1, 0, -1):
        try:
            value = importlib.import_module(".".join(parts[:end]))
        except ModuleNotFoundError:
            continue
        for part in parts[end:]:
            value = getattr(value, part)
        return value
    raise ModuleNotFoundError(name)

def same(others):
    return [name for name in places if place(name) is others[name]]

places = {name: place(name) for each in patches.PATCHES if each.device != "cuda" for name in each.replaces.split()}
for module in pkgutil.walk_packages(vllm_server.__path__, "vllm_server."):
    if "preload" not in module.name and "__main__" not in module.name and "lora_kernels" not in module.name:
        importlib.import_module(module.name)
patched = {"imported": len(places) - len(same(places))}
for process in ("server", "engine", "worker"):
    patches.patch_vllm(process)
patched["unwritable"] = same(places)
patches.SharingWorker
once = {name: place(name) for name in places}
patches.patch_vllm("worker", writable=True)
patched |= {"untouched": same(places), "again": len(places) - len(same(once))}

from vllm.entrypoints.launchers.app import build_app
from vllm_server import flags, routes, serve

args = flags.parse(["--model", "none", "--disable-access-log-for-endpoints", ""])
app = build_app(args, ("generate",), None)
serve._HttpServer(app, args)
hostile = "\\x1b[31m \\u202e \\n forged"
for name in ("vllm.grpo.policy", "vllm.entrypoints.api", "uvicorn.error", "asyncio"):
    try:
        raise ValueError(hostile)
    except ValueError:
        logging.getLogger(name).exception("of %s", hostile)
parts = "127.0.0.1:1", "GET", f"/{hostile}", "1.1", 200
logging.getLogger("uvicorn.access").info('%s - "%s %s HTTP/%s" %d', *parts)
print("\\n" + json.dumps([patched, list(routes.endpoints(app.routes))]))
"""


@pytest.fixture(scope="module")
def real() -> str:
    """What a process prints that has patched vLLM and built its application: hostile log records, places, and routes.

    It does in one process what three kinds of processes do. vLLM adds the routes of its development mode.
    """
    pytest.importorskip("vllm")
    modes = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1", "GRPO_ROUTED_EXPERTS": "1"}
    environment = {**os.environ, **modes}
    command = [sys.executable, "-c", REAL]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stderr + done.stdout


def test_vllm_has_no_writing_route_that_nobody_has_looked_at(real: str) -> None:
    """A new one is entered in one of the lists."""
    lines = [line.split(" ") for line in json.loads(real.splitlines()[-1])[1]]
    paths = {path for method, path in lines if method not in ("GET", "HEAD", "OPTIONS", "WEBSOCKET")}
    assert "/v1/completions" in paths and "/collective_rpc" in paths
    assert paths - GENERATING - CHANGING - HARMLESS == {SCALING, WITHOUT_VERSIONS}


def test_logs_show_what_requests_hold_without_effect(real: str) -> None:
    """Messages and tracebacks of ours, of vLLM, of uvicorn and of asyncio, and paths in the access log."""
    assert real.count("\\x1b[31m") == 9 and real.count("\\u202e") == 9
    assert "\x1b" not in real and "\u202e" not in real
    forged = [line for line in real.splitlines() if line.strip().startswith("forged")]
    assert len(forged) == 6, "only tracebacks and vLLM's messages keep their lines"


def test_logs_on_a_terminal_have_their_arguments() -> None:
    """There uvicorn formats a second message with the arguments of the first."""
    record = logging.makeLogRecord({"name": "uvicorn.error", "msg": "[%d]", "args": (7,), "color_message": "<%d>"})
    assert PrintableRecords("uvicorn").filter(record)
    assert DefaultFormatter("%(message)s", use_colors=True).format(record) == "[7]"


def test_logs_with_wrong_arguments_raise_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    handler, logger = logging.StreamHandler(io.StringIO()), logging.Logger("vllm.grpo")
    handler.addFilter(PrintableRecords("vllm.grpo"))
    logger.addHandler(handler)
    logger.log(logging.WARNING, *("%d of %d", 7))
    assert "%d of %d" in capsys.readouterr().err


def test_every_route_of_the_protocol_has_one_handler() -> None:
    assert {generate.generate, routes.health} <= {getattr(route.endpoint, "__wrapped__", None) for route in ROUTES}
    wanted = {value for name, value in vars(protocol).items() if name.endswith("_ROUTE")}
    assert sorted(route.path for route in ROUTES) == sorted(wanted)


@pytest.mark.parametrize(
    ("cause", "field", "status"),
    [
        (ServeError(503, "weights", "torn", "whole ones", "write them again"), "weights", 503),
        (ValueError("too long"), "request", 422),
    ],
)
async def test_generate_answers_by_what_vllm_wraps(cause: Exception, field: str, status: int) -> None:
    """A completion waits for the fence within vLLM, which wraps the fence's error."""
    wraps = pytest.importorskip("vllm.v1.engine.exceptions").EngineGenerateError

    async def fails(*_: object) -> AsyncIterator[Any]:
        raise wraps from cause
        yield

    async def alive() -> None: ...

    server: Any = SimpleNamespace(generate=fails, check_engine=alive)
    asked: Any = SimpleNamespace(prompt="a")
    with refusing(ServeError, field, status):
        await anext(generate._outputs(server, asked, None, server))


# patches and seams ------------------------------------------------------------------------------------------------


def test_patches_come_with_no_import_and_each_once(real: str) -> None:
    plain = [name for each in patches.PATCHES if each.writable for name in each.replaces.split()]
    objects = [patch.replaces for patch in patches.PATCHES if ":" not in patch.by]  # their classes are as they were
    wanted = {"imported": 0, "unwritable": plain, "untouched": objects, "again": 0}
    assert json.loads(real.splitlines()[-1])[0] == wanted


def test_patches_are_in_the_docs_and_have_tests() -> None:
    rows = [
        line.split("|") for line in (ROOT / "docs/server.md").read_text().splitlines() if line.startswith("| `vllm.")
    ]
    names = [row[1].split("`")[1] for row in rows]
    assert names == [patch.replaces.split()[0] for patch in patches.PATCHES]
    for patch in patches.PATCHES:
        assert (ROOT / "tests" / patch.test).exists() and patch.why and patch.until


def test_probe_names_all_that_has_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("vllm")
    seams.probe(writable=True)
    monkeypatch.setitem(seams.SEAMS, "vllm.sampling_params", {"SamplingParams.gone": (), "Gone": ("x",)})
    monkeypatch.setitem(seams.SEAMS, "vllm.gone", {"anything": ()})
    monkeypatch.setitem(seams.SEAMS, "vllm.v1.engine.async_llm", {"AsyncLLM.sleep": ("level", "depth")})
    with pytest.raises(IncompatibleError) as error:
        seams.probe()
    for symbol in (
        "sampling_params.SamplingParams.gone",
        "sampling_params.Gone",
        "vllm.gone.anything",
        "AsyncLLM.sleep(depth)",
    ):
        assert symbol in str(error.value)


@pytest.mark.parametrize("change", ["no salt", "frozen", "nothing"])
def test_probe_sees_whether_salts_are_part_of_cache_keys(monkeypatch: pytest.MonkeyPatch, change: str) -> None:
    def keys(*_: object) -> tuple[Any, int]:
        return (None if change == "no salt" else ("salt",)), 0

    request = SimpleNamespace(
        __struct_fields__=("cache_salt",), __struct_config__=SimpleNamespace(frozen=change == "frozen")
    )
    found = {"EngineCoreRequest": request, "generate_block_hash_extra_keys": keys}
    monkeypatch.setattr(seams, "require", lambda module, name: found[name])
    assert seams._salts_cache_keys() is (change == "nothing")
