"""`grpo run` with keys, for longer than a process may take to be ready."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.processes import running, tail, wait_for
from tests.runs import arguments, finished, rows

pytestmark = pytest.mark.timeout(600)

LIMIT = 20.0
"""Seconds that the rollout API has to be ready here: more than it takes, fewer than the run takes."""
COMMAND = f"""
from grpo_trainer.launch import plan
plan.API_START_SECONDS = {LIMIT}
from grpo_trainer.cli import main
main()
"""


@pytest.mark.parametrize(
    ("options", "variables"),
    [
        ({"rollout_api_key": "door-of-the-api"}, {}),
        ({"vllm_api_key": "door-of-the-server"}, {}),
        ({}, {"ROLLOUT_API_KEY": "door-of-the-api", "VLLM_API_KEY": "door-of-the-server"}),
    ],
    ids=["api", "server", "both"],
)
def test_run_with_keys_outlasts_the_time_to_be_ready(
    demo_model: Path, tmp_path: Path, options: dict[str, str], variables: dict[str, str]
) -> None:
    run_dir, log = tmp_path / "run", tmp_path / "log"
    _, _, *command = arguments(demo_model, run_dir, training_steps=100_000, checkpoint_interval=0, **options)
    with running("-c", COMMAND, *command, log=log, env=variables) as process:

        def has_outlasted() -> bool:
            done = rows(run_dir)
            return process.poll() is not None or (len(done) > 2 and done[-1]["time"] - done[0]["time"] > LIMIT)

        wait_for("steps for longer than the limit", has_outlasted, log, 400)
        assert process.poll() is None, tail(log)
        process.terminate()
        assert finished(process, log, 60) == 143, tail(log)
    said = log.read_text() + "".join(path.read_text() for path in (run_dir / "logs").glob("*.log"))
    assert "api: ready after" in said and "door-of-" not in said
    assert "door-of-" not in json.dumps(rows(run_dir))
