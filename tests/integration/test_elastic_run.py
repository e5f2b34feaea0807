"""Real runs whose servers leave and join, and whose processes are killed: each run ends by itself with all its steps.

Twenty random kills: GRPO_KILLS=20 python -m pytest tests/integration/test_elastic_run.py -k come_back
"""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil
import pytest

from environments.api.queue import Group, Run
from environments.api.store import Store
from grpo_common.roster import Member, in_use, read_members
from tests.integration.odd_environment import FAST, NAME
from tests.processes import ROOT, tail, wait_for
from tests.runs import assert_fresh, finished, newest, of_mode, rows, started, wait_for_step

pytestmark = pytest.mark.timeout(900)

GROUPS = 4
MODULES = {"api": "environments.api", "env": "odd_environment serve", "trainer": "grpo_trainer train"}
"""What the command line of a process has."""


class ElasticRun:
    """A running `grpo run`.

    Args:
        process: its supervisor.
    """

    def __init__(self, process: subprocess.Popen[bytes], run_dir: Path, log: Path) -> None:
        self.process, self.run_dir, self.log = process, run_dir, log
        self.servers = run_dir / "servers"

    @property
    def step(self) -> int:
        return max((row["step"] for row in rows(self.run_dir)), default=0)

    def wait(self, what: str, done: Callable[[], bool], seconds: float = 600) -> None:
        """Wait until a condition holds, while the run continues."""
        wait_for(what, lambda: done() or self.process.poll() is not None, self.log, seconds, every=0.5)
        assert self.process.poll() is None, f"the run is over before: {what}\n{tail(self.log)}"

    def steps(self, more: int) -> None:
        """Wait until some more steps are trained."""
        wanted = self.step + more
        self.wait(f"step {wanted}", lambda: self.step >= wanted)

    def member(self, url: str) -> Member | None:
        return next((member for member in read_members(self.servers) if member.url == url), None)

    def serving(self) -> dict[str, int]:
        """The boots of the servers that environments ask, by their URLs."""
        return in_use(self.servers)

    def pids(self, words: str) -> list[int]:
        """The processes whose command lines have these words."""
        found = []
        for process in psutil.process_iter(["cmdline", "status"]):
            line = " ".join(process.info["cmdline"] or [])
            of_the_run = str(self.run_dir) in line or "vllm_server" in line
            if words in line and of_the_run and process.info["status"] != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
        return found

    def pid(self, name: str) -> int:
        """Of the API, the environment or the trainer, by a key of MODULES."""
        return self.pids(MODULES[name])[0]

    def server_pid(self, url: str) -> int:
        """Of the server that listens at a URL."""
        return self.pids(f"--port {url.rpartition(':')[2]} ")[0]

    def hurry(self) -> None:
        """Have the rest of the run take as little time as it can (`odd_environment`)."""
        (self.run_dir / FAST).touch()

    def kill(self, pid: int) -> None:
        os.kill(pid, signal.SIGKILL)

    def kill_one(self, victim: str, draw: random.Random) -> None:
        """Kill a server, an environment or the API, and wait until the run has recovered.

        Of two servers, the next one may be killed while the first is still restarting.

        Args:
            victim: "server", "env" or "api".
        """
        if victim == "server":
            url = draw.choice(sorted(self.serving()))
            boot = self.serving()[url]
            self.kill(self.server_pid(url))
            self.wait("it has left", lambda: self.serving().get(url) != boot)
            if draw.random() < 0.5:
                self.wait("it serves again", lambda: self.serving().get(url, 0) > boot)
        else:
            there = self.pids(MODULES[victim])
            self.kill(lost := draw.choice(there))
            self.wait(f"{victim} is back", lambda: len({*self.pids(MODULES[victim])} - {lost}) == len(there))
        self.steps(1)
        self.wait("a server serves", lambda: bool(self.serving()))

    def servers_command(self, *words: str) -> str:
        """What `grpo servers` prints."""
        command = [sys.executable, "-m", "grpo_trainer", "servers", *words, "--run-dir", str(self.run_dir)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=120)
        assert done.returncode == 0, done.stderr
        return done.stdout


def assert_every_group_counted_once(run_dir: Path, steps: int, groups_per_step: int) -> None:
    """All steps are done, and each group that the API accepted was trained on once, was dropped, or is still there."""
    done = rows(run_dir)
    assert [row["step"] for row in done] == list(range(1, steps + 1))
    with closing(Store(run_dir / "queue.sqlite")) as store:
        (run,) = store.table("run", Run).values()
        left = {**store.table("group", Group), **store.table("buffered", Group)}
    accepted = max([run.next_group, *(group.id + 1 for group in left.values())])
    dropped = sum(row.get("rollout/dropped_stale_groups", 0) + row.get("rollout/refused_groups", 0) for row in done)
    assert accepted == steps * groups_per_step + dropped + len(left)


