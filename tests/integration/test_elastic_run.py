"""Real runs whose servers leave and join, and whose processes are killed: each run ends by itself with all its steps.

Twenty random kills: GRPO_KILLS=20 python -m pytest tests/integration/test_elastic_run.py -k random
"""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path
from typing import Any

import pytest

from grpo_trainer.saving.manifest import STATE_FILE
from tests.elastic import (
    ElasticRun,
    assert_environments_kept_their_names,
    assert_every_group_counted_once,
)
from tests.processes import tail
from tests.runs import assert_fresh, finished, of_mode, rows, started, wait_for_step

pytestmark = pytest.mark.timeout(1500)

GROUPS = 4


def options(mode: str, steps: int, **others: Any) -> dict[str, Any]:
    """A step has four groups of eight. It takes about two seconds until the test lets the run go faster."""
    paced = {"env": "tests.integration.odd_environment", "env--group-size": 8, "checkpoint-interval": 5}
    return of_mode(mode, **{"training-steps": steps, "server.replicas": 2, **paced, **others})


def test_servers_and_trainer_leave_and_come_back(demo_model: Path, tmp_path: Path) -> None:
    run_dir, log, steps = tmp_path / "run", tmp_path / "log", 60
    with started(demo_model, run_dir, log, **options("lora_only", steps)) as process:
        wait_for_step(run_dir, 2, process, log)
        run = ElasticRun(process, run_dir, log)
        first, second = sorted(run.serving())
        assert (run_dir / "logs" / "trainer.log").read_text().count("bridge proved") == 2

        run.kill(run.server_pid(second))
        run.wait("the killed server has left", lambda: list(run.serving()) == [first], 30)
        run.steps(3)  # one server is left, and the run continues
        run.wait("it is back", lambda: run.serving() == {first: 1, second: 2})

        run.wait("a checkpoint to restart from", lambda: any(run_dir.glob(f"checkpoints/*/{STATE_FILE}")))
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
        run.hurry()
        assert finished(process, log, 600) == 0, tail(log)
    assert_every_group_counted_once(run_dir, steps, GROUPS)
    assert {row["publish/servers"] for row in rows(run_dir)} == {1, 2}
    assert_fresh(rows(run_dir))
    for name in ("server", "server-2", "server-3"):
        said = (run_dir / "logs" / f"{name}.log").read_text()
        assert "POST /generate" in said and "POST /lora/load" in said


def test_a_broadcast_goes_on_without_a_server_and_with_its_successor(demo_model: Path, tmp_path: Path) -> None:
    run_dir, log, steps = tmp_path / "run", tmp_path / "log", 40
    with started(demo_model, run_dir, log, **options("broadcast", steps)) as process:
        wait_for_step(run_dir, 2, process, log)
        run = ElasticRun(process, run_dir, log)
        first, second = sorted(run.serving())
        run.kill(run.server_pid(first))
        run.wait("the killed server has left", lambda: list(run.serving()) == [second], 30)
        run.steps(2)
        run.wait("it is back", lambda: run.serving() == {first: 2, second: 1})
        run.hurry()
        assert finished(process, log, 600) == 0, tail(log)
    assert_every_group_counted_once(run_dir, steps, GROUPS)
    assert_fresh(rows(run_dir))


def test_a_run_goes_on_without_a_server_that_answers_nothing(demo_model: Path, tmp_path: Path) -> None:
    """It is stopped, so that it still accepts connections; when it runs again, it is used again.

    A trainer that restarts does not wait for it either: it would wait for --server.startup-timeout.
    """
    run_dir, log, steps = tmp_path / "run", tmp_path / "log", 60
    with started(demo_model, run_dir, log, **options("broadcast", steps, **{"vllm-timeout": 5000})) as process:
        wait_for_step(run_dir, 2, process, log)
        run = ElasticRun(process, run_dir, log)
        first, second = sorted(run.serving())
        os.kill(run.server_pid(second), signal.SIGSTOP)
        run.wait("the silent server has left", lambda: list(run.serving()) == [first], 300)
        run.steps(3)
        run.wait("a checkpoint to restart from", lambda: any(run_dir.glob(f"checkpoints/*/{STATE_FILE}")))
        run.kill(run.pid("trainer"))
        run.steps(3)
        os.kill(run.server_pid(second), signal.SIGCONT)
        run.wait("it is back, as the same process", lambda: run.serving() == {first: 1, second: 1})
        run.hurry()
        assert finished(process, log, 600) == 0, tail(log)
    assert_every_group_counted_once(run_dir, steps, GROUPS)
    assert_fresh(rows(run_dir))
    assert "ReadTimeout" in (run_dir / "logs" / "trainer.log").read_text()


def test_a_run_with_random_kills_ends_by_itself(demo_model: Path, tmp_path: Path) -> None:
    """Of servers, the environment and the API, each as soon as the one before it has recovered; the API for certain."""
    run_dir, log, draw = tmp_path / "run", tmp_path / "log", random.Random(23)
    kills = int(os.environ.get("GRPO_KILLS", "3"))
    steps = 20 + 15 * kills
    with started(demo_model, run_dir, log, **options("lora_only", steps, **{"max-restarts": 20})) as process:
        wait_for_step(run_dir, 2, process, log)
        run = ElasticRun(process, run_dir, log)
        run.kill_one("api", draw)
        for _ in range(kills):
            run.kill_one(draw.choice(["server", "env", "api"]), draw)
        run.hurry()
        assert finished(process, log, 1200) == 0, tail(log)
    assert_every_group_counted_once(run_dir, steps, GROUPS)
    assert_environments_kept_their_names(run_dir, 1)
