"""`grpo run --env gsm8k`: real rows of GSM8K, a real vLLM server on the CPU, the rollout API and the trainer."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.processes import ROOT, tail

pytestmark = pytest.mark.timeout(600)

STEPS = 20
GAP = "alignment/logprob_diff_max"
ROWS = ROOT / "tests" / "data" / "gsm8k_rows.jsonl"


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_twenty_steps_on_real_rows_with_strict_and_lenient_scores_logged(demo_model: Path, tmp_path: Path) -> None:
    pytest.importorskip("math_verify", reason="answers are judged by it: pip install math-verify")
    data, run_dir, log = tmp_path / "data", tmp_path / "run", tmp_path / "log"
    data.mkdir()
    for split in ("train", "test"):
        shutil.copy(ROWS, data / f"{split}.jsonl")
    options = {
        "model-name": demo_model,
        "run-dir": run_dir,
        "weight-bridge-mode": "lora_only",
        "training-steps": STEPS,
        "batch-size": 16,
        "gradient-accumulation-steps": 1,
        "lr": 7e-4,
        "lora-r": 8,
        "seq-len": 320,
        "checkpoint-interval": 0,
        "server.port": 0,
        "api.port": 0,
        "env": "gsm8k",
        "env.dataset_path": data,
        "env.group_size": 8,
        "env.max_tokens": 12,
        "env.system_prompt": "",
        # The model can't do these sums: what it can learn in twenty steps is to end its answers.
        "env.length_penalty": 1.0,
        "env.length_free": 0.0,
        "env.steps_per_eval": 10,
        "env.eval_questions": 4,
    }
    command = [sys.executable, "-m", "grpo_trainer", "run"]
    command += [word for name, value in options.items() for word in (f"--{name}", str(value))]
    with log.open("wb") as output:
        status = subprocess.run(command, cwd=ROOT, stdout=output, stderr=output, timeout=500, check=False).returncode
    said = run_dir / "logs" / "env-gsm8k.log"
    assert status == 0, tail(log) + tail(said)

    steps = read_jsonl(run_dir / "metrics.jsonl")
    assert [row["step"] for row in steps] == list(range(1, STEPS + 1))
    assert all(row["batch/sequences"] == 16 for row in steps)
    # The server's ids and logprobs. Later samples are staler; a step whose groups have no signal moves nothing.
    assert next(row[GAP] for row in steps if GAP in row) < 1e-3
    first, last = (sum(row["reward/mean"] for row in rows) / 5 for rows in (steps[:5], steps[-5:]))
    assert last > first + 0.1, (first, last)

    reported = read_jsonl(run_dir / "logs" / "env-gsm8k.metrics.jsonl")
    assert sum(row.get("gsm8k_0/groups_sent", 0) for row in reported) >= 2 * STEPS
    scored = [row for row in reported if "gsm8k_0/strict" in row]
    assert scored
    for row in scored:
        assert 0 <= row["gsm8k_0/strict"] <= row["gsm8k_0/lenient"] <= 1
        assert row["gsm8k_0/unjudged"] == 0
    evaluations = [row for row in reported if "gsm8k_0/eval/accuracy" in row]
    assert evaluations
    for row in evaluations:
        assert row["gsm8k_0/eval/accuracy_low"] <= row["gsm8k_0/eval/accuracy"] <= row["gsm8k_0/eval/accuracy_high"]
    assert "strict 0." in said.read_text() and "lenient 0." in said.read_text()
    state = json.loads((run_dir / "checkpoints" / "environments" / "gsm8k" / f"step-{STEPS}.json").read_text())
    assert state["position"] >= STEPS * 2
