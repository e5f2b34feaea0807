"""`--benchmark`: each second in one phase, and what went on beside them."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from grpo_trainer.logs.times import print_time_split, time_beside, time_split

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
    assert time_split(path) == {
        "waiting for rollouts": 5.0,
        "forward and backward": 6.0,
        "optimizer": 2.0,
        "publishing weights": 1.0,
        "copying checkpoints": 0.25,
        "other (start, logging)": pytest.approx(3.75),  # 18 - 14.25
    }
    assert time_beside(path) == {
        "fetching the next batch": 7.5,
        "making it ready": pytest.approx(0.4),
        "writing checkpoints": 2.0,
    }
    console = Console(file=io.StringIO(), width=100)
    print_time_split(path, console)
    said = console.file.getvalue()  # type: ignore[attr-defined]
    assert "waiting for rollouts" in said and "28%" in said  # 5 / 18
    assert "meanwhile: fetching the next batch" in said and "7.5" in said
