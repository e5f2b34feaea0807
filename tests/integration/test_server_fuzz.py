"""Wrong bodies in large numbers: each gets a 4xx, memory stays as it is, and a run on the server continues."""

from __future__ import annotations

import copy
import http.client
import json
import random
import signal
import socket
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import msgspec
import psutil
import pytest

from tests.integration.serving import shared_server
from tests.processes import free_port, tail
from tests.runs import finished, member, rows, started, wait_for_step
from vllm_server import protocol
from vllm_server.protocol import SAFETENSORS_MEDIA_TYPE, TokenPrompt
from vllm_server.protocol.channels import ChannelCloseRequest, ChannelRequest

pytestmark = pytest.mark.timeout(900)

BODIES = 4_000
GOOD: dict[str, dict[str, Any]] = {
    protocol.GENERATE_ROUTE: {
        **{"prompt": "1+1=", "n": 2, "max_tokens": 2, "temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1},
        **{"logprobs": 0, "prompt_logprobs": 1, "stop": ["\n"], "stop_token_ids": [3], "seed": 1, "stream": False},
        **{"model": "policy", "logit_bias": {"4": 1.0}, "bad_words": ["x"], "allowed_token_ids": [5, 6]},
        **{"structured_outputs": {"regex": "[0-9]"}, "presence_penalty": 0.1, "ignore_eos": True, "min_tokens": 1},
    },
    protocol.LORA_LOAD_ROUTE: {"adapter_path": "x", "adapter_name": "policy-v9", "version": 9, "activate": False},
    protocol.LORA_UNLOAD_ROUTE: {"adapter_name": "policy-v10000"},
    protocol.CHANNELS_ROUTE: {
        "boot_id": "x",
        "spec": {"kind": "group", "backend": "nccl", "meet": "AAAA", "world_size": 2},
        "buckets": ["AAAA"],
        "adapter_config": {"r": 8},
        "staging": "on",
    },
    protocol.CHANNELS_CLOSE_ROUTE: {"channel": "x"},
    protocol.BRIDGE_PAUSE_ROUTE: {"mode": "keep"},
    protocol.BRIDGE_UPDATE_BEGIN_ROUTE: {"boot_id": "x", "in_flight": "keep", "timeout_s": 1.0},
    protocol.BRIDGE_UPDATE_END_ROUTE: {"token": "x", "version": 1, "torn": False},
    protocol.BRIDGE_WEIGHTS_STAGE_ROUTE: {"channel": "x", "timeout_s": 1.0},
    protocol.BRIDGE_WEIGHTS_APPLY_ROUTE: {"channel": "x", "token": "x"},
}
"""A whole body of each of our routes that has one."""

BODILESS = {protocol.BRIDGE_RESUME_ROUTE, protocol.BRIDGE_SLEEP_ROUTE, protocol.BRIDGE_WAKE_UP_ROUTE}
HELD = {protocol.BRIDGE_PAUSE_ROUTE: protocol.PauseRequest, protocol.LORA_UNLOAD_ROUTE: protocol.LoraUnloadRequest}
"""Routes that stop generation or withdraw what the run has published, if their body is right: it has to be wrong."""

ODD: list[object] = [
    *(None, True, -1, 0, 2**31, 2**63, 2**64, 10**400, 1.5, 1e308, float("nan"), float("-inf"), "", "x", "\ud800"),
    *([], {}, [[]], [[[]]], {"a": {}}, [None], [[None]], [{}], ["x"], "9" * 5000, [-1], [2**63], {"1": -1}),
]
BYTES = [
    *(
        b"",
        b"\x00",
        b"null",
        b"[]",
        b"1",
        b'"x"',
        b"\xff\xfe{\x00}\x00",
        b"\xef\xbb\xbf{}",
        b"{} {}",
        b"{,}",
        b"{'a':1}",
    ),
    *(b"[" * 50_000, b'{"a":' * 50_000, b'{"prompt":' * 400, b'"' + b"\\" * 999, b'{"prompt": "\xed\xa0\x80"}'),
    *(b'{"prompt": "1", "temperature": NaN}', b'{"prompt": "1", "n": 1e999}', b'{"prompt": "1", "prompt": 2}'),
    *(b'{"prompt": {"prompt_token_ids": [' + b"9" * 5000 + b"]}}", b'{"prompt": {"prompt_token_ids": [-1]}}'),
]
TYPES = [*["application/json"] * 7, "application/octet-stream", "text/plain", SAFETENSORS_MEDIA_TYPE, "x", ""]


def mangled(draw: random.Random, route: str) -> bytes:
    """A whole body with fields replaced, dropped or added; or bytes that are no JSON any more; or just bytes."""
    kind = draw.randrange(6)
    if kind == 0:
        return draw.randbytes(draw.randrange(200))
    if kind == 1:
        return draw.choice(BYTES)
    body = copy.deepcopy(GOOD[route])
    for _ in range(draw.randrange(1, 3)):
        name = draw.choice([*body, "policy_version", "extra_args", "best_of", "request_id", "z"])
        if draw.random() < 0.2:
            body.pop(name, None)
        else:
            body[name] = copy.deepcopy(draw.choice(ODD))
    encoded = json.dumps([body] if kind == 2 else body).encode()
    at = draw.randrange(len(encoded))
    if kind == 3:
        return encoded[:at] + draw.randbytes(draw.randrange(1, 4)) + encoded[at + draw.randrange(3) :]
    return encoded[:at] if kind == 4 else encoded


def is_right(route: str, body: bytes) -> bool:
    """Whether a route of `HELD` would do what it is for."""
    try:
        msgspec.json.decode(body or b"{}", type=HELD[route])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False
    return True


def drawn(draw: random.Random) -> tuple[str, bytes, dict[str, str]]:
    """Route, body and headers of the next request."""
    route = draw.choice([*GOOD, *[protocol.GENERATE_ROUTE] * 3, *BODILESS])
    body = mangled(draw, route if route in GOOD else protocol.LORA_LOAD_ROUTE)
    while route in HELD and is_right(route, body):
        body = mangled(draw, route)
    kind = draw.choice(TYPES)
    headers = {"Content-Type": kind} if kind else {}
    if draw.random() < 0.1:
        headers["Content-Encoding"] = draw.choice(["gzip", "br", ""])
    return route, body, headers


def post(connection: http.client.HTTPConnection, draw: random.Random, log: Path) -> int:
    """Send one drawn body: the answer is no 5xx, and a refusal has all its parts. Return the status."""
    route, body, headers = drawn(draw)
    connection.request("POST", route, body, headers)
    answer = connection.getresponse()
    content = answer.read()
    assert answer.status < 500, (route, headers, body[:300], content[:300], tail(log, 100))
    if answer.status >= 400:
        error = json.loads(content)["error"]
        assert error["param"] and error["wanted"] and error["fix"], (route, body[:300], content)
    return answer.status


def break_off(port: int, route: str) -> None:
    """Leave in the middle of a body."""
    head = f"POST {route} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n"
    head += "Content-Type: application/json\r\nContent-Length: 99\r\n\r\n"
    with socket.create_connection(("127.0.0.1", port)) as client:
        client.sendall(head.encode() + b'{"prompt": ')


def test_thousands_of_malformed_bodies_beside_a_run(demo_model: Path, tmp_path: Path) -> None:
    run_dir, log, port = tmp_path / "run", tmp_path / "log", free_port()
    draw, statuses, sizes = random.Random(16), Counter[int](), []
    with started(demo_model, run_dir, log, training_steps=100_000, server__port=port) as process:
        wait_for_step(run_dir, 2, process, log)
        server, said = member(process, "vllm_server"), run_dir / "logs" / "server.log"
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
        first = rows(run_dir)[-1]["step"]
        for number in range(BODIES):
            statuses[post(connection, draw, said)] += 1
            if number % 400 == 399:
                sizes.append(psutil.Process(server).memory_info().rss)
                for broken in (*GOOD, "/v1/completions"):
                    break_off(port, broken)
        last = rows(run_dir)[-1]["step"]
        assert last > first
        wait_for_step(run_dir, last + 2, process, log)
        assert httpx.get(f"http://127.0.0.1:{port}/health_generate", timeout=60, trust_env=False).status_code == 200
        assert "Traceback" not in said.read_text()  # vLLM may write one during its shutdown
        process.send_signal(signal.SIGINT)
        assert finished(process, log, 60) == 130
    assert statuses[422] > BODIES / 3 and statuses[415] > BODIES / 10 and statuses[200] > 100, statuses
    assert sizes[-1] - sizes[1] < 20e6, f"memory grew: {sizes}"  # the engine's changes with the run's adapters
    print(f"statuses {dict(statuses)}, memory {[round(size / 1e6) for size in sizes]} MB, steps {first} to {last}")


# schemathesis ----------------------------------------------------------------------------------------------

KINDS: dict[str, Any] = {
    protocol.LORA_LOAD_ROUTE: protocol.LoraLoadRequest,
    protocol.LORA_UNLOAD_ROUTE: protocol.LoraUnloadRequest,
    protocol.CHANNELS_ROUTE: ChannelRequest,
    protocol.CHANNELS_CLOSE_ROUTE: ChannelCloseRequest,
    protocol.BRIDGE_PAUSE_ROUTE: protocol.PauseRequest,
    protocol.BRIDGE_UPDATE_BEGIN_ROUTE: protocol.UpdateBeginRequest,
    protocol.BRIDGE_UPDATE_END_ROUTE: protocol.UpdateEndRequest,
    protocol.BRIDGE_WEIGHTS_STAGE_ROUTE: protocol.WeightsStageRequest,
    protocol.BRIDGE_WEIGHTS_APPLY_ROUTE: protocol.WeightsApplyRequest,
}
SAMPLING = {
    "n": {"type": "integer", "minimum": 1, "maximum": 8},
    "max_tokens": {"type": "integer", "minimum": 1, "maximum": 8},
    **{name: {"type": "integer"} for name in ("seed", "logprobs", "prompt_logprobs", "top_k", "policy_version")},
    **{name: {"type": "number"} for name in ("temperature", "top_p", "min_p", "presence_penalty")},
    **{name: {"type": "array", "items": {"type": "string"}} for name in ("stop", "bad_words")},
    **{name: {"type": "array", "items": {"type": "integer"}} for name in ("stop_token_ids", "allowed_token_ids")},
    **{name: {"type": "boolean"} for name in ("stream", "ignore_eos", "detokenize", "skip_special_tokens")},
    **{name: {"type": "object"} for name in ("logit_bias", "extra_args", "structured_outputs")},
}


def openapi() -> dict[str, Any]:
    """Our routes that have a body, from the structs that they are read with. Any answer fits."""
    schemas, components = msgspec.json.schema_components(
        [*KINDS.values(), TokenPrompt], ref_template="#/components/schemas/{name}"
    )
    prompt = {"anyOf": [{"type": "string"}, schemas[-1]]}
    generate = {"type": "object", "required": ["prompt"], "properties": {"prompt": prompt, **SAMPLING}}
    bodies = {protocol.GENERATE_ROUTE: generate, **dict(zip(KINDS, schemas, strict=False))}
    answers = {"default": {"description": "any"}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "grpo serve", "version": "1"},
        "paths": {
            route: {"post": {"requestBody": {"content": {"application/json": {"schema": body}}}, "responses": answers}}
            for route, body in bodies.items()
        },
        "components": {"schemas": components},
    }


