"""Weights & Biases, offline: a run is written where the logs are."""

from __future__ import annotations

from pathlib import Path

import pytest

from grpo_trainer.config import LogConfig, ModelConfig, TrainConfig
from grpo_trainer.metrics.sinks import WandbSink
from tests.processes import wait_for


def test_an_offline_run_is_written_below_the_log_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    logging = LogConfig(log_dir=tmp_path, use_wandb=True, wandb_project="p", wandb_group="g")
    sink = WandbSink(TrainConfig(model=ModelConfig(name="m"), logging=logging))
    sink.write(1, {"reward/mean": 0.5})
    sink.close()
    (run_file,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    # W&B's own process writes it, and may be a moment behind.
    wait_for("the metric in the run's file", lambda: b"reward/mean" in run_file.read_bytes(), run_file, seconds=30.0)
