"""scripts/train.sh trains on a CPU. `tests/unit/test_shell_scripts.py` has the commands of its modes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes import ROOT
from tests.runs import rows

pytestmark = pytest.mark.timeout(600)


def test_train_script_trains(demo_model: Path, tmp_path: Path) -> None:
    settings = {
        **{"GRPO_PYTHON": sys.executable, "MODEL": str(demo_model), "RUN_DIR": str(tmp_path / "run")},
        **{"STEPS": "2", "BATCH_SIZE": "16", "ACCUMULATION": "1"},
    }
    command = ["bash", str(ROOT / "scripts" / "train.sh"), "single_copy", "--log-samples", "2"]
    done = subprocess.run(command, env={**os.environ, **settings}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert [row["step"] for row in rows(tmp_path / "run")] == [1, 2]
    assert "bridge proved" in done.stdout
    command = [sys.executable, "-m", "grpo_trainer", "report", str(tmp_path / "run")]
    subprocess.run(command, cwd=ROOT, capture_output=True, check=True)
    report = (tmp_path / "run" / "report.html").read_text()
    assert '"title":"Reward"' in report and '"ratios":"' in report
