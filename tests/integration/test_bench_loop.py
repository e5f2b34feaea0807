"""`grpo bench loop` end to end on a CPU: its one line, and nothing left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from grpo_trainer.bench.loop.figures import CPU_ROLES
from tests.processes import ROOT, mentioning, running, tail, wait_for

pytestmark = pytest.mark.timeout(400)  # a server starts

COMMAND = ("-m", "grpo_trainer", "bench", "loop", "--shape", "tiny")


def measured(folder: Path, *words: str) -> dict[str, Any]:
    """The figures, of a measurement that leaves nothing behind."""
    environment = {**os.environ, "TMPDIR": str(folder)}
    done = subprocess.run(
        [sys.executable, *COMMAND, *words],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=environment,
        check=False,
        timeout=380,
    )
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    assert not list(folder.glob("grpo*")) and not mentioning(str(folder))
    return json.loads(line)


def test_one_line_of_figures_and_nothing_left_running(tmp_path: Path) -> None:
    steps, run_options = ("--steps", "20", "--warmup-steps", "2"), ["--checkpoint-interval", "2"]
    found = measured(tmp_path, "--bridge", "lora_only", *steps, "--", *run_options)

    conditions = {"bridge": "lora_only", "shape": "tiny", "sequences": 32, "prompt_len": 16, "completion_len": 48}
    assert {key: found[key] for key in conditions} == conditions
    assert (found["steps"], found["warmup_steps"], found["run_options"]) == (20, 2, run_options)
    assert set(found["versions"]) == {"vllm", "torch", "python"} and found["device"] and found["dtype"] == "float32"

    # 98 ids, 8 of which end a completion; cut at 48: (1 - (1 - 8/98)^48) x 98 / 8 = 12.0
    assert 6 < found["completion_tokens_mean"] < 20
    prompts = found["trained_tokens_per_s"] - found["completion_tokens_per_s"]
    assert prompts * found["step_s"] == pytest.approx(32 * 16, rel=0.01)
    split = found["split"]
    assert set(split) == {"wait_s", "step_s", "publish_s", "save_s", "other_s"}
    assert sum(split.values()) == pytest.approx(found["step_s"], rel=0.01)
    assert split["save_s"] > 0 and found["checkpoint_share"] > 0  # a step's row has the save of the step before
    assert 0 <= found["staleness"]["mean"] <= found["staleness"]["max"] <= 5

    server = found["server"]
    assert 0 <= server["running_mean"] <= server["can_hold"] and 0 <= server["below_half_share"] <= 1
    assert set(found["cpu_ms_per_group"]) == set(CPU_ROLES.values())
    assert sum(found["cpu_ms_per_group"].values()) > 0  # a busy machine may delay the looks at a process past the steps
    start = list(found["start_s"])
    assert found["start_s"]["api_started"] > 0 and list(found["start_s"].values()) == sorted(found["start_s"].values())
    assert start.index("server_started") < start.index("server_ready") < start.index("first_batch")
    assert start.index("trainer_started") < start.index("trainer_ready") and start[-1] == "first_step"
    rss = found["peak_memory_gb"]["rss"]
    assert set(rss) == {"run", "api", "environment", "server", "engine", "trainer", "all"}
    assert max(value for role, value in rss.items() if role != "all") < rss["all"]
    assert found["peak_memory_gb"]["gpu"] is None


def test_a_signal_ends_all_that_was_started(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with running(*COMMAND, log=log, env={"TMPDIR": str(tmp_path)}) as process:
        wait_for("the server starts", lambda: any("-m vllm_server " in line for line in joined(tmp_path)), log)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 128 + signal.SIGTERM, tail(log)
    assert not joined(tmp_path) and not list(tmp_path.glob("grpo*"))


def test_a_run_that_is_refused_says_why(tmp_path: Path) -> None:
    command = [sys.executable, *COMMAND, "--run-dir", str(tmp_path / "run"), "--", "--checkpoint-intervall", "0"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False, timeout=200)
    assert done.returncode == 1 and not done.stdout
    assert "--checkpoint-intervall" in done.stderr and "--checkpoint-interval?" in done.stderr


def joined(folder: Path) -> list[str]:
    return [" ".join(line) for line in mentioning(str(folder))]
