"""Trackers of others, on request (`--log-to`): the keys are those of metrics.jsonl."""

from __future__ import annotations

import importlib
import math
import os
import re
from typing import Any
from uuid import uuid4

from grpo_common.redaction import redacted
from grpo_trainer.config.train import TrainConfig
from grpo_trainer.files import replace_file

DEFAULT_PROJECT = "grpo"
RUN_ID_FILE = "tracked_as"
"""In the log folder."""


def public(config: TrainConfig) -> dict[str, Any]:
    """The configuration with its secrets hidden."""
    return redacted(config.model_dump(mode="json"))


def run_id(config: TrainConfig, steps_done: int) -> str:
    """Return a tracker's id of this run. It is kept in the log folder, so a resumed run has the same.

    Args:
        steps_done: that it has taken before; 0: it begins, and what lies there is of another.
    """
    path = config.log_dir / RUN_ID_FILE
    kept = path.read_bytes().decode(errors="replace").strip() if steps_done and path.is_file() else ""
    if not re.fullmatch(r"[\w-]{1,64}", kept):
        kept = uuid4().hex[:12]
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, f"{kept}\n".encode())
    return kept


class WandbSink:
    """Weights & Biases; offline with WANDB_MODE=offline. A resumed run does not change steps that W&B has."""

    def __init__(self, config: TrainConfig, steps_done: int = 0) -> None:
        logging = config.logging
        self._run = importlib.import_module("wandb").init(
            id=os.environ.get("WANDB_RUN_ID") or run_id(config, steps_done),
            resume="allow",
            project=logging.wandb_project or DEFAULT_PROJECT,
            group=logging.wandb_group,
            dir=str(config.log_dir),
            config=public(config),
        )

    def write(self, step: int, numbers: dict[str, float]) -> None:
        self._run.log(numbers, step=step)

    def close(self) -> None:
        self._run.finish()


class TensorBoardSink:
    """TensorBoard's event files in LOG_DIR/tensorboard: `tensorboard --logdir LOG_DIR`."""

    def __init__(self, config: TrainConfig, steps_done: int = 0) -> None:
        self._writer = importlib.import_module("tensorboard.summary").Writer(str(config.log_dir / "tensorboard"))

    def write(self, step: int, numbers: dict[str, float]) -> None:
        for key, value in numbers.items():
            self._writer.add_scalar(key, value, step=step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class TrackioSink:
    """trackio's database on this machine (TRACKIO_DIR, by default in Hugging Face's cache): `trackio show`."""

    def __init__(self, config: TrainConfig, steps_done: int = 0) -> None:
        logging = config.logging
        self._run = importlib.import_module("trackio").init(
            name=f"{config.log_dir.absolute().name}-{run_id(config, steps_done)}",  # identifies the run
            resume="allow",
            project=logging.wandb_project or DEFAULT_PROJECT,
            group=logging.wandb_group,
            config=public(config),
            embed=False,
            auto_log_gpu=False,  # under keys that trackio chooses
            auto_log_cpu=False,
        )

    def write(self, step: int, numbers: dict[str, float]) -> None:
        finite = {key: value for key, value in numbers.items() if math.isfinite(value)}  # JSON has no NaN
        self._run.log(finite, step=step)

    def close(self) -> None:
        self._run.finish()


SINKS = {"wandb": WandbSink, "tensorboard": TensorBoardSink, "trackio": TrackioSink}
