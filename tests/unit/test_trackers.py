"""Trackers of others get the numbers of metrics.jsonl, under the same keys, without a network."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path

import pytest
from rich.console import Console

from grpo_trainer.config.train import TrainConfig
from grpo_trainer.logs import sinks
from grpo_trainer.logs.console import RunConsole
from grpo_trainer.logs.sinks import TensorBoardSink, TrackioSink, WandbSink, build_metric_log, run_id
from grpo_trainer.metrics.types import Mean
from tests.processes import wait_for


def config_of(folder: Path, *names: str, use_wandb: bool = False) -> TrainConfig:
    values = {"log_dir": folder, "log_to": names, "use_wandb": use_wandb, "wandb_project": "p", "wandb_group": "g"}
    return TrainConfig.model_validate({"model_name": "m", "rollout_api_key": "secret", **values})


def test_wandb_offline_is_written_below_the_log_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    sink = WandbSink(config_of(tmp_path, "wandb"))
    sink.write(1, {"reward/mean": 0.5})
    sink.close()
    (run_file,) = tmp_path.glob(f"wandb/offline-run-*/run-{run_id(config_of(tmp_path), 1)}.wandb")
    # W&B's own process writes it, and may be a moment behind.
    wait_for("the metric in the run's file", lambda: b"reward/mean" in run_file.read_bytes(), run_file, seconds=30.0)


def test_a_run_that_goes_on_is_the_same_to_a_tracker_and_one_that_begins_is_not(tmp_path: Path) -> None:
    config = config_of(tmp_path / "run", "wandb")
    first = run_id(config, 0)
    assert [run_id(config, 3), run_id(config, 7)] == [first, first]
    assert run_id(config, 0) != first
    assert run_id(config_of(tmp_path / "old", "wandb"), 3) not in ("", first)  # of a run from before this was kept


def test_tensorboard(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="needs tensorboard: pip install tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    sink = TensorBoardSink(config_of(tmp_path, "tensorboard"))
    sink.write(1, {"reward/mean": 0.5})
    sink.write(2, {"reward/mean": 0.75})
    sink.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(each.step, each.tensor_proto.float_val[0]) for each in events.Tensors("reward/mean")] == [
        (1, 0.5),
        (2, 0.75),
    ]


def test_trackio(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("trackio", reason="needs trackio: pip install trackio")
    import trackio.sqlite_storage
    import trackio.utils

    for module in (trackio.utils, trackio.sqlite_storage):  # read from TRACKIO_DIR when trackio is first imported
        monkeypatch.setattr(module, "TRACKIO_DIR", tmp_path / "trackio")
    for done in (0, 1):  # and once more, going on
        sink = TrackioSink(config_of(tmp_path, "trackio"), done)
        sink.write(done + 1, {"reward/mean": 0.5, "grpo/max_ratio": float("nan")})
        sink.close()
    (database,) = (tmp_path / "trackio").glob("*.db")
    with sqlite3.connect(database) as connection:
        rows = list(connection.execute("select step, metrics, run_name from metrics"))
        (settings,) = next(connection.execute("select config from configs"))
    assert [(step, json.loads(metrics)) for step, metrics, _ in rows] == [
        (step, {"reward/mean": 0.5}) for step in (1, 2)
    ]
    assert len({name for *_, name in rows}) == 1
    assert b"secret" not in bytes(settings, "utf8") if isinstance(settings, str) else b"secret" not in settings


def test_every_tracker_gets_every_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: dict[str, list[str]] = {}

    class Recorder:
        def __init__(self, name: str) -> None:
            self.name = name

        def write(self, step: int, numbers: dict[str, float]) -> None:
            written[self.name] = sorted(numbers)

        def close(self) -> None:
            written[f"{self.name} closed"] = []

    for name in sinks.SINKS:
        monkeypatch.setitem(sinks.SINKS, name, lambda config, steps_done, name=name: Recorder(name))
    config = config_of(tmp_path, "tensorboard", "trackio", use_wandb=True)
    assert config.trackers == ("tensorboard", "trackio", "wandb")
    log = build_metric_log(config, RunConsole(Console(file=(tmp_path / "out").open("w")), 3), 0)
    log.log(1, {"reward/mean": Mean(1.0)})
    log.close()
    (row,) = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    for name in ("wandb", "tensorboard", "trackio"):
        assert written[name] == sorted(set(row) - {"format", "step", "time"}) and f"{name} closed" in written
