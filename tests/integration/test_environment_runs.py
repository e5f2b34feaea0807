"""Whole runs of environments that ship: `--data D --reward R`, GSM8K: both learn."""

from __future__ import annotations

import json
import random
import shutil
import signal
from pathlib import Path
from statistics import fmean
from typing import Any

import pyarrow
import pytest
import tomli_w
from pyarrow import parquet

from tests.processes import ROOT, assert_ended, family, running, tail
from tests.runs import finished, jsonl, rows, trained, wait_for_step

pytestmark = pytest.mark.timeout(900)

RIGHT = """
def right(completions, answer, **kwargs):
    return [float(text.strip() == str(gold)) for text, gold in zip(completions, answer)]
"""
MANY = """
import asyncio


async def even(completions, answer, **kwargs):
    await asyncio.sleep(0)
    return [None if int(a) % 2 else float(c.strip() == a) for c, a in zip(completions, answer)]


def short(completion_ids, answer):
    return [None if int(a) % 2 else float(len(ids) <= 3) for ids, a in zip(completion_ids, answer)]
"""
LEARNING = {"batch_size": 128, "gradient_accumulation_steps": 1, "lr": 1e-3, "warmup_steps": 2}
LEARNING |= {"lora_r": 16, "lora_alpha": 32, "seq_len": 64, "weight_bridge_mode": "lora_only"}


def sums(count: int = 500) -> list[dict[str, str]]:
    """Problems that the demo model solves now and then."""
    pairs = [(left, right) for left in range(10, 50) for right in range(10, 50)]
    random.Random(3).shuffle(pairs)
    return [{"prompt": f"{left}+{right}=", "answer": str(left + right)} for left, right in pairs[:count]]


def write_jsonl(path: Path, lines: list[Any]) -> Path:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in lines))
    return path


def test_one_command_learns_from_a_file_with_a_function_of_two_lines(demo_model: Path, tmp_path: Path) -> None:
    data, reward, run_dir = write_jsonl(tmp_path / "sums.jsonl", sums()), tmp_path / "my.py", tmp_path / "run"
    reward.write_text(RIGHT)
    options = {"training_steps": 30, "checkpoint_interval": 0, "data": data, "reward": f"{reward}:right"}
    done = trained(demo_model, run_dir, **options, data__held_out=30, eval_every=20, **LEARNING)
    means = [row["reward/mean"] for row in done]
    assert len(means) == 30 and fmean(means[-5:]) > fmean(means[:5]) + 0.3
    reported = jsonl(run_dir / "logs" / "env-dataset.metrics.jsonl")
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
    tables = {
        "trainer": {**LEARNING, "model_name": str(demo_model), "training_steps": 12, "checkpoint_interval": 2},
        "server": {"port": 0},
        "api": {"port": 0},
        "data": {"path": str(folder)},
        "rewards": [f"{code}:even", {"function": f"{code}:short", "weight": 0.1, "name": "brief"}],
    }
    file.write_text(tomli_w.dumps(tables))
    command, log = ["-m", "grpo_trainer", "run", "--config", str(file), "--run-dir", str(run_dir)], tmp_path / "log"
    with running(*command, log=log) as process:
        wait_for_step(run_dir, 5, process, log)
        members = family(process.pid)
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert_ended(members)  # they get a signal when `grpo run` is gone, and may save

    def resumed(*words: str) -> int:
        with running(*command, "--resume", "auto", *words, log=log) as process:
            return finished(process, log)

    said = run_dir / "logs" / "env-dataset.log"
    parquet.write_table(pyarrow.Table.from_pylist(sums(499)), folder / "train.parquet")
    assert resumed() != 0
    assert "--allow-changed-data" in log.read_text() + said.read_text()
    assert resumed("--allow-changed-data") == 0, tail(log)
    assert [row["step"] for row in rows(run_dir)] == list(range(1, 13))
    assert "reward_even" in said.read_text() and "reward_brief" in said.read_text()
    states = {int(p.stem.removeprefix("step-")): p for p in run_dir.glob("checkpoints/environments/*/step-*.json")}
    positions = [json.loads(states[step].read_text())["position"] for step in sorted(states)]
    assert positions == sorted(positions) and positions[-1] > positions[0]  # later steps have later rows


def test_twenty_steps_on_rows_of_gsm8k_with_strict_and_lenient_scores_logged(demo_model: Path, tmp_path: Path) -> None:
    pytest.importorskip("math_verify", reason="answers are judged by it: pip install math-verify")
    data, run_dir, steps = tmp_path / "data", tmp_path / "run", 20
    data.mkdir()
    for split in ("train", "test"):
        shutil.copy(ROOT / "tests" / "data" / "gsm8k_rows.jsonl", data / f"{split}.jsonl")
    own = {"dataset_path": data, "group_size": 8, "max_tokens": 12, "system_prompt": ""}
    # The model can't do these sums: what it can learn in twenty steps is to end its answers.
    own |= {"length_penalty": 1.0, "length_free": 0.0, "steps_per_eval": 10, "eval_questions": 4}
    options = {"training_steps": steps, "batch_size": 16, "lr": 7e-4, "seq_len": 320, "checkpoint_interval": 0}
    options |= {"env": "gsm8k", **{f"env.{name}": value for name, value in own.items()}}
    done = trained(demo_model, run_dir, **options)
    assert [row["step"] for row in done] == list(range(1, steps + 1))
    assert all(row["batch/sequences"] == 16 for row in done)
    # The server's ids and logprobs. Later samples are staler; a step whose groups have no signal moves nothing.
    gap = "alignment/logprob_diff_max"
    assert next(row[gap] for row in done if gap in row) < 1e-3
    first, last = (fmean(row["reward/mean"] for row in some) for some in (done[:5], done[-5:]))
    assert last > first + 0.1, (first, last)

    reported = jsonl(run_dir / "logs" / "env-gsm8k.metrics.jsonl")
    assert sum(row.get("gsm8k_0/groups_sent", 0) for row in reported) >= 2 * steps
    scored = [row for row in reported if "gsm8k_0/strict" in row]
    evaluations = [row for row in reported if "gsm8k_0/eval/accuracy" in row]
    assert scored and evaluations
    for row in scored:
        assert 0 <= row["gsm8k_0/strict"] <= row["gsm8k_0/lenient"] <= 1 and row["gsm8k_0/unjudged"] == 0
    for row in evaluations:
        assert row["gsm8k_0/eval/accuracy_low"] <= row["gsm8k_0/eval/accuracy"] <= row["gsm8k_0/eval/accuracy_high"]
    said = (run_dir / "logs" / "env-gsm8k.log").read_text()
    assert "strict 0." in said and "lenient 0." in said
    state = json.loads((run_dir / "checkpoints" / "environments" / "gsm8k" / f"step-{steps}.json").read_text())
    assert state["position"] >= steps * 2
