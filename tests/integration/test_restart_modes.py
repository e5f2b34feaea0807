"""`grpo run` in the modes that relaunch the server, with a real vLLM: it learns from new versions, and goes on."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.integration.test_run import finished, member, rows, started, wait_for_step
from tests.processes import alive, family, tail, wait_for

pytestmark = pytest.mark.timeout(900)

OPTIONS: dict[str, dict[str, Any]] = {
    "lora_restart": {"lr": 1e-3, "lora-r": 8},
    "none": {"lr": 1e-4},
}
FINAL = {"lora_restart": "adapter_final", "none": "model_final"}
MODES = pytest.mark.parametrize("mode", list(OPTIONS))


def options(mode: str, **others: object) -> dict[str, object]:
    return {
        "weight-bridge-mode": mode,
        "vllm-restart-interval": 2,
        "server.extra-args": f"--kv-cache-memory-bytes,{64 << 20}",
        "lora-r": None,
        **OPTIONS[mode],
        **others,
    }


def server_of(run_dir: Path, trainer: int) -> tuple[int, dict[int, str]]:
    """The server's process and all of its family."""
    (server,) = [pid for pid, command in family(trainer).items() if "-m vllm_server --model" in command]
    return server, {server: "server", **family(server)}


@MODES
def test_versions_advance_with_each_relaunch_and_a_run_goes_on_after_its_end(
    demo_model: Path, tmp_path: Path, mode: str
) -> None:
    run_dir, log = tmp_path / "run", tmp_path / "log"
    before = {file.name: file.read_bytes() for file in demo_model.iterdir()}
    with started(demo_model, run_dir, log, **options(mode, **{"training-steps": 3})) as process:
        wait_for_step(run_dir, 1, process, log)
        members = family(process.pid)
        assert finished(process, log, 400) == 0, tail(log)
    assert not alive(list(members)), members
    done = rows(run_dir)
    assert [row["publish/served_version"] for row in done] == [0, 2, 2]
    assert [row["publish/version"] for row in done] == [1, 2, 3]
    assert [row["step"] for row in done if "publish/start_time" in row] == [2]
    for row in done:
        if row["rollout/staleness_max"] == 0:  # same weights, same logprobs
            assert row["alignment/logprob_diff_max"] < 1e-3
    said = (run_dir / "logs" / "trainer.log").read_text()
    assert re.findall(r"bridge proved: the server on version (\d+)", said) == ["0", "2"]
    assert (run_dir / "logs" / "server.log").read_text().count("-m vllm_server.standby") == 1, (
        "for version 2, none after"
    )
    assert "from scratch" not in said and any("-m vllm_server.standby" in command for command in members.values())
    assert "Step 3/3" in log.read_text()
    assert {file.name: file.read_bytes() for file in demo_model.iterdir()} == before

    with started(demo_model, run_dir, log, **options(mode, **{"training-steps": 5, "resume": "auto"})) as process:
        assert finished(process, log, 400) == 0, tail(log)
    done = rows(run_dir)
    assert [row["step"] for row in done] == list(range(1, 6))
    assert [row["publish/served_version"] for row in done[3:]] == [4, 4]
    # the batch of step 5 was sampled by version 4 - staleness: by one that a relaunch brought
    assert 4 - done[-1]["rollout/staleness_max"] >= 2
    said = (run_dir / "logs" / "trainer.log").read_text()
    assert re.findall(r"bridge proved: the server on version (\d+)", said) == ["0", "2", "3", "4"]
    assert not list((run_dir / "checkpoints").glob(".*")), "remains of a write"
    check_final(run_dir / "checkpoints" / FINAL[mode], demo_model, mode)


def check_final(final: Path, base: Path, mode: str) -> None:
    """What a run leaves is what others load, and not what it started from."""
    if mode == "lora_restart":
        state = load_file(final / "adapter_model.safetensors")
        assert any(tensor.any() for name, tensor in state.items() if "lora_B" in name)
        return
    trained, started_from = (AutoModelForCausalLM.from_pretrained(folder) for folder in (final, base))
    pairs = zip(trained.parameters(), started_from.parameters(), strict=True)
    assert not any(torch.equal(new, old) for new, old in pairs), "every weight is trained"


@pytest.mark.parametrize(
    ("victim", "said"), [("server", "server was killed by SIGKILL"), ("trainer", "trainer was killed by SIGKILL")]
)
def test_a_killed_server_or_trainer_ends_the_run_and_leaves_nothing(
    demo_model: Path, tmp_path: Path, victim: str, said: str
) -> None:
    run_dir, log = tmp_path / "run", tmp_path / "log"
    more = {"training-steps": 500, "vllm-restart-interval": 400}
    with started(demo_model, run_dir, log, **options("lora_restart", **more)) as process:
        wait_for_step(run_dir, 1, process, log)
        trainer = member(process, "grpo_trainer train")
        server, servers = server_of(run_dir, trainer)
        members = family(process.pid)
        os.kill(server if victim == "server" else trainer, signal.SIGKILL)
        assert finished(process, log, 60) == 1
    told = log.read_text()
    assert said in told
    if victim == "server":
        assert str(run_dir / "logs" / "server.log") in told
        assert re.search(r"Stopped at step \d+; saved .*/adapter_step_\d+, go on with --resume auto", told)
    wait_for("all have ended", lambda: not alive([*members, *servers]), log, 20)


def test_ctrl_c_during_a_relaunch_ends_all_and_keeps_the_run(demo_model: Path, tmp_path: Path) -> None:
    run_dir, log = tmp_path / "run", tmp_path / "log"
    more = {"training-steps": 500, "checkpoint-interval": 0}
    with started(demo_model, run_dir, log, **options("none", **more)) as process:
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
    with started(demo_model, run_dir, log, **options("none", **more)) as process:
        assert finished(process, log, 200) == 1
    told = log.read_text()
    assert "server ended with exit code" in told and str(run_dir / "logs" / "server.log") in told
    assert "Error: " in told  # the server's own reason


def test_train_alone_refuses_a_busy_port_before_it_starts_anything(demo_model: Path, tmp_path: Path) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        words = ["-m", "grpo_trainer", "train", "--model", str(demo_model), "--weight-bridge-mode", "none"]
        words += ["--vllm-port", str(port), "--save-path", str(tmp_path / "run")]
        done = subprocess.run([sys.executable, *words], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 2
    assert f"--vllm-port {port}: busy, held by pid {os.getpid()}" in done.stderr and "Traceback" not in done.stderr
    assert not (tmp_path / "run" / "logs").exists()
