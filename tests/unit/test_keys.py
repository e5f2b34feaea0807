"""A server that other machines can reach has a key, which no command line and no log shows."""

from __future__ import annotations

import os
import stat
import sys
from pathlib import Path
from typing import Any

import pytest

from grpo_trainer import files
from grpo_trainer.config.options import build
from grpo_trainer.config.processes import RunConfig
from grpo_trainer.config.run import build_run
from grpo_trainer.config.train import TrainConfig
from grpo_trainer.launch.places import NO_PLACES, Node, place_run
from grpo_trainer.launch.plan import RunPlan, plan_run
from grpo_trainer.launch.process import Process
from grpo_trainer.run import contents, with_key, write_configs
from vllm_server.checks import check_key, keys_of
from vllm_server.errors import FatalError

PORTS = {"api": 8123, "server": 9123, "server-2": 9124}
NODES = [Node("a", "10.0.0.1", 2, is_head=True), Node("b", "10.0.0.2", 2)]


def a_run(tmp_path: Path, **flags: Any) -> RunConfig:
    base = {"model_name": "demo", "weight_bridge_mode": "lora_only", "run_dir": str(tmp_path), "cluster": "auto"}
    return build_run({}, {**base, **{key.replace("__", "."): value for key, value in flags.items()}})


def plan(config: RunConfig, nodes: list[Node]) -> RunPlan:
    places = place_run(config, nodes, on_gpu=True)
    keyed = with_key(config, places, lambda: "door-1")
    return plan_run(keyed, PORTS, python=sys.executable, on_gpu=True, places=places)


def test_a_server_on_another_machine_gets_a_key_that_its_clients_have(tmp_path: Path) -> None:
    made = plan(a_run(tmp_path, server__replicas="2"), NODES)
    servers = [process for process in made.processes if process.name.startswith("server")]
    assert [server.env["VLLM_API_KEY"] for server in servers] == ["door-1", "door-1"]
    for server in servers:  # each server itself refuses to listen there without one
        host = server.argv[server.argv.index("--host") + 1]
        check_key(host, [server.env["VLLM_API_KEY"]])
    with pytest.raises(FatalError):
        check_key("10.0.0.2", ())
    trainer = build(TrainConfig, made.config_files[tmp_path / "config" / "trainer.toml"])
    assert trainer.server.api_key == "door-1"
    assert made.config_files[tmp_path / "config" / "env-arithmetic.toml"]["openai"]["api_key"] == "door-1"


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


def test_who_listens_on_loopback_only_needs_none(tmp_path: Path) -> None:
    here = plan(a_run(tmp_path, weight_bridge_mode="shared_vllm"), NODES[:1])
    assert not any("VLLM_API_KEY" in process.env for process in here.processes)
    config = a_run(tmp_path)
    assert with_key(config, NO_PLACES) is config


def test_servers_have_a_key_where_one_on_another_machine_may_join_them(tmp_path: Path) -> None:
    here = plan(a_run(tmp_path), NODES[:1])
    assert {process.env.get("VLLM_API_KEY") for process in here.processes} == {None, "door-1"}


def test_a_key_of_the_users_stays(tmp_path: Path) -> None:
    made = plan(a_run(tmp_path, vllm_api_key="door-2", server__replicas="2"), NODES)
    assert {process.env.get("VLLM_API_KEY") for process in made.processes} == {None, "door-2"}


def test_each_run_has_its_own_long_key(tmp_path: Path) -> None:
    config = a_run(tmp_path, server__replicas="2")
    places = place_run(config, NODES, on_gpu=True)
    keys = {str(with_key(config, places).trainer.server.api_key) for _ in range(10)}
    assert len(keys) == 10 and min(map(len, keys)) >= 32


def test_the_server_reads_the_key_of_its_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, "VLLM_API_KEY", "door-1")
    assert keys_of(None) == ("door-1",)
