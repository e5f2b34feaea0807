"""The gate by itself: what no client of ours sends, and who may listen where."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from typing import Any

import pytest

from grpo_common.gate import Application, Gate, Refusal, Scope, is_loopback
from vllm_server.checks import check_key, keys_of
from vllm_server.errors import FatalError


def ask(scope: dict[str, Any], headers: dict[str, str], **settings: Any) -> object:
    """What comes of a request: "in", the refusal's status and field, or the message to a websocket."""
    found: list[object] = []

    async def inside(_: Any, __: Any, ___: Any) -> None:
        found.append("in")

    def answer(_: Scope, refusal: Refusal) -> Application:
        async def refuse(_: Any, __: Any, ___: Any) -> None:
            found.append((refusal.status, refusal.problem.field))

        return refuse

    async def receive() -> dict[str, Any]:
        return {"type": "websocket.connect"}

    async def send(message: Any) -> None:
        found.append(message["type"])

    gate = Gate(inside, **{"host": "127.0.0.1", "answer": answer, **settings})
    encoded = [(name.encode(), value.encode()) for name, value in headers.items()]
    full = {"type": "http", "method": "GET", "path": "/x", "scheme": "http", "server": ("127.0.0.1", 80)}
    asyncio.run(gate({**full, **scope, "headers": encoded}, receive, send))
    (result,) = found
    return result


OWN = {"host": "127.0.0.1"}


def test_a_websocket_is_refused_before_it_is_accepted() -> None:
    socket = {"type": "websocket", "scheme": "ws"}
    assert ask(socket, OWN) == "in"
    assert ask(socket, {"host": "evil.example"}) == "websocket.close"
    assert ask(socket, {**OWN, "origin": "http://evil.example"}) == "websocket.close"
    assert ask(socket, OWN, keys=["k"]) == "websocket.close"
    assert ask(socket, {**OWN, "authorization": "Bearer k"}, keys=["k"]) == "in"


def test_the_start_and_end_of_the_application_pass() -> None:
    assert ask({"type": "lifespan"}, {}, keys=["k"]) == "in"


@pytest.mark.parametrize(
    ("bound", "server", "host", "comes_in"),
    [
        ("127.0.0.1", ("127.0.0.1", 80), "127.0.0.1", True),  # a browser leaves the default port out
        ("127.0.0.1", ("127.0.0.1", 80), "127.0.0.1:80", True),
        ("127.0.0.1", ("127.0.0.1", 9001), "127.0.0.1", False),
        ("127.0.0.2", ("127.0.0.2", 9001), "127.0.0.2:9001", True),
        ("127.0.0.1", ("127.0.0.1", 9001), "127.0.0.2:9001", False),
        ("::1", ("::1", 9001), "[::1]:9001", True),
        ("127.0.0.1", ("127.0.0.1", 9001), "localhost.evil.example:9001", False),
        ("127.0.0.1", ("127.0.0.1", 9001), "user@127.0.0.1:9001", False),
        ("127.0.0.1", ("/run/socket", None), "localhost", True),  # a socket of the file system
        ("127.0.0.1", ("/run/socket", None), "evil.example", False),
    ],
)
def test_hosts(bound: str, server: tuple[str, int | None], host: str, comes_in: bool) -> None:
    wanted = "in" if comes_in else (403, "Host")
    assert ask({"server": server}, {"host": host}, host=bound) == wanted


@pytest.mark.parametrize(
    ("headers", "wanted"),
    [
        ({}, "in"),
        ({"content-type": "application/json", "content-length": "2"}, "in"),
        ({"content-type": "application/msgpack", "transfer-encoding": "chunked"}, "in"),
        ({"content-length": "0"}, "in"),
        ({"content-length": "2"}, (415, "Content-Type")),
        ({"transfer-encoding": "chunked"}, (415, "Content-Type")),
        ({"content-type": "", "content-length": "2"}, (415, "Content-Type")),
        ({"content-type": " Text/Plain ; x=application/json"}, (415, "Content-Type")),
    ],
)
def test_content_types_of_writes(headers: dict[str, str], wanted: object) -> None:
    for method in ("POST", "PUT", "PATCH", "DELETE"):
        assert ask({"method": method}, OWN | headers) == wanted
    assert ask({"method": "GET"}, OWN | headers) == "in"


def test_a_key_opens_and_probes_need_none() -> None:
    keys = {"keys": ["one", "two"]}
    for given in ("Bearer one", "bearer two"):
        assert ask({"method": "POST"}, {"authorization": given}, **keys) == "in"
    for given in ("Bearer", "Bearer ", "Bearer one two", "Basic one", "one"):
        assert ask({}, {"authorization": given}, **keys) == (401, "Authorization")
    for path in ("/health", "/ping"):
        assert ask({"path": path}, {}, **keys) == "in"
        assert ask({"path": f"/behind{path}", "root_path": "/behind"}, {}, **keys) == "in"
    for path in ("/health/", "//health", "/health/x", "/Health", "/metrics"):
        assert ask({"path": path}, {}, **keys) == (401, "Authorization")


def test_a_star_names_no_origin() -> None:
    page = {**OWN, "origin": "http://evil.example"}
    assert ask({}, page, origins=["*"]) == (403, "Origin")
    assert ask({}, page, origins=["*", "http://evil.example"]) == "in"


def test_loopback() -> None:
    assert all(map(is_loopback, ("127.0.0.1", "127.8.0.1", "::1", "localhost")))
    assert not any(map(is_loopback, ("0.0.0.0", "::", "", None, "192.168.0.1", "localhost.example", "127.0.0.1.evil")))


def test_keys_come_from_the_flag_or_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    assert keys_of(None) == keys_of([""]) == ()
    monkeypatch.setenv("VLLM_API_KEY", "variable")
    assert keys_of(None) == ("variable",)
    assert keys_of(["a", "b"]) == ("a", "b")


def test_beyond_loopback_the_server_needs_a_key() -> None:
    with pytest.raises(FatalError) as refused:
        check_key("0.0.0.0", ())
    assert (refused.value.field, refused.value.got) == ("--host 0.0.0.0", "no key")
    check_key("0.0.0.0", ("k",))
    check_key("127.0.0.1", ())
    command = [sys.executable, "-m", "vllm_server", "--model", "/nowhere/at/all", "--port", "0"]
    for arguments, named in ((["--host=0.0.0.0"], "--host 0.0.0.0"), (["--host", "::", "--api_key", "k"], "--model")):
        done = subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 2
        assert done.stderr.startswith(f"vllm_server: {named}"), done.stderr
