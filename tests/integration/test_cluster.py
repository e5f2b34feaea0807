"""A plan on a Ray cluster of two nodes on this machine, and the job script of `--slurm` under a real Slurm."""

from __future__ import annotations

import importlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from grpo_trainer.errors import ConfigError, PortBusyError, ProcessFailedError, StoppedError
from grpo_trainer.launch import ray_cluster
from grpo_trainer.launch.places import Node, Place, Places
from grpo_trainer.launch.plan import ProcessSpec
from grpo_trainer.launch.ray_cluster import RayCluster
from grpo_trainer.launch.supervisor import SHUTDOWN_SECONDS, Supervisor
from tests.integration.odd_environment import NAME
from tests.processes import ROOT, alive, assert_ended, found_in, free_port, mentioning, once, tail, wait_for
from tests.runs import arguments, of_mode, rows
from tests.unit.factories import refusing
from tests.unit.test_supervisor import CHILD, LAST, SERVER, SLEEPER, STUBBORN, UNTIL, spec

Cluster = pytest.importorskip("ray.cluster_utils").Cluster
pytestmark = pytest.mark.timeout(900)

os.environ |= {"RAY_worker_niceness": "0"}  # or what Ray starts would wait for every other test

UNWATCHED = {"include_dashboard": False, "include_log_monitor": False}
"""Arguments of a head without the processes that show a cluster to people."""


@pytest.fixture(scope="module")
def nodes() -> Iterator[Any]:
    """Two raylets: the head with a core and a GPU, another with two cores and two GPUs. The GPUs are numbers only."""
    before = signal.getsignal(signal.SIGTERM)
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "num_gpus": 1, **UNWATCHED})
    cluster.add_node(num_cpus=2, num_gpus=2)
    yield cluster
    cluster.shutdown()
    signal.signal(signal.SIGTERM, before)  # Ray leaves its own, which processes that are forked here would have


@pytest.fixture
def cluster(nodes: Any) -> Iterator[RayCluster]:
    joined = RayCluster(nodes.address, 2)
    yield joined
    joined.close()


def occupied(cluster: RayCluster, gpus: tuple[int, ...] = ()) -> tuple[Place, Place]:
    """A place on the head and one on the other node, which are this run's now."""
    head, other = cluster.nodes[0], cluster.nodes[1]
    here, there = Place(head), Place(other, gpus)
    cluster.occupy({"trainer": here, "server": there, "server-2": Place(other, (0, 1) if gpus else ())})
    return here, there


def supervisor(cluster: RayCluster, folder: Path, said: list[str] | None = None) -> Supervisor:
    lines = [] if said is None else said
    return Supervisor(folder, lines.append, lines.append, start=partial(cluster.start, {}))


def at(place: Place, name: str, code: str, *arguments: str, **options: Any) -> ProcessSpec:
    return replace(spec(name, code, *arguments, **options), place=place)


def pid_in(log: Path, word: str) -> int:
    """The process id that a process wrote after a word."""
    pattern = rf"^{word} (\d+)$"
    wait_for(word, lambda: found_in(log, pattern) is not None, log)
    match = found_in(log, pattern)
    assert match is not None
    return int(match[1])


PID = "import os; print('pid', os.getpid(), flush=True)\n"


def test_a_run_over_two_nodes_comes_to_its_end_and_leaves_nothing(cluster: RayCluster, tmp_path: Path) -> None:
    here, there = occupied(cluster)
    port, said = free_port(), list[str]()
    server = at(there, "server", PID + SERVER, str(port), ready_url=f"http://127.0.0.1:{port}/")
    check = f"""
        import pathlib, time, urllib.request
        print("Step 1", urllib.request.urlopen("http://127.0.0.1:{port}/").status)
        env = pathlib.Path({str(tmp_path / "env.log")!r})
        while not env.exists() or "asleep" not in env.read_text().splitlines():
            time.sleep(0.05)
    """
    with supervisor(cluster, tmp_path, said) as running:
        running.run([[server], [at(here, "trainer", check, ends_run=True), at(there, "env", PID + SLEEPER)]])
    assert "Step 1 200" in said
    logs = [(tmp_path / f"{name}.log").read_text() for name in ("server", "trainer", "env")]
    assert all(log.startswith("$ ") for log in logs) and "server up" in logs[0] and "asleep" in logs[2]
    assert_ended([pid_in(tmp_path / f"{name}.log", "pid") for name in ("server", "env")])


