"""No body and no adapter's folder makes the real server fail: each is refused with a fix, and generation continues."""

from __future__ import annotations

import json
import os
import random
import shutil
from pathlib import Path

import pytest

from tests.integration.serving import Serving, shared_server

pytestmark = pytest.mark.timeout(400)  # the first test waits for the server

ROUTES = (
    *("/generate", "/lora/load", "/lora/unload", "/channels", "/channels/close", "/bridge/update/begin"),
    *("/bridge/update/end", "/bridge/pause"),
)
GOOD = {"prompt": "1", "max_tokens": 1, "temperature": 0.5, "model": "policy", "boot_id": "x", "adapter_path": "q"}
DEPTHS = (300, 490, 600, 900, 100_000)


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
        ({"seed": 2**70, "stream": True}, "seed"),
        ({"logit_bias": {str(2**70): 1}}, "request"),
        ({"policy_version": 10**30}, "policy_version"),
        ({"extra_args": {"kv_transfer_params": 3}}, "request"),
        ({"stop_token_ids": [-1]}, "request"),
    ],
)
def test_what_the_engine_cannot_take_is_refused(server: Serving, sampling: dict[str, object], field: str) -> None:
    assert refused(server, "/generate", {"prompt": "1", "max_tokens": 1} | sampling) == field
    assert server.generate("1", max_tokens=1, seed=2**63 - 1).token_ids


@pytest.mark.parametrize("route", [*ROUTES, "/v1/completions", "/v1/chat/completions"])
def test_values_of_any_depth_are_refused(server: Serving, route: str) -> None:
    for depth in DEPTHS:
        opened, closed = b"[" * depth, b"]" * depth
        for body in (opened, opened + closed, b'{"prompt":"1","seed":' + opened + closed + b"}", b'{"a":' * depth):
            status = server.post(route, body).status_code
            assert 400 <= status < 500, (route, depth, body[:30])


def test_mangled_bodies_are_refused(server: Serving) -> None:
    draw = random.Random(1)
    good = json.dumps(GOOD).encode()
    for _ in range(300):
        at = draw.randrange(len(good))
        mangled = good[:at] + draw.randbytes(draw.randrange(1, 4)) + good[at + draw.randrange(3) :]
        for body in (mangled, draw.randbytes(draw.randrange(1, 200))):
            route = draw.choice(ROUTES)
            assert server.post(route, body).status_code < 500, (route, body)
    assert server.get("/health_generate").status_code == 200


def test_an_adapters_folder_is_read_without_waiting_and_never_echoed(server: Serving, tmp_path: Path) -> None:
    _, served = server.publish()
    outside = tmp_path / "outside"
    outside.write_text('{"secret": "private"}')
    config, weights = "adapter_config.json", "adapter_model.safetensors"
    for number, (name, field) in enumerate(
        ((config, config), (config, "adapter_path"), (weights, weights), (weights, "adapter_path"), (config, config))
    ):
        folder = server.adapter_root / f"odd{number}"
        shutil.copytree(served.adapter_path, folder)
        (folder / name).unlink()
        if field == "adapter_path":
            (folder / name).symlink_to(outside)
        elif number == 4:
            (folder / name).mkdir()
        else:
            os.mkfifo(folder / name)
        assert refused(server, "/lora/load", {"adapter_path": str(folder)}) == field
    for path in ("x" * 5000, "~nosuchuser/x", "a\0b"):
        assert refused(server, "/lora/load", {"adapter_path": path}) == "adapter_path"
    for more, field in (({"version": 2**63}, "version"), ({"adapter_name": "a\r\nb"}, "adapter_name")):
        assert refused(server, "/lora/load", {"adapter_path": served.adapter_path, **more}) == field
    folder = server.adapter_root / "noted"
    shutil.copytree(served.adapter_path, folder)
    noted = json.loads((folder / config).read_text()) | {"note": "private"}
    (folder / config).write_text(json.dumps(noted))
    answer = server.post("/lora/load", {"adapter_path": str(folder)})
    assert answer.status_code == 200 and "private" not in answer.text
    assert answer.json()["adapter_config"]["r"] == noted["r"]
