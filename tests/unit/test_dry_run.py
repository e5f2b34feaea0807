"""`grpo run --dry-run`: one row a process, without secrets, and nothing starts."""

from __future__ import annotations

import json
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from environments.demo_model.model import build_tokenizer
from grpo_trainer import dry_run
from grpo_trainer.cli import app
from grpo_trainer.config.processes import RunConfig
from grpo_trainer.config.run import build_run, read_toml
from grpo_trainer.errors import ConfigError, PortBusyError
from grpo_trainer.launch.places import Node, place_run
from grpo_trainer.launch.plan import plan_run
from grpo_trainer.machine import Gpu, Machine
from grpo_trainer.model.shape import shape_of
from grpo_trainer.run_defaults import chosen, described
from tests.unit.factories import refusing

GB = 10**9
BASE = {"model_name": "demo", "weight_bridge_mode": "lora_only", "run_dir": "/runs/a"}
PORTS = {"api": 8123, "server": 9123, "server-2": 9124}
CPU = Machine(python="3.11", memory=64 * GB)
FOUR_GPUS = Machine(
    python="3.11", memory=64 * GB, gpus=tuple(Gpu("H200", str(n), 140 * GB, 140 * GB) for n in range(4))
)


def a_run(**flags: Any) -> RunConfig:
    return build_run({}, {**BASE, **{key.replace("__", "."): value for key, value in flags.items()}})


def rows(config: RunConfig, machine: Machine = CPU) -> dict[str, dry_run.PlannedProcess]:
    together = {"trainers": 7000} if config.options.trainer_gpus > 1 else {}
    plan = plan_run(config, {**PORTS, **together}, python="py", on_gpu=machine.on_gpu)
    return {row.name: row for row in dry_run.rows_of(config, plan, on_gpu=machine.on_gpu, visible=machine.visible)}


def test_every_process_has_a_row_with_its_stage_port_and_command() -> None:
    found = rows(a_run())
    assert list(found) == ["api", "server", "trainer", "env-arithmetic"]
    assert [row.port for row in found.values()] == [8123, 9123, None, None]
    assert {row.stage for row in found.values()} == {1} and {row.gpus for row in found.values()} == {()}
    assert {row.node for row in found.values()} == {socket.gethostname()}
    assert found["trainer"].command == ("py", "-m", "grpo_trainer", "train", "--config", "/runs/a/config/trainer.toml")
    assert {row.stage for row in rows(a_run(), FOUR_GPUS).values()} == {1, 2}


def test_gpus_of_servers_and_trainers() -> None:
    spread = rows(a_run(server__replicas="2", server__gpus="1;2,3", trainer_gpus="2"), FOUR_GPUS)
    assert {name: row.gpus for name, row in spread.items()} == {
        "api": (), "server": (1,), "server-2": (2, 3), "trainer": (0,), "trainer-1": (1,), "env-arithmetic": (),
    }  # fmt: skip
    assert (spread["trainer"].port, spread["trainer-1"].port) == (7000, None)
    for visible, flags, servers, trainers in (
        ("6,7", {}, (6,), (6,)),
        ("6,7", {"server__gpus": "7"}, (7,), (6,)),
        ("0", {"server__gpus": "1"}, (1,), (0,)),
        ("6,7", {"tensor_parallel_size": "2", "device": "cuda:1"}, (6, 7), (7,)),
        ("GPU-a,GPU-b", {"server__gpus": "0", "device": "cuda:1"}, (0,), ("GPU-b",)),
    ):
        seen = rows(a_run(**flags), replace(FOUR_GPUS, environment={"CUDA_VISIBLE_DEVICES": visible}))
        assert (seen["server"].gpus, seen["trainer"].gpus) == (servers, trainers)
    wide = rows(a_run(tensor_parallel_size="4", device="cuda:3"), FOUR_GPUS)
    assert wide["server"].gpus == (0, 1, 2, 3) and wide["trainer"].gpus == (3,)


def test_servers_that_the_trainer_starts_have_rows_too() -> None:
    found = rows(a_run(weight_bridge_mode="none", server__replicas="2"))
    assert [(row.name, row.started_by) for row in found.values()] == [
        ("api", ""), ("trainer", ""), ("server", "trainer"), ("server-2", "trainer"), ("env-arithmetic", ""),
    ]  # fmt: skip
    assert found["server-2"].command[found["server-2"].command.index("--port") + 1] == "9124"


def test_on_a_cluster_every_process_has_its_node_and_gpus_of_its_own() -> None:
    config = a_run(cluster="auto", server__replicas="2")
    nodes = [Node("n0", "10.0.0.1", 2, is_head=True), Node("n1", "10.0.0.2", 2)]
    places = place_run(config, nodes, on_gpu=True)
    plan = plan_run(config, PORTS, python="py", on_gpu=True, places=places)
    found = {row.name: row for row in dry_run.rows_of(config, plan, on_gpu=True)}
    assert {name: (row.node, row.gpus) for name, row in found.items()} == {
        "api": ("n0", ()), "env-arithmetic": ("n0", ()), "trainer": ("n0", (0,)), "server": ("n0", (1,)),
        "server-2": ("n1", (0,)),
    }  # fmt: skip


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": 1000}
    (folder / "config.json").write_text(json.dumps(sizes))
    return folder


