"""Trackers of others, on request (`--log-to`): the keys are those of metrics.jsonl."""

from __future__ import annotations

import importlib
import math
from types import ModuleType
from typing import Any

from grpo_trainer.config import TrainConfig
from grpo_trainer.errors import ConfigError

PACKAGES = {"wandb": "wandb", "tensorboard": "tensorboard", "trackio": "trackio"}
"""Tracker -> what has to be installed for it."""

DEFAULT_PROJECT = "grpo"


def public(config: TrainConfig) -> dict[str, Any]:
    """The configuration without its keys to servers."""
    return config.model_dump(mode="json", exclude={"rollouts": {"api_key"}, "vllm": {"api_key"}})


def finite(numbers: dict[str, float]) -> dict[str, float]:
    """What a database of numbers takes: JSON has no NaN."""
    return {key: value for key, value in numbers.items() if math.isfinite(value)}


class WandbSink:
    """Weights & Biases; offline with WANDB_MODE=offline."""

    def __init__(self, config: TrainConfig) -> None:
        logging = config.logging
        self._run = load("wandb").init(
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

    def __init__(self, config: TrainConfig) -> None:
        self._writer = load("tensorboard", "tensorboard.summary").Writer(str(config.log_dir / "tensorboard"))

    def write(self, step: int, numbers: dict[str, float]) -> None:
        for key, value in numbers.items():
            self._writer.add_scalar(key, value, step=step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class TrackioSink:
    """trackio's database on this machine (TRACKIO_DIR, by default in Hugging Face's cache): `trackio show`."""

    def __init__(self, config: TrainConfig) -> None:
        logging = config.logging
        self._run = load("trackio").init(
            project=logging.wandb_project or DEFAULT_PROJECT,
            group=logging.wandb_group,
            config=public(config),
            embed=False,
            auto_log_gpu=False,  # under keys of its own
            auto_log_cpu=False,
        )

    def write(self, step: int, numbers: dict[str, float]) -> None:
        self._run.log(finite(numbers), step=step)

    def close(self) -> None:
        self._run.finish()


SINKS = {"wandb": WandbSink, "tensorboard": TensorBoardSink, "trackio": TrackioSink}


def load(tracker: str, module: str | None = None) -> ModuleType:
    """Import a tracker's package.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        return importlib.import_module(module or tracker)
    except ImportError:
        raise ConfigError(
            f"--log-to {tracker}: {PACKAGES[tracker]} is not installed; pip install {PACKAGES[tracker]}"
        ) from None
