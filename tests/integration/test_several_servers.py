"""`grpo run` with two real servers of one policy: both are proved, published to, and asked."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.processes import alive, family, tail, wait_for
from tests.runs import finished, rows, started

pytestmark = pytest.mark.timeout(600)


def test_two_servers_are_proved_published_to_and_asked(demo_model: Path, tmp_path: Path) -> None:
    run_dir, log = tmp_path / "run", tmp_path / "log"
    with started(demo_model, run_dir, log, server__replicas=2, training_steps=3) as process:
        wait_for("the servers", lambda: process.poll() is not None or len(family(process.pid)) >= 5, log)
        members = family(process.pid)
        assert finished(process, log, 400) == 0, tail(log)
    assert not alive(list(members)), members
    done = rows(run_dir)
    assert [row["step"] for row in done] == [1, 2, 3]
    fresh = [row for row in done if row["rollout/staleness_max"] == 0]
    assert fresh and all(row["alignment/logprob_diff_max"] < 1e-3 for row in fresh)  # whichever server it was
    trainer = (run_dir / "logs" / "trainer.log").read_text()
    assert trainer.count("bridge proved") == 2
    for name in ("server", "server-2"):
        said = (run_dir / "logs" / f"{name}.log").read_text()
        assert "POST /generate" in said and "POST /lora/load" in said, tail(run_dir / "logs" / f"{name}.log")
