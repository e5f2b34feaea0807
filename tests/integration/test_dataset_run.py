"""`grpo run --data D --reward R`: a data set, reward functions, a real vLLM server on the CPU, and the trainer."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
from pathlib import Path
from statistics import fmean
from typing import Any

import pyarrow
import pytest
import tomli_w
from pyarrow import parquet

from tests.processes import ROOT, running, tail
from tests.runs import arguments, finished, rows, wait_for_step

pytestmark = pytest.mark.timeout(900)

RIGHT = """
def right(completions, answer, **kwargs):
    return [float(text.strip() == gold) for text, gold in zip(completions, answer)]
"""
MANY = """
import asyncio


async def even(completions, answer, **kwargs):
    await asyncio.sleep(0)
    return [None if int(a) % 2 else float(c.strip() == a) for c, a in zip(completions, answer)]


def short(completion_ids, answer):
    return [None if int(a) % 2 else float(len(ids) <= 3) for ids, a in zip(completion_ids, answer)]
"""
LEARNING = {
    "weight-bridge-mode": "lora_only",
    "batch-size": 256,
    "gradient-accumulation-steps": 1,
    "lr": 5e-4,
    "warmup-steps": 5,
    "lora-r": 16,
    "lora-alpha": 32,
    "seq-len": 64,
}


def sums(count: int = 500) -> list[dict[str, str]]:
    """Problems that the demo model solves now and then."""
    pairs = [(left, right) for left in range(10, 50) for right in range(10, 50)]
    random.Random(3).shuffle(pairs)
    return [{"prompt": f"{left}+{right}=", "answer": str(left + right)} for left, right in pairs[:count]]


def test_one_command_learns_from_a_file_with_a_function_of_two_lines(demo_model: Path, tmp_path: Path) -> None:
    data, reward, run_dir, log = (tmp_path / name for name in ("sums.jsonl", "my.py", "run", "log"))
    data.write_text("".join(f"{json.dumps(row)}\n" for row in sums()))
    reward.write_text(RIGHT)
    options = {"training_steps": 40, "checkpoint_interval": 0, "data": data, "reward": f"{reward}:right"}
    options |= {"data--held_out": 30, "eval_every": 20, **LEARNING}
    command = [sys.executable, *arguments(demo_model, run_dir, **options)]
    with log.open("wb") as output:
        status = subprocess.run(command, cwd=ROOT, stdout=output, stderr=output, timeout=500, check=False).returncode
    assert status == 0, tail(log) + tail(run_dir / "logs" / "env-dataset.log")

    means = [row["reward/mean"] for row in rows(run_dir)]
    assert len(means) == 40 and fmean(means[-5:]) > fmean(means[:5]) + 0.3
    own = run_dir / "logs" / "env-dataset.metrics.jsonl"
    reported: list[dict[str, Any]] = [json.loads(line) for line in own.read_text().splitlines()]
    assert any("dataset_0/reward_right" in row for row in reported)
    evaluated = [row for row in reported if "dataset_0/eval/reward" in row]
    assert evaluated and all(row["dataset_0/eval/rows"] == 30 for row in evaluated)
    assert json.loads((run_dir / "data" / "env-dataset.json").read_text())["data"][0]["rows"] == 500
    assert (run_dir / "code" / "my.py").read_text() == RIGHT


def test_a_run_of_a_toml_file_is_killed_and_continues_with_the_next_rows(demo_model: Path, tmp_path: Path) -> None:
    """Parquet in a folder; two weighted rewards, one of them async, that apply to half of the rows."""
    folder, code, file, run_dir = (tmp_path / name for name in ("rows", "many.py", "run.toml", "run"))
    folder.mkdir()
    parquet.write_table(pyarrow.Table.from_pylist(sums()), folder / "train.parquet")
    code.write_text(MANY)
    trainer = {name.replace("-", "_"): value for name, value in LEARNING.items()}
    tables = {
        "trainer": {**trainer, "model_name": str(demo_model), "training_steps": 12, "checkpoint_interval": 2},
        "server": {"port": 0},
        "api": {"port": 0},
        "data": {"path": str(folder)},
        "rewards": [f"{code}:even", {"function": f"{code}:short", "weight": 0.1, "name": "brief"}],
    }
    file.write_text(tomli_w.dumps(tables))
    command = ["-m", "grpo_trainer", "run", "--config", str(file), "--run-dir", str(run_dir)]
    with running(*command, log=tmp_path / "first.log") as process:
        wait_for_step(run_dir, 5, process, tmp_path / "first.log")
        process.send_signal(signal.SIGKILL)
        process.wait()
    with running(*command, "--resume", "auto", log=tmp_path / "second.log") as process:
        assert finished(process, tmp_path / "second.log") == 0, tail(tmp_path / "second.log")

    assert [row["step"] for row in rows(run_dir)] == list(range(1, 13))
    said = (run_dir / "logs" / "env-dataset.log").read_text()
    assert "reward_even" in said and "reward_brief" in said
    states = {int(p.stem.removeprefix("step-")): p for p in run_dir.glob("checkpoints/environments/*/step-*.json")}
    positions = [json.loads(states[step].read_text())["position"] for step in sorted(states)]
    assert len(positions) > 1 and positions == sorted(set(positions))  # later steps have later rows

    parquet.write_table(pyarrow.Table.from_pylist(sums(499)), folder / "train.parquet")
    again = [*command, "--resume", "auto", "--training-steps", "14"]
    with running(*again, log=tmp_path / "third.log") as process:
        assert finished(process, tmp_path / "third.log") != 0
    assert "--allow-changed-data" in (tmp_path / "third.log").read_text() + said_last(run_dir)
    with running(*again, "--allow-changed-data", log=tmp_path / "fourth.log") as process:
        assert finished(process, tmp_path / "fourth.log") == 0, tail(tmp_path / "fourth.log")
    assert rows(run_dir)[-1]["step"] == 14


def said_last(run_dir: Path) -> str:
    return (run_dir / "logs" / "env-dataset.log").read_text()
