"""The job script of `grpo run --slurm` under a real Slurm: its daemons run here, with two nodes on this machine.

apt-get install slurmctld slurmd munge
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.processes import ROOT, free_port, mentioning, tail, wait_for
from tests.runs import arguments, of_mode, rows

pytest.importorskip("ray")
MISSING = [name for name in ("munged", "slurmctld", "slurmd", "sbatch") if shutil.which(name) is None]
pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.skipif(bool(MISSING), reason=f"no {', '.join(MISSING)}: apt-get install slurmctld slurmd munge"),
    pytest.mark.skipif(os.geteuid() != 0, reason="slurmd must be root"),
]

SLURM = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={first} CPUs={cores} RealMemory=1000
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={second} CPUs={cores} RealMemory=1000
PartitionName=main Nodes=n[1-2] Default=YES State=UP
"""


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A Slurm of two nodes, which `SLURM_CONF` names."""
    folder, cores = tmp_path_factory.mktemp("slurm"), os.cpu_count()
    for private in (folder, *folder.parents[:2]):  # munged refuses a socket in a folder that others can't enter
        private.chmod(0o755)
    (folder / "state").mkdir()
    (folder / "key").write_bytes(os.urandom(1024))
    (folder / "key").chmod(0o600)
    host, (port, first, second) = socket.gethostname(), (free_port() for _ in range(3))
    config, log = folder / "slurm.conf", folder / "daemons.log"
    config.write_text(
        SLURM.format(host=host, port=port, first=first, second=second, cores=cores, folder=folder).lstrip()
    )
    munge = [f"--{name}-file={folder / name}" for name in ("key", "pid", "log", "seed")]
    daemons = [
        ["munged", "--force", "--foreground", f"--socket={folder / 'munge.sock'}", *munge],
        ["slurmctld", "-D"],
        ["slurmd", "-D", "-N", "n1"],
        ["slurmd", "-D", "-N", "n2"],
    ]
    with pytest.MonkeyPatch.context() as patched, ExitStack() as running, log.open("wb") as output:
        patched.setenv("SLURM_CONF", str(config))
        for command in daemons:
            daemon = subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True)
            running.callback(daemon.wait, 30)
            running.callback(daemon.terminate)
            if command[0] == "munged":
                wait_for("munge", (folder / "munge.sock").exists, log)
        wait_for("two idle nodes", lambda: slurm_says("sinfo", "-h", "-t", "idle", "-o", "%D").strip() == "2", log)
        yield folder


def slurm_says(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60).stdout


def job_script(model: Path, folder: Path, steps: int) -> Path:
    """The script of a run with two servers on two nodes, which `grpo run --slurm` has written."""
    script = folder / "job.sbatch"
    options = of_mode("lora_only", **{"training-steps": steps, "server.replicas": 2, "cluster-nodes": 2})
    options |= {"env": "tests.integration.paced_environment", "env--group-size": 8}
    words = arguments(model, folder / "run", **options, slurm=script, **{"gpus-per-node": 0})
    subprocess.run([sys.executable, *words], cwd=ROOT, check=True, timeout=120, stdout=subprocess.DEVNULL)
    return script


def submitted(script: Path) -> int:
    """Submit a job, and return its number."""
    folder = script.parent
    done = subprocess.run(
        ["sbatch", "--parsable", f"--output={folder / 'log'}", str(script)],
        cwd=folder, capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip
    return int(done.stdout)


def ended(job: int, log: Path) -> str:
    """Wait for a job's end, and return its state and exit code."""
    wait_for("the job is over", lambda: not slurm_says("squeue", "-h", "-j", str(job)).strip(), log, 600)
    (state,) = slurm_says("scontrol", "-o", "show", "job", str(job)).splitlines()
    fields = dict(word.split("=", 1) for word in state.split() if "=" in word)
    return f"{fields['JobState']} {fields['ExitCode']}"


def test_slurm_takes_the_script_and_the_job_runs_over_two_nodes(demo_model: Path, tmp_path: Path, slurm: Path) -> None:
    script, log = job_script(demo_model, tmp_path, 8), tmp_path / "log"
    tested = subprocess.run(["sbatch", "--test-only", str(script)], capture_output=True, text=True, check=True)
    assert "n[1-2]" in tested.stderr
    assert ended(submitted(script), log) == "COMPLETED 0:0", tail(log)
    assert [row["step"] for row in rows(tmp_path / "run")] == list(range(1, 9))
    for server in ("server", "server-2"):
        assert "POST /generate" in (tmp_path / "run" / "logs" / f"{server}.log").read_text()
    wait_for("its processes have ended", lambda: not mentioning(str(tmp_path)), log)


def test_before_the_time_limit_the_run_saves_a_checkpoint(demo_model: Path, tmp_path: Path, slurm: Path) -> None:
    """`scancel --batch --signal` sends what `#SBATCH --signal=B:TERM@…` asks for."""
    script, log = job_script(demo_model, tmp_path, 2000), tmp_path / "log"
    job = submitted(script)
    wait_for("step 3", lambda: len(rows(tmp_path / "run")) >= 3, log, 600)
    subprocess.run(["scancel", "--batch", "--signal=TERM", str(job)], check=True, timeout=60)
    assert ended(job, log).startswith("FAILED"), tail(log)
    said = log.read_text()
    assert "stopped by SIGTERM" in said and "--resume" in said
    last = rows(tmp_path / "run")[-1]["step"]
    assert (tmp_path / "run" / "checkpoints" / f"adapter_step_{last}").is_dir()
    wait_for("its processes have ended", lambda: not mentioning(str(tmp_path)), log)