def assert_environments_kept_their_names(run_dir: Path, environments: int) -> None:
    """Each environment that was killed and started again registered as the one that it was."""
    found = re.findall(r"environment (\d+) registered", (run_dir / "logs" / "api.log").read_text())
    assert set(found) == set(map(str, range(environments)))


def options(mode: str, steps: int, **others: Any) -> dict[str, Any]:
    """A step has four groups of eight. It takes about three seconds until the test lets the run go faster."""
    paced = {"env": NAME, "no-try": True, "env--group-size": 8, "checkpoint-interval": 5}
    return of_mode(mode, **{"training-steps": steps, "server.replicas": 2, **paced, **others})


def test_servers_and_trainer_leave_and_come_back(demo_model: Path, tmp_path: Path) -> None:
    """At the end any of them is killed at random, each as soon as the one before has recovered; the API for certain."""
    run_dir, log, draw = tmp_path / "run", tmp_path / "log", random.Random(23)
    kills = int(os.environ.get("GRPO_KILLS", "3"))
    steps = 30 + 10 * kills
    with started(demo_model, run_dir, log, **options("lora_only", steps, **{"max-restarts": 20})) as process:
        wait_for_step(run_dir, 2, process, log)
        run = ElasticRun(process, run_dir, log)
        first, second = sorted(run.serving())
        assert (run_dir / "logs" / "trainer.log").read_text().count("bridge proved") == 2

        run.kill(run.server_pid(second))
        run.wait("the killed server has left", lambda: list(run.serving()) == [first], 30)
        run.steps(3)  # one server is left, and the run continues
        run.wait("it is back", lambda: run.serving() == {first: 1, second: 2})

        run.wait("a checkpoint to restart from", lambda: newest(run_dir) > 0)
        run.kill(run.pid("trainer"))
        run.wait("the trainer has restarted", lambda: "--resume auto" in run.log.read_text() or bool(run.pids("auto")))
        before = run.step
        run.wait("it trains", lambda: run.step > before)

        assert "leaves" in run.servers_command("drop", first)
        run.wait("the dropped server has left", lambda: run.member(first) is None, 60)
        assert list(run.serving()) == [second]
        assert "starts" in run.servers_command("add")
        run.wait("the new one serves", lambda: len(run.serving()) == 2)
        assert first not in run.serving()
        assert "server-3" in run.servers_command()

        run.kill_one("api", draw)
        for _ in range(kills):
            run.kill_one(draw.choice(["server", "env", "api"]), draw)
        run.hurry()
        assert finished(process, log, 1200) == 0, tail(log)
    assert_every_group_counted_once(run_dir, steps, GROUPS)
    assert_environments_kept_their_names(run_dir, 1)
    assert {row["publish/servers"] for row in rows(run_dir)} >= {1, 2}
    assert_fresh(rows(run_dir))
    for name in ("server", "server-2", "server-3"):
        said = (run_dir / "logs" / f"{name}.log").read_text()
        assert "POST /generate" in said and "POST /lora/load" in said


def test_broadcast_goes_on_without_a_server(demo_model: Path, tmp_path: Path) -> None:
    """The first server is killed, and its successor joins.

    The second one is stopped, so that it still accepts connections; when it runs again, it is used again. A trainer
    that restarts does not wait for it either: it would wait for --server.startup-timeout.
    """
    run_dir, log, steps = tmp_path / "run", tmp_path / "log", 60
    with started(demo_model, run_dir, log, **options("broadcast", steps, **{"vllm-timeout": 5000})) as process:
        wait_for_step(run_dir, 2, process, log)
        run = ElasticRun(process, run_dir, log)
        first, second = sorted(run.serving())
        run.kill(run.server_pid(first))
        run.wait("the killed server has left", lambda: list(run.serving()) == [second], 30)
        run.steps(2)
        run.wait("it is back", lambda: run.serving() == {first: 2, second: 1})

        os.kill(run.server_pid(second), signal.SIGSTOP)
        run.wait("the silent server has left", lambda: list(run.serving()) == [first], 300)
        run.steps(3)
        run.wait("a checkpoint to restart from", lambda: newest(run_dir) > 0)
        run.kill(run.pid("trainer"))
        run.steps(3)
        os.kill(run.server_pid(second), signal.SIGCONT)
        run.wait("it is back, as the same process", lambda: run.serving() == {first: 2, second: 1})
        run.hurry()
        assert finished(process, log, 600) == 0, tail(log)
    assert_every_group_counted_once(run_dir, steps, GROUPS)
    assert_fresh(rows(run_dir))
    assert "ReadTimeout" in (run_dir / "logs" / "trainer.log").read_text()