def test_ray_process_that_fails(cluster: RayCluster, tmp_path: Path) -> None:
    here, there = occupied(cluster)
    for python, code, got, fix in (
        (sys.executable, f"import sys; print({LAST!r}, file=sys.stderr); sys.exit(3)", "exit code 3", LAST),
        (sys.executable, "import os; os.kill(os.getpid(), 9)", "SIGKILL", "server.log"),
        ("/nowhere/python", "", "", "/nowhere/python"),
    ):
        failing = replace(at(there, "server", code), argv=(python, "-c", code))
        with refusing(ProcessFailedError, "server", words=[got, fix]), supervisor(cluster, tmp_path) as running:
            running.run([[at(here, "trainer", SLEEPER, ends_run=True), failing]])


def test_a_signal_ends_every_process_on_every_node(cluster: RayCluster, tmp_path: Path) -> None:
    here, there = occupied(cluster)
    stubborn = [at(place, f"trainer{n}", PID + STUBBORN, stop_seconds=0.5) for n, place in enumerate((here, there))]
    logs = [tmp_path / f"trainer{n}.log" for n in range(2)]
    interrupt = partial(os.kill, os.getpid(), signal.SIGINT)
    with (
        once(lambda: all(found_in(log, CHILD) for log in logs), interrupt) as sent,
        pytest.raises(StoppedError),
        supervisor(cluster, tmp_path) as running,
    ):
        running.run([stubborn])
    assert time.monotonic() - sent[0] < SHUTDOWN_SECONDS + 1.0  # what is promised to users, not a benchmark
    assert_ended([pid_in(log, word) for log in logs for word in ("pid", "child")])


def test_processes_on_other_nodes_end_when_the_command_is_killed(nodes: Any, tmp_path: Path) -> None:
    """The command is this module."""
    words = [sys.executable, "-m", "tests.integration.test_cluster", nodes.address, str(tmp_path)]
    with subprocess.Popen(words, cwd=ROOT) as command:
        pid = pid_in(tmp_path / "server.log", "pid")
        assert alive([pid])
        command.kill()
    wait_for("the process ends", lambda: not alive([pid]), tmp_path / "server.log")


def test_processes_see_the_gpus_of_their_place(cluster: RayCluster, tmp_path: Path) -> None:
    head, other = cluster.nodes
    cluster.occupy({"trainer": Place(head, (0,)), "server": Place(other, (0,)), "server-2": Place(other, (1,))})
    shows = "import os; print('gpu', os.environ['CUDA_VISIBLE_DEVICES'])"
    servers = ("server", "server-2")
    shown = "\n".join(f"until({str(tmp_path / name)!r} + '.log', '\\ngpu ')" for name in servers)
    last = at(Place(head, (0,)), "trainer", f"{UNTIL}{shown}\n{shows}", ends_run=True)
    others = [at(Place(other, (n,)), name, shows, may_end=True) for n, name in enumerate(servers)]
    with supervisor(cluster, tmp_path) as running:
        running.run([[*others, last]])
    assert [pid_in(tmp_path / f"{name}.log", "gpu") for name in ("trainer", *servers)] == [0, 0, 1]


def test_a_busy_port_of_another_node_is_refused(cluster: RayCluster) -> None:
    here, there = occupied(cluster)
    places: Places = {"trainer": here, "server": there}
    with socket.socket() as holder:
        holder.bind((there.address, 0))
        holder.listen()
        port = holder.getsockname()[1]
        with pytest.raises(PortBusyError) as error:
            cluster.claim({"api": 0, "server": port}, places)
        assert str(port) in str(error.value)
    claimed = cluster.claim({"api": 0, "server": port}, places)
    assert claimed["server"] == port and claimed["api"]


class Holder:
    """An actor of another run."""

    def holds(self) -> bool:
        return True


def held(node: Node, gpus: int) -> Any:
    """An actor of another run that has some of a node's GPUs."""
    ray = pytest.importorskip("ray")
    strategies = importlib.import_module("ray.util.scheduling_strategies")
    on_node = strategies.NodeAffinitySchedulingStrategy(node.id, soft=False)
    holder = ray.remote(Holder).options(num_gpus=gpus, num_cpus=0, scheduling_strategy=on_node).remote()
    assert ray.get(holder.holds.remote())
    return holder


