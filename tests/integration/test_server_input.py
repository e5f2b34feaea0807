"""No body, no adapter's folder and no connection makes the real server fail: each is refused, and a run continues."""

from __future__ import annotations

import http.client
import json
import random
import signal
import socket
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import msgspec
import psutil
import pytest

from tests.foreign import mangled
from tests.integration.serving import Serving, shared_server
from tests.processes import free_port, tail
from tests.runs import finished, member, rows, started, wait_for_step
from vllm_server import protocol
from vllm_server.protocol import SAFETENSORS_MEDIA_TYPE
from vllm_server.protocol.channels import ChannelCloseRequest, ChannelRequest

pytestmark = pytest.mark.timeout(900)

PROMPT: dict[str, Any] = {
    **{"prompt": "1+1=", "n": 2, "max_tokens": 2, "temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1},
    **{"logprobs": 0, "prompt_logprobs": 1, "stop": ["\n"], "stop_token_ids": [3], "seed": 1, "stream": False},
    **{"model": "policy", "logit_bias": {"4": 1.0}, "bad_words": ["x"], "allowed_token_ids": [5, 6]},
    **{"structured_outputs": {"regex": "[0-9]"}, "presence_penalty": 0.1, "ignore_eos": True, "min_tokens": 1},
}
BODIES: dict[str, tuple[type[msgspec.Struct], dict[str, Any]]] = {
    protocol.LORA_LOAD_ROUTE: (
        protocol.LoraLoadRequest,
        {"adapter_path": "x", "adapter_name": "policy-v9", "version": 9, "activate": False},
    ),
    protocol.LORA_UNLOAD_ROUTE: (protocol.LoraUnloadRequest, {"adapter_name": "policy-v10000"}),
    protocol.CHANNELS_ROUTE: (
        ChannelRequest,
        {
            **{"boot_id": "x", "buckets": ["AAAA"], "adapter_config": {"r": 8}, "staging": "on"},
            "spec": {"kind": "group", "backend": "nccl", "meet": "AAAA", "world_size": 2},
        },
    ),
    protocol.CHANNELS_CLOSE_ROUTE: (ChannelCloseRequest, {"channel": "x"}),
    protocol.BRIDGE_PAUSE_ROUTE: (protocol.PauseRequest, {"mode": "keep"}),
    protocol.BRIDGE_UPDATE_BEGIN_ROUTE: (
        protocol.UpdateBeginRequest,
        {"boot_id": "x", "in_flight": "keep", "timeout_s": 1.0},
    ),
    protocol.BRIDGE_UPDATE_END_ROUTE: (protocol.UpdateEndRequest, {"token": "x", "version": 1, "torn": False}),
    protocol.BRIDGE_WEIGHTS_STAGE_ROUTE: (protocol.WeightsStageRequest, {"channel": "x", "timeout_s": 1.0}),
    protocol.BRIDGE_WEIGHTS_APPLY_ROUTE: (protocol.WeightsApplyRequest, {"channel": "x", "token": "x"}),
}
"""Of each of our routes that has a body, but for /generate: what it is read as, and a whole one."""
GOOD = {protocol.GENERATE_ROUTE: PROMPT, **{route: good for route, (_, good) in BODIES.items()}}
BODILESS = {protocol.BRIDGE_RESUME_ROUTE, protocol.BRIDGE_SLEEP_ROUTE, protocol.BRIDGE_WAKE_UP_ROUTE}
HELD = {protocol.BRIDGE_PAUSE_ROUTE, protocol.LORA_UNLOAD_ROUTE}
"""Routes that stop generation or withdraw what the run has published, if their body is right: it has to be wrong."""
TYPES = [*["application/json"] * 7, "application/octet-stream", "text/plain", SAFETENSORS_MEDIA_TYPE, "x", ""]


@pytest.fixture
def server() -> Serving:
    return shared_server()


def refused(server: Serving, route: str, body: object) -> str:
    """Return the field of a refusal that has all its parts; the server is unchanged."""
    answer = server.post(route, body)
    assert 400 <= answer.status_code < 500, (route, str(body)[:200], answer.text)
    error = answer.json()["error"]
    assert error["code"] == answer.status_code and error["wanted"] and error["fix"]
    return error["param"]


@pytest.mark.parametrize(
    ("sampling", "field"),
    [
        ({"seed": 2**70}, "seed"),
        ({"seed": -(2**63) - 1}, "seed"),
        ({"seed": 2**70, "stream": True}, "seed"),
        ({"prompt": {"prompt_token_ids": [1, 2**63]}}, "prompt"),
        ({"stop_token_ids": [[2**64]]}, "stop_token_ids"),
        ({"logit_bias": {str(2**70): 1}}, "request"),
        ({"policy_version": 10**30}, "policy_version"),
        ({"extra_args": {"kv_transfer_params": 3}}, "request"),
        ({"stop_token_ids": [-1]}, "request"),
    ],
)
def test_what_the_engine_cannot_take_is_refused(server: Serving, sampling: dict[str, object], field: str) -> None:
    assert refused(server, "/generate", {"prompt": "1", "max_tokens": 1} | sampling) == field
    assert server.generate("1", max_tokens=1, seed=2**63 - 1).token_ids


@pytest.mark.parametrize("route", [*GOOD, "/v1/completions", "/v1/chat/completions"])
def test_values_of_any_depth_are_refused(server: Serving, route: str) -> None:
    for depth in (300, 490, 600, 900, 100_000):
        opened, closed = b"[" * depth, b"]" * depth
        for body in (opened, opened + closed, b'{"prompt":"1","seed":' + opened + closed + b"}", b'{"a":' * depth):
            status = server.post(route, body).status_code
            assert 400 <= status < 500, (route, depth, body[:30])


def test_idle_connections_are_kept_beside_half_open_ones(server: Serving) -> None:
    port = httpx.URL(server.url).port or 80
    kept = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    with ExitStack() as held:
        held.callback(kept.close)
        kept.request("GET", "/bridge/info")
        assert kept.getresponse().read()
        own = kept.sock.getsockname()
        for _ in range(200):
            half = held.enter_context(socket.create_connection(("127.0.0.1", port), timeout=120))
            half.sendall(b"POST /generate HTTP/1.1\r\n")
        assert server.generate("2+2=", max_tokens=2).text
        time.sleep(6)  # vLLM's own default closes a connection that is idle for 5 s
        kept.request("GET", "/bridge/info")
        assert kept.getresponse().status == 200
        assert kept.sock.getsockname() == own


def is_right(route: str, body: bytes) -> bool:
    """Whether a route of `HELD` would do what it is for."""
    try:
        msgspec.json.decode(body or b"{}", type=BODIES[route][0])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False
    return True


def drawn(draw: random.Random) -> tuple[str, bytes, dict[str, str]]:
    """Route, body and headers of the next request."""
    route = draw.choice([*GOOD, *[protocol.GENERATE_ROUTE] * 3, *BODILESS])
    good = GOOD[route if route in GOOD else protocol.LORA_LOAD_ROUTE]
    others = ("policy_version", "extra_args", "best_of", "request_id", "z")
    body = mangled(draw, good, others)
    while route in HELD and is_right(route, body):
        body = mangled(draw, good, others)
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


def test_malformed_bodies_beside_a_run(demo_model: Path, tmp_path: Path) -> None:
    bodies = 1_600
    run_dir, log, port = tmp_path / "run", tmp_path / "log", free_port()
    draw, statuses, sizes = random.Random(16), Counter[int](), []
    with started(demo_model, run_dir, log, training_steps=100_000, server__port=port) as process:
        wait_for_step(run_dir, 2, process, log)
        server, said = member(process, "vllm_server"), run_dir / "logs" / "server.log"
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
        first = rows(run_dir)[-1]["step"]
        for number in range(bodies):
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
    assert statuses[422] > bodies / 3 and statuses[415] > bodies / 10 and statuses[200] > bodies / 40, statuses
    assert sizes[-1] - sizes[1] < 20e6, f"memory grew: {sizes}"  # the engine's changes with the run's adapters
    print(f"statuses {dict(statuses)}, memory {[round(size / 1e6) for size in sizes]} MB, steps {first} to {last}")


def test_every_route_of_ours_that_takes_a_body_is_tried(server: Serving) -> None:
    lines = server.get(protocol.BRIDGE_LIST_ENDPOINTS_ROUTE).json()["endpoints"]
    ours = ("/bridge/", "/lora/", protocol.CHANNELS_ROUTE, protocol.GENERATE_ROUTE)
    posts = {path for method, _, path in (line.partition(" ") for line in lines) if method == "POST"}
    assert {path for path in posts if path.startswith(ours)} == set(GOOD) | BODILESS
