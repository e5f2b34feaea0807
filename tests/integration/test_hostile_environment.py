"""A hostile environment beside a good one: the run continues, and the terminal stays readable."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from grpo_trainer.launch.supervisor import Notices
from tests.integration.hostile_environment import TITLE
from tests.processes import tail
from tests.runs import finished, rows, started

pytestmark = pytest.mark.timeout(600)

STEPS = int(os.environ.get("GRPO_HOSTILE_STEPS", "25"))
SECONDS = float(os.environ.get("GRPO_HOSTILE_SECONDS", "4"))
"""`--env.score_timeout` of the hostile environment; above 30 its stack is shown before it ends."""
BYTES = 100_000

CONFIG = """
[[environments]]
name = "arithmetic"
[[environments]]
name = "tests.integration.hostile_environment"
env = {{ score_timeout = {seconds}, steps_per_eval = 3, blocked_once = "{blocked}", inference_weight = 0.3 }}
"""


def test_a_hostile_environment_is_started_again_and_the_good_one_goes_on(demo_model: Path, tmp_path: Path) -> None:
    run_dir, log, config = tmp_path / "run", tmp_path / "log", tmp_path / "run.toml"
    blocked = tmp_path / "blocked"
    config.write_text(CONFIG.format(seconds=SECONDS, blocked=blocked))
    options = {"config": config, "training_steps": STEPS, "checkpoint_interval": 1000, "max_restarts": 1}
    with started(demo_model, run_dir, log, **options) as process:
        assert finished(process, log, 500) == 0, tail(log)
    said = log.read_bytes()
    assert len(said) < BYTES, f"{len(said)} bytes"
    assert b"\x1b" not in said and b"\r" not in said
    lines = said.decode().splitlines()
    hostile = [line for line in lines if line.startswith("env-hostile_environment: ")]
    assert any("--env.score_timeout" in line and " ERROR " in line for line in hostile), "why it ended"
    assert any(re.search(r'hostile_environment\.py", line \d+, in evaluate$', line) for line in hostile), "its stack"
    assert len([line for line in hostile if "restart 1 of 1" in line]) == 1
    assert max(map(len, hostile)) < 1000
    assert len([line for line in hostile if "WARNING" in line]) < 3 * Notices.BURST + STEPS
    assert rows(run_dir)[-1]["step"] == STEPS
    good = sent(run_dir, "arithmetic")
    assert len(good) >= STEPS - 2 and all(good.values()), good  # also while the other was blocked
    before, after = (run_dir / "logs" / "env-hostile_environment.log").read_text().rpartition("\n$ ")[::2]
    assert " --env.score_timeout " in before or (run_dir / "logs" / "env-hostile_environment.log.1").exists()
    assert "registered as" in after
    assert TITLE not in before + after


def sent(run_dir: Path, name: str) -> dict[int, int]:
    """An environment's groups by step."""
    lines = (run_dir / "logs" / f"env-{name}.metrics.jsonl").read_text().splitlines()
    key = f"{name}/groups_sent"
    return {row["step"]: row[key] for line in lines if key in (row := json.loads(line))}