def test_ray_gpus_of_another_run(nodes: Any, cluster: RayCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    other = cluster.nodes[1]
    holder = held(other, 2)
    monkeypatch.setattr(ray_cluster, "ROOM_SECONDS", 2.0)
    with refusing(ConfigError, "--cluster", got=other.name):
        cluster.occupy({"server": Place(other, (0,))})
    del holder  # Ray ends it


def test_ray_room_for_later(nodes: Any, cluster: RayCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another run holds the emptier node's GPUs, so that Ray gives no room there, and later one of them."""
    head, other = cluster.nodes

    def given() -> Place:
        found: list[Place] = []

        def asked() -> bool:
            found.extend(filter(None, [cluster.room_for("server-3", 1, ())]))
            return bool(found)

        wait_for("room", asked, tmp_path / "no log")
        return found[0]

    holder = held(other, 2)
    assert cluster.room_for("server-3", 1, ()) is None
    del holder  # Ray ends it
    there = given()
    assert (there.node, there.gpus) == (other, (0,))
    assert alive([cluster.start({}, at(there, "server-3", SLEEPER), tmp_path / "log", print).pid])

    holder = held(other, 1)
    with monkeypatch.context() as patched:
        patched.setattr(ray_cluster, "ROOM_SECONDS", 0.0)
        assert cluster.room_for("server-3", 1, ()) is None
        assert cluster.room_for("server-3", 1, ()) is None, "the node is given up"
    assert given().node == head
    del holder


def test_a_cluster_without_enough_nodes_or_without_an_answer(nodes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_cluster, "NODES_SECONDS", 0.5)
    monkeypatch.setattr(ray_cluster, "CONNECT_SECONDS", 0.1)
    with refusing(ConfigError, "--cluster-nodes", wanted="9"):
        RayCluster(nodes.address, 9)
    address = f"127.0.0.1:{free_port()}"
    with refusing(ConfigError, "--cluster", got=address):
        RayCluster(address)


def test_a_node_that_is_lost_ends_the_run(nodes: Any, tmp_path: Path) -> None:
    """The last test of the cluster: Ray may still count the node as alive."""
    third = nodes.add_node(num_cpus=1)
    cluster = RayCluster(nodes.address, 3)
    try:
        (node,) = [node for node in cluster.nodes if node.id == third.node_id]
        cluster.occupy({"trainer": Place(cluster.nodes[0]), "server": Place(node)})
        with (
            once(
                lambda: found_in(tmp_path / "server.log", "^asleep$") is not None,
                partial(nodes.remove_node, third, allow_graceful=False),
            ),
            pytest.raises(ProcessFailedError) as error,
            supervisor(cluster, tmp_path) as running,
        ):
            trainer = at(Place(cluster.nodes[0]), "trainer", SLEEPER, ends_run=True)
            running.run([[at(Place(node), "server", PID + SLEEPER), trainer]])
    finally:
        cluster.close()
    assert error.value.field == "server" and node.name in error.value.got and "asleep" in error.value.fix
    wait_for("the process ends", lambda: not alive([pid_in(tmp_path / "server.log", "pid")]), tmp_path / "server.log")


# Slurm: its daemons run here, with two nodes on this machine ------------------------------------------------------

MISSING = [name for name in ("munged", "slurmctld", "slurmd", "sbatch") if shutil.which(name) is None]
needs_slurm = pytest.mark.skipif(
    bool(MISSING) or os.geteuid() != 0, reason="needs root, and: apt-get install slurmctld slurmd munge"
)

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
    options |= {"env": NAME, "env--group-size": 8}
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


@needs_slurm
def test_slurm_takes_the_script_and_the_job_runs_over_two_nodes(demo_model: Path, tmp_path: Path, slurm: Path) -> None:
    script, log = job_script(demo_model, tmp_path, 8), tmp_path / "log"
    tested = subprocess.run(["sbatch", "--test-only", str(script)], capture_output=True, text=True, check=True)
    assert "n[1-2]" in tested.stderr
    assert ended(submitted(script), log) == "COMPLETED 0:0", tail(log)
    assert [row["step"] for row in rows(tmp_path / "run")] == list(range(1, 9))
    for server in ("server", "server-2"):
        assert "POST /generate" in (tmp_path / "run" / "logs" / f"{server}.log").read_text()
    wait_for("its processes have ended", lambda: not mentioning(str(tmp_path)), log)


@needs_slurm
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


if __name__ == "__main__":
    joined = RayCluster(sys.argv[1], 2)
    _, there = occupied(joined)
    with supervisor(joined, Path(sys.argv[2])) as running:
        running.run([[at(there, "server", PID + SLEEPER)]])
