"""`grpo run` in the modes that relaunch the server, with a real vLLM: what is killed, stopped or refused in them."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes import alive, family, wait_for
from tests.runs import finished, member, of_mode, started, wait_for_step

pytestmark = pytest.mark.timeout(900)


def server_of(run_dir: Path, trainer: int) -> tuple[int, dict[int, str]]:
    """The server's process and all of its family."""
    (server,) = [pid for pid, command in family(trainer).items() if "-m vllm_server --model" in command]
    return server, {server: "server", **family(server)}


@pytest.mark.parametrize("victim", ["server", "trainer"])
def test_a_killed_server_or_trainer_ends_the_run_and_leaves_nothing(
    demo_model: Path, tmp_path: Path, victim: str
) -> None:
    run_dir, log = tmp_path / "run", tmp_path / "log"
    more = {"training-steps": 500, "vllm-restart-interval": 400, "max-restarts": 0}
    with started(demo_model, run_dir, log, **of_mode("lora_restart", **more)) as process:
        wait_for_step(run_dir, 1, process, log)
        trainer = member(process, "grpo_trainer train")
        server, servers = server_of(run_dir, trainer)
        members = family(process.pid)
        os.kill(server if victim == "server" else trainer, signal.SIGKILL)
        assert finished(process, log, 60) == 1
    said = log.read_text()
    assert re.search(rf"{victim}: .*SIGKILL", said, re.IGNORECASE)
    if victim == "server":
        assert str(run_dir / "logs" / "server.log") in said
        assert re.search(r"step \d+.*/adapter_step_\d+.*--resume auto", said)
    wait_for("all have ended", lambda: not alive([*members, *servers]), log, 20)


def test_ctrl_c_during_a_relaunch_ends_all_and_keeps_the_run(demo_model: Path, tmp_path: Path) -> None:
    run_dir, log = tmp_path / "run", tmp_path / "log"
    more = {"training-steps": 500, "checkpoint-interval": 0}
    with started(demo_model, run_dir, log, **of_mode("none", **more)) as process:
        wait_for_step(run_dir, 1, process, log)
        server_log = run_dir / "logs" / "server.log"
        wait_for("the relaunch", lambda: "--policy-version 2" in server_log.read_text(), log, 60)
        members = family(process.pid)
        process.send_signal(signal.SIGINT)
        assert finished(process, log, 30) == 130
    assert not alive(list(members)), members
    assert (run_dir / "checkpoints" / "step_2" / "state.json").exists()


def test_a_server_that_does_not_start_ends_the_run_with_its_own_words(demo_model: Path, tmp_path: Path) -> None:
    run_dir, log = tmp_path / "run", tmp_path / "log"
    more = {"server.extra-args": "--kv-cache-memory-bytes,1"}
    with started(demo_model, run_dir, log, **of_mode("none", **more)) as process:
        assert finished(process, log, 200) == 1
    said = log.read_text()
    assert re.search(r"server: .*exit code 1", said, re.IGNORECASE) and str(run_dir / "logs" / "server.log") in said
    assert "Error: " in said  # the server's own reason


def test_train_alone_refuses_a_busy_port_before_it_starts_anything(demo_model: Path, tmp_path: Path) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        words = ["-m", "grpo_trainer", "train", "--model", str(demo_model), "--weight-bridge-mode", "none"]
        words += ["--vllm-port", str(port), "--save-path", str(tmp_path / "run")]
        done = subprocess.run([sys.executable, *words], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 2
    line = done.stderr.splitlines()[-1]
    assert line.startswith("grpo: --server.port: ") and f"got {port}, " in line and f"pid {os.getpid()} " in line
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "run" / "logs").exists()