def test_the_command_starts_and_writes_nothing(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def started(*_: object, **__: object) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr("grpo_trainer.launch.process.subprocess.Popen", started)
    monkeypatch.setattr(dry_run, "look", lambda: CPU)
    folder = model.parent / "run"
    words = ["run", "--dry-run", "--model-name", str(model), "--run-dir", str(folder), "--server.port", "0"]
    done = CliRunner().invoke(app, [*words, "--api.port", "0", "--json"], catch_exceptions=False)
    found = json.loads(done.stdout)
    assert [each["name"] for each in found["processes"]] == ["api", "server", "trainer", "env-arithmetic"]
    assert done.exit_code == 0 and not folder.exists()
    table = CliRunner().invoke(app, [*words, "--api.port", "0"], catch_exceptions=False).stdout
    config = build_run({}, {"model_name": str(model), "run_dir": str(folder)})
    summary = described(config, chosen(config, CPU, shape_of(str(model))), CPU, shape_of(str(model)))
    assert found["summary"] == summary and table.startswith("\n".join(summary)), "what the start says"


def test_the_dry_run_reads_data_and_rewards(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dry_run, "look", lambda: CPU)
    monkeypatch.setattr("grpo_trainer.launch.trial.LIMIT_S", 120.0)  # 20 s are too few on a busy machine
    build_tokenizer().save_pretrained(model)
    (model / "data.jsonl").write_text('{"prompt": "a", "answer": "1"}\n')
    (model / "mine.py").write_text(
        f"def right(completions):\n    open({str(model / 'tried')!r}, 'w')\n    return [1.0 for _ in completions]\n"
    )
    words = ["run", "--dry-run", "--json", "--model-name", str(model), "--run-dir", str(model / "run")]
    words += ["--server.port", "0", "--api.port", "0"]
    words += ["--data", str(model / "data.jsonl"), "--reward", f"{model}/mine.py:right"]
    done = CliRunner().invoke(app, words, catch_exceptions=False)
    assert done.exit_code == 0 and (model / "tried").exists()


def test_what_would_stop_the_run_stops_the_dry_one(
    model: Path, busy_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dry_run, "look", lambda: CPU)
    with refusing(PortBusyError, "--api.port"):
        dry_run.look_ahead(build_run({}, {**BASE, "model_name": str(model), "api.port": busy_port}), print)
    with refusing(ConfigError, "--json"):
        CliRunner().invoke(app, ["run", "--json", "--model-name", "m"], catch_exceptions=False)


CONFIGS = Path(__file__).parents[2] / "configs"


@pytest.mark.parametrize(
    ("name", "missing", "gpus"),
    [
        ("two_gpus", ["--device: got cuda:1"], {"server": (0,), "trainer": (1,)}),
        ("four_gpus", [], {"server": (), "trainer-3": ()}),  # which a CPU can do, too
        ("several_machines", ["--cluster: ", "2 machines with 8 GPUs"], {"server-5": (7,), "trainer-10": (2,)}),
    ],
)
def test_a_machine_without_the_gpus_or_the_cluster_shows_the_plan(
    model: Path, monkeypatch: pytest.MonkeyPatch, name: str, missing: list[str], gpus: dict[str, tuple[int, ...]]
) -> None:
    monkeypatch.setattr(dry_run, "look", lambda: CPU)
    asked = []

    def no_cluster(address: str, wanted: int, *, waits: bool) -> None:
        asked.append(waits)
        raise ConfigError("no Ray cluster answers", field="--cluster", got=address)

    monkeypatch.setattr("grpo_trainer.launch.ray_cluster.RayCluster", no_cluster)
    run = {
        "model_name": str(model),
        "run_dir": str(model / "run"),
        "server.port": 0,
        "api.port": 0,
        "try": False,
    }
    given = build_run(read_toml(CONFIGS / f"{name}.toml"), run)
    ahead = dry_run.look_ahead(given, print)
    assert {row.name: row.gpus for row in ahead.processes if row.name in gpus} == gpus
    assert all(part in " ".join(ahead.missing) for part in missing) and bool(ahead.missing) == bool(missing)
    assert asked == [False] * (name == "several_machines"), "it does not wait"
    assert json.loads(dry_run.as_json(ahead))["missing"] == ahead.missing
    here = described(given, chosen(given, CPU, shape_of(str(model))), CPU, shape_of(str(model)))
    assert (ahead.summary == here) != bool(missing), "what is said of this machine is left out"
    assert here[0].startswith(ahead.summary[0]) and here[-1].startswith(ahead.summary[-1])
