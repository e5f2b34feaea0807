"""`--benchmark`: each second in one phase, and what threads did meanwhile."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from grpo_trainer.logs.times import MEANWHILE, PHASES, print_time_split, time_split

ROWS = [
    {"step": 1, "train/seconds": 10.0, "train/data_fetch_time": 4.0, "train/forward_backward_time": 3.0,
     "train/optimizer_time": 1.0, "train/sync_time": 0.5, "rollout/fetch_time": 4.0, "rollout/prepare_time": 0.2},
    {"step": 2, "train/seconds": 8.0, "train/data_fetch_time": 1.0, "train/forward_backward_time": 3.0,
     "train/optimizer_time": 1.0, "train/sync_time": 0.5, "train/save_time": 0.25, "rollout/fetch_time": 3.5,
     "rollout/prepare_time": 0.2, "checkpoint/write_time": 2.0},
]  # fmt: skip


def test_each_second_is_in_one_phase_and_overlap_stands_apart(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    split, meanwhile = time_split(path)
    assert {PHASES.get(name): seconds for name, seconds in split.items()} == {
        "train/data_fetch_time": 5.0,
        "train/forward_backward_time": 6.0,
        "train/optimizer_time": 2.0,
        "train/sync_time": 1.0,
        "train/save_time": 0.25,
        None: pytest.approx(3.75),  # 18 - 14.25
    }
    assert {MEANWHILE[name]: seconds for name, seconds in meanwhile.items()} == {
        "rollout/fetch_time": 7.5,
        "rollout/prepare_time": pytest.approx(0.4),
        "checkpoint/write_time": 2.0,
    }
    console = Console(file=io.StringIO(), width=100)
    print_time_split(path, console)
    said = console.file.getvalue()  # type: ignore[attr-defined]
    assert all(name in said for name in (*split, *meanwhile))
    assert "28%" in said and "7.5" in said  # 5 / 18
