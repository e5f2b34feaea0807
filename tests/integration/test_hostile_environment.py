"""A hostile environment beside a good one: the run continues, and the terminal stays readable."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from pathlib import Path

import pytest

from grpo_common.status import BURST
from tests.processes import tail, wait_for
from tests.runs import finished, rows, started

pytestmark = pytest.mark.timeout(600)

SECONDS = float(os.environ.get("GRPO_HOSTILE_SECONDS", "10"))
"""`--env.score_timeout` of the hostile environment."""
BYTES = 100_000
"""Limit of the terminal's output in 60 steps."""

CONFIG = """
[[environments]]
name = "arithmetic"
[[environments]]
name = "tests.integration.hostile_environment"
env = {{ score_timeout = {seconds}, steps_per_eval = 3, blocked_once = "{blocked}", inference_weight = 0.3 }}
"""
HOSTILE = "env-hostile_environment"


def test_a_hostile_environment_is_started_again_and_the_good_one_goes_on(demo_model: Path, tmp_path: Path) -> None:
    run_dir, log, config = tmp_path / "run", tmp_path / "log", tmp_path / "run.toml"
    config.write_text(CONFIG.format(seconds=SECONDS, blocked=tmp_path / "blocked"))
    options = {"config": config, "training_steps": 5000, "checkpoint_interval": 5000, "max_restarts": 1}
    with started(demo_model, run_dir, log, **options) as process:
        wait_for("it ends", lambda: ended(process) or "restart 1 of 1" in log.read_text(), log, 300)
        first_life = len(reported(run_dir, "hostile_environment"))
        wait_for("groups of its second life", lambda: ended(process) or second_life(run_dir, first_life), log, 120)
        process.send_signal(signal.SIGINT)
        assert finished(process, log, 60) == 130, tail(log)
    steps = rows(run_dir)[-1]["step"]
    said = log.read_text()
    assert len(said) < BYTES * max(1.0, steps / 60)
    assert "\x1b" not in said and max(map(len, said.splitlines())) < 1000
    hostile = [line for line in said.splitlines() if line.startswith(f"{HOSTILE}: ")]
    assert any("event loop" in line and " ERROR " in line for line in hostile), "why it ended"
    assert any(re.search(r'hostile_environment\.py", line \d+, in evaluate$', line) for line in hostile), "its stack"
    assert len([line for line in hostile if "WARNING" in line]) < 2 * BURST + steps
    good = reported(run_dir, "arithmetic")
    assert good[-1][0] >= steps - 3
    assert len([step for step, groups in good if groups]) > steps / 2, "also while the other was blocked"


def ended(process: subprocess.Popen[bytes]) -> bool:
    return process.poll() is not None


def reported(run_dir: Path, name: str) -> list[tuple[int, int]]:
    """Steps of an environment, and its groups in each."""
    path = run_dir / "logs" / f"env-{name}.metrics.jsonl"
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [
        (row["step"], row[key])
        for row in map(json.loads, lines)
        for key in row
        if key.endswith("/groups_sent")  # its name is the rollout API's
    ]


def second_life(run_dir: Path, first_life: int) -> bool:
    """Whether groups of its second life were trained on."""
    return any(groups for _, groups in reported(run_dir, "hostile_environment")[first_life:])
