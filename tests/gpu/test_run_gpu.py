"""The main job on a GPU: CUDA graphs on, the reward goes up, server and trainer agree in bfloat16."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes import ROOT, tail

pytestmark = [pytest.mark.alone, pytest.mark.timeout(600)]  # the share of the GPU is the default


def test_the_quickstart_learns_with_cuda_graphs(tmp_path: Path) -> None:
    model, run_dir, log = tmp_path / "demo", tmp_path / "run", tmp_path / "log"
    subprocess.run([sys.executable, "-m", "grpo_trainer", "demo-model", str(model)], cwd=ROOT, check=True, timeout=300)
    words = ["--config", "configs/quickstart.toml", "--model", str(model), "--run-dir", str(run_dir)]
    with log.open("w") as output:
        done = subprocess.run(
            [sys.executable, "-m", "grpo_trainer", "run", *words],
            stdout=output, stderr=subprocess.STDOUT, cwd=ROOT, check=False, timeout=500,
        )  # fmt: skip
    assert done.returncode == 0, tail(log)
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert sum(row["reward/mean"] for row in rows[-5:]) / 5 - sum(row["reward/mean"] for row in rows[:5]) / 5 >= 0.3
    served = (run_dir / "logs" / "server.log").read_text()
    assert "Capturing CUDA graphs" in served and "vLLM" in log.read_text() and "on cuda" in log.read_text()
    assert "bridge proved" in (run_dir / "logs" / "trainer.log").read_text()
    fresh = [row for row in rows if row.get("rollout/staleness_max") == 0]
    assert fresh, "no step trained on rollouts of its own version"
    assert all(row["alignment/logprob_diff_mean"] < 0.04 for row in fresh)  # bfloat16 on both sides