@pytest.mark.parametrize("paused", [False, True])
def test_no_body_that_fits_or_misses_the_schema_makes_the_server_fail(tmp_path: Path, paused: bool) -> None:
    pytest.importorskip("schemathesis", reason="needs schemathesis (extra `dev`)")
    server, document = shared_server(), tmp_path / "openapi.json"
    document.write_text(json.dumps(openapi()))
    # Nothing is generated while generation is paused: the route that pauses it is tried by itself.
    which = "--include-path" if paused else "--exclude-path"
    try:
        done = subprocess.run(
            [
                *(str(Path(sys.executable).with_name("schemathesis")), "run", str(document), "--url", server.url),
                *(which, protocol.BRIDGE_PAUSE_ROUTE, "--checks", "not_a_server_error", "--max-examples", "40"),
                *("--workers", "1", "--no-color", "--seed", "1"),
            ],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
    finally:
        server.post(protocol.BRIDGE_RESUME_ROUTE, b"")
    assert done.returncode == 0, done.stdout[-6000:]
    assert server.get("/health_generate").status_code == 200


def test_every_route_of_ours_that_takes_a_body_is_tried() -> None:
    lines = shared_server().get(protocol.BRIDGE_LIST_ENDPOINTS_ROUTE).json()["endpoints"]
    ours = ("/bridge/", "/lora/", protocol.GENERATE_ROUTE)
    posts = {path for method, _, path in (line.partition(" ") for line in lines) if method == "POST"}
    assert {path for path in posts if path.startswith(ours)} == set(GOOD) | BODILESS
    assert set(KINDS) | {protocol.GENERATE_ROUTE} == set(GOOD)
