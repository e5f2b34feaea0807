"""Under a run a process is killed, something is deleted, or an environment goes wrong: one message, nothing left."""

from __future__ import annotations

import os
import re
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from grpo_common.status import BURST
from tests.integration.odd_environment import NAME
from tests.processes import family, found_in, tail, wait_for
from tests.runs import (
    assert_ended_with,
    family_until_the_end,
    finished,
    jsonl,
    newest,
    of_mode,
    rows,
    started,
    trained,
    wait_for_step,
)

pytestmark = pytest.mark.timeout(900)

LONG = {"training_steps": 500, "checkpoint_interval": 1000, "max_restarts": 0}


@pytest.mark.parametrize(
    ("mode", "victim"),
    [("lora_only", "trainer-1"), ("lora_restart", "server"), ("lora_restart", "trainer")],
)
def test_a_killed_process_ends_the_run_by_name(demo_model: Path, tmp_path: Path, mode: str, victim: str) -> None:
    """In `lora_restart` the server is the trainer's child."""
    run_dir, log = tmp_path / "run", tmp_path / "log"
    interval = {"vllm-restart-interval": 400} if mode == "lora_restart" else {}
    own = {**LONG, **interval, "trainer-gpus": 2 if victim == "trainer-1" else 1}
    with started(demo_model, run_dir, log, **of_mode(mode, **own)) as process:
        wait_for_step(run_dir, 1, process, log)
        members = family(process.pid)
        module = "-m vllm_server --model" if victim == "server" else "-m grpo_trainer train"
        of_module = [psutil.Process(pid) for pid, command in members.items() if module in command]
        max(of_module, key=lambda each: (each.create_time(), each.pid)).kill()
        assert finished(process, log, 60) == 1
    assert_ended_with(log, rf"{victim}: .*SIGKILL", members, run_dir)
    if victim == "server":
        assert str(run_dir / "logs" / "server.log") in log.read_text()
        assert re.search(r"step \d+.*/adapter_step_\d+.*--resume auto", log.read_text())


def test_ctrl_c_during_a_relaunch_ends_all_and_keeps_the_run(demo_model: Path, tmp_path: Path) -> None:
    run_dir, log = tmp_path / "run", tmp_path / "log"
    with started(demo_model, run_dir, log, **of_mode("none", **{**LONG, "checkpoint_interval": 0})) as process:
        wait_for_step(run_dir, 1, process, log)
        server_log = run_dir / "logs" / "server.log"
        wait_for("the relaunch", lambda: "--policy-version 2" in server_log.read_text(), log, 60)
        members = family(process.pid)
        process.send_signal(signal.SIGINT)
        assert finished(process, log, 30) == 130
    assert_ended_with(log, "SIGINT", members, run_dir)
    assert newest(run_dir) == 2


def test_run_without_queue_adapters_checkpoint_or_folder(demo_model: Path, tmp_path: Path) -> None:
    """A run needs its queue and its folder; lost adapters and a lost checkpoint are written again."""
    run_dir, log, options = tmp_path / "run", tmp_path / "log", {**LONG, "lora_transport": "disk"}
    resumed_by = f"grpo run --resume {run_dir}"
    with started(demo_model, run_dir, log, **options) as process:
        wait_for_step(run_dir, 3, process, log)
        members = family(process.pid)
        (run_dir / "queue.sqlite").unlink()
        assert finished(process, log, 60) == 1, tail(log)
    assert_ended_with(log, rf"^api: .*--store {re.escape(str(run_dir))}/queue\.sqlite", members, run_dir)
    assert resumed_by in log.read_text()
    step = newest(run_dir)
    assert step >= 3
    saved = run_dir / "checkpoints" / f"adapter_step_{step}"

    trained_before = rows(run_dir)[-1]["step"]
    log.unlink()
    with started(demo_model, run_dir, log, **options, resume="auto") as process:
        wait_for_step(run_dir, trained_before + 1, process, log)
        members = family(process.pid)
        shutil.rmtree(saved)
        (run_dir / "adapters").rename(tmp_path / "adapters")  # at once, although it is being written to
        wait_for_step(run_dir, trained_before + 6, process, log)
        wait_for("a later checkpoint is whole", lambda: newest(run_dir) > step, log)
        again = newest(run_dir)
        wait_for_step(run_dir, again + 1, process, log)
        warned = [line for line in log.read_text().splitlines() if line.startswith("trainer: ") and "WARNING" in line]
        assert len([line for line in warned if str(saved) in line]) == 1, warned
        assert 1 <= len([line for line in warned if str(run_dir / "adapters") in line]) <= 2, warned
        assert (run_dir / "adapters").is_dir()
        run_dir.rename(tmp_path / "deleted")  # whole, however much is written into it meanwhile
        shutil.rmtree(tmp_path / "deleted", ignore_errors=True)
        assert finished(process, log, 60) == 1, tail(log)
    assert_ended_with(log, f"^--run-dir {re.escape(str(run_dir))}: ", members, run_dir)
    assert resumed_by in log.read_text()
    step = newest(run_dir)
    assert step > again
    assert trained(demo_model, run_dir, training_steps=step + 1, resume="auto")[-1]["step"] == step + 1


