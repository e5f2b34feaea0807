"""`grpo run` with an environment that samples with top-p, top-k and min-p."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.processes import tail
from tests.runs import finished, rows, started

pytestmark = pytest.mark.timeout(600)


def test_a_run_learns_from_cut_samples_as_the_server_sampled_them(demo_model: Path, tmp_path: Path) -> None:
    """Through the server, the environment, the rollout API and its store, and with a reference (KL)."""
    run_dir, log = tmp_path / "run", tmp_path / "log"
    options = {"env": "tests.integration.cut_environment", "training_steps": 3, "kl_beta": 0.01}
    with started(demo_model, run_dir, log, **options) as process:
        assert finished(process, log) == 0, tail(log)
    found = rows(run_dir)
    assert [row["step"] for row in found] == [1, 2, 3]
    assert not any(row["rollout/refused_groups"] for row in found)
    # without masks each is off by the kept mass
    fresh = [row for row in found if row["rollout/staleness_max"] == 0]
    assert fresh and all(row["alignment/logprob_diff_max"] < 1e-3 for row in fresh)
    assert all(row["alignment/ess"] == pytest.approx(1.0, abs=1e-3) for row in fresh)
    assert all(0 < row["alignment/ess"] <= 1 + 1e-6 for row in found)
