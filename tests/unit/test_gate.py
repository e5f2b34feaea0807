"""The gate by itself; a server that other machines can reach has a key, which no command line and no log shows."""

from __future__ import annotations

import asyncio
import stat
import sys
from pathlib import Path
from typing import Any

import pytest

from grpo_common.gate import Application, Gate, Refusal, Scope, is_loopback
from grpo_trainer import files
from grpo_trainer.config.options import build
from grpo_trainer.config.processes import RunConfig
from grpo_trainer.config.run import build_run
from grpo_trainer.config.train import TrainConfig
from grpo_trainer.launch.places import NO_PLACES, Node, place_run
from grpo_trainer.launch.plan import RunPlan, plan_run
from grpo_trainer.launch.process import Process
from grpo_trainer.run import contents, with_key, write_configs
from vllm_server.checks import check_key


def ask(scope: dict[str, Any], headers: dict[str, str] | list[tuple[str, str]], **settings: Any) -> object:
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
    pairs = headers.items() if isinstance(headers, dict) else headers
    encoded = [(name.encode(), value.encode()) for name, value in pairs]
    full = {"type": "http", "method": "GET", "path": "/x", "scheme": "http", "server": ("127.0.0.1", 80)}
    asyncio.run(gate({**full, **scope, "headers": encoded}, receive, send))
    (result,) = found
    return result


OWN = {"host": "127.0.0.1"}


def test_a_websocket_is_refused_before_it_is_accepted_and_the_applications_start_passes() -> None:
    socket = {"type": "websocket", "scheme": "ws"}
    assert ask(socket, OWN) == "in"
    assert ask(socket, {"host": "evil.example"}) == "websocket.close"
    assert ask(socket, {**OWN, "origin": "http://evil.example"}) == "websocket.close"
    assert ask(socket, OWN, keys=["k"]) == "websocket.close"
    assert ask(socket, {**OWN, "authorization": "Bearer k"}, keys=["k"]) == "in"
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
    "hosts", [[], ["127.0.0.1", "127.0.0.1"], ["127.0.0.1", "evil.example"], [""], ["127.0.0.1:80x"]]
)
def test_the_host_is_said_once(hosts: list[str]) -> None:
    assert ask({}, [("host", host) for host in hosts]) == (403, "Host")


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


PORTS = {"api": 8123, "server": 9123, "server-2": 9124}
NODES = [Node("a", "10.0.0.1", 2, is_head=True), Node("b", "10.0.0.2", 2)]


def a_run(tmp_path: Path, **flags: Any) -> RunConfig:
    base = {"model_name": "demo", "weight_bridge_mode": "lora_only", "run_dir": str(tmp_path), "cluster": "auto"}
    return build_run({}, {**base, **{key.replace("__", "."): value for key, value in flags.items()}})


def plan(config: RunConfig, nodes: list[Node]) -> RunPlan:
    places = place_run(config, nodes, on_gpu=True)
    keyed = with_key(config, places, lambda: "door-1")
    return plan_run(keyed, PORTS, python=sys.executable, on_gpu=True, places=places)


@pytest.mark.parametrize(
    ("flags", "nodes", "key"),
    [
        ({"server__replicas": "2"}, NODES, "door-1"),
        ({"server__replicas": "2", "vllm_api_key": "door-2"}, NODES, "door-2"),  # the user's own
        ({}, NODES[:1], "door-1"),  # a server on another machine may join
        ({"weight_bridge_mode": "shared_vllm"}, NODES[:1], None),
    ],
)
def test_servers_that_other_machines_reach_have_a_key_that_their_clients_have(
    tmp_path: Path, flags: dict[str, str], nodes: list[Node], key: str | None
) -> None:
    made = plan(a_run(tmp_path, **flags), nodes)
    servers = [process for process in made.processes if process.name.startswith("server")]
    assert [server.env.get("VLLM_API_KEY") for server in servers] == [key] * int(flags.get("server__replicas", 1))
    for server in servers:  # each server itself refuses to listen there without one
        check_key(server.argv[server.argv.index("--host") + 1], [key] if key else [])
    trainer = build(TrainConfig, made.config_files[tmp_path / "config" / "trainer.toml"])
    assert trainer.server.api_key == key
    assert made.config_files[tmp_path / "config" / "env-arithmetic.toml"]["openai"].get("api_key") in (key, "x")


def test_the_key_is_in_no_command_line_no_log_and_no_file_that_others_may_read(tmp_path: Path) -> None:
    made = plan(a_run(tmp_path, server__replicas="2"), NODES)
    assert not any("door-1" in word for process in made.processes for word in process.argv)
    write_configs(made)
    assert len(contents(made)) == 2 and all(b"door-1" in content for content in contents(made).values())
    for path in contents(made):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    for process in made.processes:
        log = tmp_path / f"{process.name}.log"
        child = Process(process, log)
        child.note_family()
        child.kill()
        child.close()
        assert "door-1" not in log.read_text()


def test_a_file_with_the_key_is_its_owners_while_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    modes: list[int] = []
    monkeypatch.setattr(files, "write_bytes", lambda path, _: modes.append(stat.S_IMODE(path.stat().st_mode)))
    files.replace_file(tmp_path / "trainer.toml", b"key", mode=0o600)
    assert modes == [0o600]


def test_each_run_has_its_own_long_key(tmp_path: Path) -> None:
    config = a_run(tmp_path, server__replicas="2")
    places = place_run(config, NODES, on_gpu=True)
    keys = {str(with_key(config, places).trainer.server.api_key) for _ in range(10)}
    assert with_key(config, NO_PLACES) is config, "all of it is on this machine"
    assert len(keys) == 10 and min(map(len, keys)) >= 32
