"""`grpo run --slurm`: the script is sound, and does what it should with stand-ins for Slurm's and Ray's commands."""

from __future__ import annotations

import os
import re
import shlex
import signal
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from grpo_trainer import dry_run
from grpo_trainer.cli import app
from grpo_trainer.config.run import build_run
from grpo_trainer.errors import ConfigError
from grpo_trainer.slurm import Job, command_of, job_script, nodes_of_job
from tests.processes import wait_for

BASE = {"model_name": "demo", "weight_bridge_mode": "lora_only", "run_dir": "runs/a", "cluster": "auto"}
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
    given = {**BASE, **{key.replace("__", "."): value for key, value in flags.items()}}
    return dry_run.write_job(build_run({}, given), path, gpus_per_node, words)


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
    config = build_run({}, {**BASE, "tensor_parallel_size": "4"})
    with pytest.raises(ConfigError) as error:
        nodes_of_job(config, 2)
    assert error.value.field == "--cluster" and "4" in error.value.wanted
    assert len(nodes_of_job(config, 4)) == 2


@pytest.mark.parametrize(
    ("words", "kept"),
    [
        (["--config", "a.toml", "--slurm", "job", "--lr", "1"], ("--config", "a.toml", "--lr", "1")),
        (["--slurm=job", "--gpus-per-node", "4", "--trace"], ("--trace",)),
        (["--cluster", "h:1", "--cluster-nodes=2", "--dry-run", "--json"], ()),
    ],
)
def test_the_job_repeats_the_command(words: list[str], kept: tuple[str, ...]) -> None:
    assert command_of(words) == kept


@pytest.mark.parametrize(
    ("words", "flag"),
    [
        (["--vllm-api-key", "door"], "--vllm-api-key"),
        (["--lr", "1", "--env.rollout_api_key=door"], "--env.rollout_api_key"),
    ],
)
def test_a_key_among_the_arguments_is_refused(words: list[str], flag: str) -> None:
    with pytest.raises(ConfigError) as error:
        command_of(words)
    assert error.value.got == flag and "door" not in str(error.value)


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


def pids_of_ray(log: str) -> list[int]:
    return [int(pid) for pid in re.findall(r"^ray .*pid=(\d+)$", log, flags=re.MULTILINE)]


def runs(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def test_the_script_starts_ray_on_all_nodes_and_the_run_on_the_first(job: Path) -> None:
    # The run waits here until Ray's commands have been called, as the real one waits for its nodes.
    stub(job.parent / "programs" / "grpo", 'until [ "$(grep -c ^ray "$LOG")" -ge 2 ]; do sleep 0.02; done\n' + GRPO)
    done = subprocess.run(["bash", str(job)], env=environment(job.parent), timeout=60, check=False)
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
    assert len(pids_of_ray(log)) == 2 and not [pid for pid in pids_of_ray(log) if runs(pid)]


def test_the_end_of_the_jobs_time_reaches_the_run(job: Path) -> None:
    stub(job.parent / "programs" / "grpo", PATIENT_GRPO)
    log = job.parent / "log"
    with subprocess.Popen(["bash", str(job)], env=environment(job.parent)) as process:
        wait_for("the run is up", lambda: log.exists() and "grpo is up" in log.read_text().splitlines(), log)
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 7
    assert log.read_text().splitlines()[-1] == "grpo ends"


def test_the_command_writes_no_script_with_a_dry_run(tmp_path: Path) -> None:
    path = tmp_path / "job.sbatch"
    words = ["run", "--model-name", "demo", "--weight-bridge-mode", "lora_only", "--dry-run", "--slurm", str(path)]
    done = CliRunner().invoke(app, words)
    assert isinstance(done.exception, ConfigError) and done.exception.field == "--dry-run"
    assert not path.exists()


def test_the_command_writes_the_script_and_starts_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, folder = tmp_path / "job.sbatch", tmp_path / "run"
    words = ["run", "--model-name", "demo", "--weight-bridge-mode", "lora_only", "--run-dir", str(folder)]
    words += ["--slurm", str(path), "--gpus-per-node", "4"]
    monkeypatch.setattr(sys, "argv", ["grpo", *words])
    done = CliRunner().invoke(app, words, catch_exceptions=False)
    assert done.exit_code == 0 and str(path) in done.stdout and not folder.exists()
    (line,) = [line for line in path.read_text().splitlines() if line.startswith("command=(")]
    typed = shlex.split(line.removeprefix("command=(").removesuffix(")"))
    assert typed == [*words[1:7], "--cluster", "auto", "--cluster-nodes", "1"]
