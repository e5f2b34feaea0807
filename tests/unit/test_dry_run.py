"""What a run would start: `--dry-run` starts nothing and shows no secret; `--slurm` writes a sound script."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import socket
import stat
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from typer.testing import CliRunner

from environments.demo_model.model import build_tokenizer
from grpo_trainer import dry_run
from grpo_trainer.cli import app
from grpo_trainer.config.processes import RunConfig
from grpo_trainer.config.run import build_run, read_toml
from grpo_trainer.errors import ConfigError, PortBusyError
from grpo_trainer.launch.plan import plan_run
from grpo_trainer.machine import Gpu, Machine
from grpo_trainer.model.shape import shape_of
from grpo_trainer.run_defaults import chosen, described
from grpo_trainer.slurm import Job, command_of, job_script, nodes_of_job
from tests.processes import ROOT, alive, wait_for
from tests.unit.factories import refusing
from tests.unit.test_doctor import write_model

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


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model on a machine without a GPU."""
    monkeypatch.setattr(dry_run, "look", lambda: CPU)
    return write_model(tmp_path / "model")


def test_the_command_starts_and_writes_nothing(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started = mock.Mock(side_effect=AssertionError("a process was started"))
    monkeypatch.setattr("grpo_trainer.launch.process.subprocess.Popen", started)
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


def test_the_dry_run_reads_data_and_rewards(model: Path) -> None:
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


def test_what_would_stop_the_run_stops_the_dry_one(model: Path, busy_port: int) -> None:
    with refusing(PortBusyError, "--api.port"):
        dry_run.look_ahead(build_run({}, {**BASE, "model_name": str(model), "api.port": busy_port}), print)
    with refusing(ConfigError, "--json"):
        CliRunner().invoke(app, ["run", "--json", "--model-name", "m"], catch_exceptions=False)


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
    no_cluster = mock.Mock(side_effect=ConfigError("no Ray cluster answers", field="--cluster", got="auto"))
    monkeypatch.setattr("grpo_trainer.launch.ray_cluster.RayCluster", no_cluster)
    run = {
        "model_name": str(model),
        "run_dir": str(model / "run"),
        "server.port": 0,
        "api.port": 0,
        "try": False,
    }
    given = build_run(read_toml(ROOT / "configs" / f"{name}.toml"), run)
    ahead = dry_run.look_ahead(given, print)
    assert {row.name: row.gpus for row in ahead.processes if row.name in gpus} == gpus
    assert len({row.node for row in ahead.processes}) == (2 if name == "several_machines" else 1)
    assert all(part in " ".join(ahead.missing) for part in missing) and bool(ahead.missing) == bool(missing)
    waits = [call.kwargs["waits"] for call in no_cluster.call_args_list]
    assert waits == [False] * (name == "several_machines"), "it does not wait"
    assert json.loads(dry_run.as_json(ahead))["missing"] == ahead.missing
    here = described(given, chosen(given, CPU, shape_of(str(model))), CPU, shape_of(str(model)))
    assert (ahead.summary == here) != bool(missing), "what is said of this machine is left out"
    assert here[0].startswith(ahead.summary[0]) and here[-1].startswith(ahead.summary[-1])


# a job of Slurm -------------------------------------------------------------------------------------------------------


SHELLCHECK = Path(sys.executable).parent / "shellcheck"

SRUN = """
echo "srun $*" >>"$LOG"
while [[ $1 == --* ]]; do shift; done
exec "$@"
"""
SCONTROL = 'printf "%s\\n" a1 a2 a3'
PYTHON = "echo 10.0.0.7"
RAY = """
echo "ray $* mode=$RAY_AUTH_MODE token=${#RAY_AUTH_TOKEN} pid=$$" >>"$LOG"
exec sleep 60
"""
GRPO = """
echo "grpo $* address=$RAY_ADDRESS folder=$PWD" >>"$LOG"
exit 3
"""
PATIENT_GRPO = """
trap 'echo "grpo ends" >>"$LOG"; exit 7' TERM
echo "grpo is up" >>"$LOG"
while :; do sleep 0.05; done
"""


def write(path: Path, words: list[str], gpus_per_node: int = 8, **flags: Any) -> Job:
    return dry_run.write_job(a_run(cluster="auto", **flags), path, gpus_per_node, words)


@pytest.mark.parametrize("flags", [{}, {"trainer_gpus": "3", "server__replicas": "11"}])
@pytest.mark.parametrize("gpus", [0, 8])
def test_the_script_is_sound(tmp_path: Path, flags: dict[str, Any], gpus: int) -> None:
    path = tmp_path / "job.sbatch"
    write(path, ["--run-dir", "a folder; rm -rf $HOME 'x'"], gpus, **flags)
    assert subprocess.run(["bash", "-n", str(path)], check=False).returncode == 0
    done = subprocess.run([str(SHELLCHECK), str(path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert path.stat().st_mode & stat.S_IXUSR


def sbatch_options(script: str) -> dict[str, str]:
    return dict(re.findall(r"^#SBATCH --([\w-]+)=?(.*)$", script, flags=re.MULTILINE))


def test_nodes_gpus_and_the_time_to_save_follow_from_the_plan(tmp_path: Path) -> None:
    path = tmp_path / "job.sbatch"
    job = write(path, [], trainer_gpus="3", server__replicas="11")  # 14 GPUs on nodes of 8
    options = sbatch_options(path.read_text())
    assert (options["nodes"], options["gpus-per-node"], job.nodes) == ("2", "8", 2)
    assert "exclusive" in options and options["ntasks-per-node"] == "1"
    assert options["signal"] == "B:TERM@67", "the trainer's 7 s and 60 more"
    assert "gpus-per-node" not in sbatch_options(job_script(write(path, [], 0, cluster_nodes="3")))
    assert sbatch_options(path.read_text())["nodes"] == "3"


def test_every_process_is_listed_with_its_place(tmp_path: Path) -> None:
    path = tmp_path / "job.sbatch"
    write(path, [], 2, server__replicas="2", tensor_parallel_size="2")
    listed = dict(re.findall(r"^#   (\S+) +(node .+)$", path.read_text(), flags=re.MULTILINE))
    assert listed == {
        "api": "node 1", "trainer": "node 1, GPU 0", "server": "node 2, GPU 0,1", "server-2": "node 3, GPU 0,1",
        "env-arithmetic": "node 1",
    }  # fmt: skip


def test_no_node_is_large_enough() -> None:
    config = a_run(cluster="auto", tensor_parallel_size="4")
    with refusing(ConfigError, "--cluster", words=["4"]):
        nodes_of_job(config, 2)
    assert len(nodes_of_job(config, 4)) == 2


@pytest.mark.parametrize(
    ("words", "kept"),
    [
        (["--config", "a.toml", "--slurm", "job", "--lr", "1"], ("--config", "a.toml", "--lr", "1")),
        (["--slurm=job", "--gpus-per-node", "4", "--trace"], ("--trace",)),
        (["--cluster", "h:1", "--cluster-nodes=2", "--dry-run", "--json"], ()),
    ],
)
def test_the_job_repeats_the_command_but_no_key(words: list[str], kept: tuple[str, ...]) -> None:
    assert command_of(words) == kept
    for key in (["--vllm-api-key", "door"], ["--env.rollout_api_key=door"]):
        with refusing(ConfigError, "--slurm", got=key[0].partition("=")[0]) as error:
            command_of([*words, *key])
        assert "door" not in str(error.value)


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """A folder with stand-ins for Slurm's, Ray's and our commands, and a script that calls them."""
    programs = tmp_path / "programs"
    programs.mkdir()
    stubs = {"srun": SRUN, "scontrol": SCONTROL, "python": PYTHON, "ray": RAY, "grpo": GRPO}
    for name, body in stubs.items():
        stub(programs / name, body)
    path = tmp_path / "job.sbatch"
    made = write(path, ["--run-dir", "it's here"], cluster_nodes=3)
    path.write_text(job_script(Job(made.plan, 3, 8, made.command, tmp_path, programs)))
    return path


def stub(path: Path, body: str) -> None:
    path.write_text(f"#!/bin/bash\n{body}")
    path.chmod(0o755)


def environment(folder: Path) -> dict[str, str]:
    job = {"SLURM_JOB_ID": "20017", "SLURM_JOB_NODELIST": "a[1-3]", "SLURM_CPUS_ON_NODE": "4"}
    return {**os.environ, **job, "LOG": str(folder / "log"), "PATH": f"{folder / 'programs'}:{os.environ['PATH']}"}


def test_the_script_starts_ray_on_all_nodes_and_the_run_on_the_first(job: Path) -> None:
    # The run waits here until Ray's commands have been called, as the real one waits for its nodes.
    stub(job.parent / "programs" / "grpo", 'until [ "$(grep -c ^ray "$LOG")" -ge 2 ]; do sleep 0.02; done\n' + GRPO)
    done = subprocess.run(["bash", str(job)], env=environment(job.parent), timeout=250, check=False)
    assert done.returncode == 3, "the job ends as the run does"
    log = (job.parent / "log").read_text()
    steps = [shlex.split(line)[1:] for line in log.splitlines() if line.startswith("srun")]
    head = next(step for step in steps if "--head" in step)
    assert "--nodelist=a1" in head and "--node-ip-address=10.0.0.7" in head and "--port=20017" in head
    others = next(step for step in steps if "--address=10.0.0.7:20017" in step)
    assert {"--nodes=2", "--ntasks=2", "--exclude=a1", "--cpus-per-task=4"} <= {*others}
    assert re.findall(r"mode=token token=(\d+)", log) == ["64", "64"], "32 random bytes in hexadecimal digits"
    (run,) = [line for line in log.splitlines() if line.startswith("grpo")]
    assert run == (
        f"grpo run --run-dir it's here --cluster auto --cluster-nodes 3 address=10.0.0.7:20017 folder={job.parent}"
    )
    pids = [int(pid) for pid in re.findall(r"^ray .*pid=(\d+)$", log, flags=re.MULTILINE)]
    assert len(pids) == 2 and not alive(pids)


def test_the_end_of_the_jobs_time_reaches_the_run(job: Path) -> None:
    stub(job.parent / "programs" / "grpo", PATIENT_GRPO)
    log = job.parent / "log"
    with subprocess.Popen(["bash", str(job)], env=environment(job.parent)) as process:
        wait_for("the run is up", lambda: log.exists() and "grpo is up" in log.read_text().splitlines(), log)
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 7
    assert log.read_text().splitlines()[-1] == "grpo ends"


def test_the_command_writes_the_script_and_starts_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, folder = tmp_path / "job.sbatch", tmp_path / "run"
    words = ["run", "--model-name", "demo", "--weight-bridge-mode", "lora_only", "--run-dir", str(folder)]
    words += ["--slurm", str(path), "--gpus-per-node", "4"]
    monkeypatch.setattr(sys, "argv", ["grpo", *words])
    both = CliRunner().invoke(app, [*words, "--dry-run"])
    assert isinstance(both.exception, ConfigError) and both.exception.field == "--dry-run" and not path.exists()
    done = CliRunner().invoke(app, words, catch_exceptions=False)
    assert done.exit_code == 0 and str(path) in done.stdout and not folder.exists()
    (line,) = [line for line in path.read_text().splitlines() if line.startswith("command=(")]
    typed = shlex.split(line.removeprefix("command=(").removesuffix(")"))
    assert typed == [*words[1:7], "--cluster", "auto", "--cluster-nodes", "1"]
