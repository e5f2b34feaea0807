"""`grpo run --trainer-gpus 2` with a real server, on the CPU: two processes train as one and end as one."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import psutil
import pytest

from tests.processes import alive, family, tail
from tests.runs import finished, rows, started, wait_for_step

pytestmark = pytest.mark.timeout(600)


def follower(process_id: int) -> int:
    """The run's second trainer process, which is started after the first."""
    children = psutil.Process(process_id).children()
    trainers = [child for child in children if "grpo_trainer train" in " ".join(child.cmdline())]
    _, second = sorted(trainers, key=lambda child: (child.create_time(), child.pid))
    return second.pid


def test_two_processes_train_and_stop_as_one(demo_model: Path, tmp_path: Path) -> None:
    run_dir, log = tmp_path / "run", tmp_path / "log"
    with started(demo_model, run_dir, log, training_steps=500, trainer_gpus=2) as process:
        wait_for_step(run_dir, 2, process, log)
        members = family(process.pid)
        process.send_signal(signal.SIGINT)
        assert finished(process, log, 30) == 130, tail(log)
    assert not alive(list(members)), members
    done = rows(run_dir)
    assert (run_dir / "checkpoints" / f"adapter_step_{done[-1]['step']}" / "adapter_model.safetensors").exists()
    fresh = [row for row in done if row.get("rollout/staleness_max") == 0]
    assert all(row["alignment/logprob_diff_max"] < 1e-3 for row in fresh)
    assert "rank 1 of 2 trainer processes" in (run_dir / "logs" / "trainer-1.log").read_text()


def test_a_trainer_process_that_dies_ends_the_run_with_its_name(demo_model: Path, tmp_path: Path) -> None:
    run_dir, log = tmp_path / "run", tmp_path / "log"
    with started(demo_model, run_dir, log, training_steps=500, trainer_gpus=2, max_restarts=0) as process:
        wait_for_step(run_dir, 1, process, log)
        members = family(process.pid)
        os.kill(follower(process.pid), signal.SIGKILL)
        assert finished(process, log, 60) not in (0, 130), tail(log)
    assert not alive(list(members)), members
    assert re.search(r"trainer-1: .*SIGKILL", log.read_text(), re.IGNORECASE)