@pytest.mark.parametrize(
    ("how", "names"),
    [("nan", r"\b16 groups\b.*\ba score that is not finite\b"), ("crashes", r"exit code 3")],
)
def test_run_ends_saved_if_an_environment_goes_wrong(demo_model: Path, tmp_path: Path, how: str, names: str) -> None:
    run_dir, log = tmp_path / "run", tmp_path / "log"
    own = {**LONG, "checkpoint_interval": 1, "env": NAME, "env__how": how}
    with started(demo_model, run_dir, log, **own) as process:
        members = family_until_the_end(process, log)
        assert process.wait() == 1, tail(log)
    assert rows(run_dir), tail(log)
    assert_ended_with(log, f"^env-odd_environment: .*{names}", members, run_dir)
    assert f"grpo run --resume {run_dir}" in log.read_text()
    warned = re.findall(r"^env-odd_environment: .* WARNING ", log.read_text(), re.MULTILINE)
    assert len(warned) <= 40, "16 groups by name, and a line a step"
    assert newest(run_dir) == rows(run_dir)[-1]["step"]


TWO_ENVIRONMENTS = """
[[environments]]
name = "arithmetic"
[[environments]]
name = "{name}"
[environments.env]
how = "hostile"
score_timeout = {seconds}
steps_per_eval = 3
blocked_once = "{blocked}"
inference_weight = 0.3
"""


def test_a_hostile_environment_is_started_again_and_the_good_one_goes_on(demo_model: Path, tmp_path: Path) -> None:
    """It never comes back from an evaluation, raises interrupts and floods the terminal, which stays readable."""
    run_dir, log, config, blocked = (tmp_path / name for name in ("run", "log", "run.toml", "blocked"))
    seconds = float(os.environ.get("GRPO_HOSTILE_SECONDS", "10"))
    config.write_text(TWO_ENVIRONMENTS.format(name=NAME, seconds=seconds, blocked=blocked))

    def groups_of(name: str) -> list[tuple[int, int]]:
        """Steps of an environment, and its groups in each; its name in a key is the rollout API's."""
        reported = jsonl(run_dir / "logs" / f"env-{name}.metrics.jsonl")
        return [(row["step"], row[key]) for row in reported for key in row if key.endswith("/groups_sent")]

    options = {"config": config, "training_steps": 5000, "checkpoint_interval": 5000, "max_restarts": 1}
    with started(demo_model, run_dir, log, **options) as process:

        def wait(what: str, done: Callable[[], object], limit: float) -> None:
            wait_for(what, lambda: process.poll() is not None or bool(done()), log, limit)

        wait("it blocks", blocked.exists, 300)
        blocked_at = rows(run_dir)[-1]["step"]
        wait("it ends", lambda: found_in(log, "restart 1 of 1"), 300)
        back_at = rows(run_dir)[-1]["step"]
        bad, good = (len(groups_of(name)) for name in ("odd_environment", "arithmetic"))
        wait("groups of its second life", lambda: any(sent for _, sent in groups_of("odd_environment")[bad:]), 120)
        wait("groups of the good one", lambda: any(sent for _, sent in groups_of("arithmetic")[good:]), 120)
        process.send_signal(signal.SIGINT)
        assert finished(process, log, 60) == 130, tail(log)
    steps, said = rows(run_dir)[-1]["step"], log.read_text()
    assert len(said) < 100_000 * max(1.0, steps / 60)
    assert "\x1b" not in said and max(map(len, said.splitlines())) < 1000
    hostile = [line for line in said.splitlines() if line.startswith("env-odd_environment: ")]
    assert any("event loop" in line and " ERROR " in line for line in hostile), "why it ended"
    assert any(re.search(r'odd_environment\.py", line \d+, in evaluate$', line) for line in hostile), "its stack"
    assert len([line for line in hostile if "WARNING" in line]) < 2 * BURST + steps
    sent_since = sum(sent for step, sent in groups_of("arithmetic") if step > blocked_at)
    assert sent_since > 2 * (back_at - blocked_at) > 0, "half of what is trained while the other is blocked: 4 a step"
