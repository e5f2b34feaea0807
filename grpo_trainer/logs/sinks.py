"""Where a step's numbers go: the console, an object in metrics.jsonl, trackers on request (`--log-to`)."""

from __future__ import annotations

import importlib
import json
import logging
import math
import os
import re
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Protocol, TextIO
from uuid import uuid4

import psutil
import pynvml

from grpo_common.formats import KEY, ROWS_FORMAT
from grpo_common.redaction import redacted
from grpo_trainer.config.train import TrainConfig
from grpo_trainer.files import METRICS_FILE, replace_file
from grpo_trainer.logs.console import RunConsole
from grpo_trainer.metrics.health import WINDOW, Row, baseline, episodes, flags, signs
from grpo_trainer.metrics.rows import keep_steps, read_rows
from grpo_trainer.metrics.types import Metrics, merge, reduce

log = logging.getLogger(__name__)

RUN_ID_FILE = "tracked_as"
"""In the log folder."""
GIB = 2.0**30


class Sink(Protocol):
    """Takes the numbers of one step."""

    def write(self, step: int, numbers: dict[str, float]) -> None: ...

    def close(self) -> None: ...


class MetricLog:
    """Reduces a step's metrics once and hands them to every sink; warns once of a figure that leaves its usual range.

    A step's seconds are from the end of the step before to its own, without waiting for the last evaluation; those of
    the first one are from `start`. After the `earlier` rows of a resumed run, its next row has `train/resumed`.
    """

    def __init__(
        self, sinks: Sequence[Sink], earlier: Sequence[Row] = (), say: Callable[[str], None] = log.warning
    ) -> None:
        self._sinks = sinks
        self._first = [*earlier[:WINDOW]]
        self._recent: deque[Row] = deque(earlier[-WINDOW:], maxlen=WINDOW)
        self._resumed = bool(earlier)
        self._said = {*episodes(earlier)}
        self._say = say
        self.newest = 0  # step that was logged
        self.start()

    def start(self) -> None:
        """Begin the first step's seconds: what the process did before is its start."""
        machine_metrics()  # utilisation counts from here on
        self._last = time.perf_counter()

    def log(self, step: int, *parts: Metrics) -> dict[str, float]:
        """Write the metrics of `step` (steps done, from 1)."""
        self.newest = step
        now = time.perf_counter()
        seconds, self._last = now - self._last, now
        numbers = reduce(merge(parts))
        seconds -= numbers.get("train/evaluation_time", 0.0)
        numbers["train/seconds"] = seconds
        if numbers.get("batch/sequences_trained"):
            numbers["train/tokens_per_second"] = numbers["batch/tokens"] / seconds
        numbers |= machine_metrics()
        if self._resumed:
            numbers["train/resumed"] = 1.0
            self._resumed = False
        if len(self._first) < WINDOW:
            self._first.append(numbers)
        self._recent.append(numbers)
        found = signs([*self._recent], baseline(self._first))
        numbers |= flags(found)
        for sink in self._sinks:
            sink.write(step, numbers)
        for sign in found:
            if sign.check.name not in self._said:
                self._said.add(sign.check.name)
                self._say(f"out of range since step {step}: {sign}")
        return numbers

    def close(self) -> None:
        with ExitStack() as ends:  # each, whatever happens to the others
            for sink in self._sinks:
                ends.callback(sink.close)


class JsonlSink:
    """One JSON object a step, `{"format": 1, "step": …, "time": Unix seconds, key: number, …}`, flushed at once."""

    def __init__(self, path: Path, steps_done: int = 0) -> None:
        """Append to `path`; rows after `steps_done`, of steps that a resumed run takes again, are dropped.

        The file comes with the first step: a folder without it holds no run, and a start that failed may be repeated.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        keep_steps(path, steps_done)
        self._path = path
        self._file: TextIO | None = None

    def write(self, step: int, numbers: dict[str, float]) -> None:
        finite = {key: value if math.isfinite(value) else None for key, value in sorted(numbers.items())}
        try:
            self._file = self._file or self._path.open("a")
            self._file.write(json.dumps({KEY: ROWS_FORMAT, "step": step, "time": time.time(), **finite}) + "\n")
            self._file.flush()
        except OSError as error:
            error.filename = str(self._path)  # a write error knows no name
            raise

    def close(self) -> None:
        if self._file is not None:
            with suppress(OSError):  # `write` has raised it
                self._file.close()


def machine_metrics() -> dict[str, float]:
    """Return figures of the host, and of the trainer's current GPU if it has one.

    Utilisation is the share of the time since the last call (host), or of the last second at most (GPU). Memory in use
    is that of all processes; a server on the same GPU is in it.
    """
    found = {
        "host/memory_used_gib": psutil.virtual_memory().used / GIB,
        "host/memory_trainer_gib": psutil.Process().memory_info().rss / GIB,
        "host/cpu": psutil.cpu_percent() / 100,
    }
    import torch

    if not torch.cuda.is_initialized():
        return found
    free, total = torch.cuda.mem_get_info()
    found |= {
        "gpu/memory_used_gib": (total - free) / GIB,
        "gpu/memory_trainer_gib": torch.cuda.memory_reserved() / GIB,
    }
    # Of a slice of a GPU (MIG), NVIDIA's library does not say it; and a figure is no reason to end a run.
    with suppress(pynvml.NVMLError, RuntimeError):
        found["gpu/utilisation"] = torch.cuda.utilization() / 100
    return found


# Trackers of others: the keys are those of metrics.jsonl


def public(config: TrainConfig) -> dict[str, Any]:
    """The configuration with its secrets hidden."""
    return redacted(config.model_dump(mode="json"))


def run_id(config: TrainConfig, steps_done: int) -> str:
    """Return a tracker's id of this run. It is kept in the log folder, so a resumed run has the same.

    Without steps done before, the run begins, and what lies there is of another.
    """
    path = config.log_dir / RUN_ID_FILE
    kept = path.read_bytes().decode(errors="replace").strip() if steps_done and path.is_file() else ""
    if not re.fullmatch(r"[\w-]{1,64}", kept):
        kept = uuid4().hex[:12]
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, f"{kept}\n".encode())
    return kept


class RunSink:
    """A program that logs runs. A resumed run does not change steps that it has."""

    def __init__(self, program: str, config: TrainConfig, **more: Any) -> None:
        self._run = importlib.import_module(program).init(
            resume="allow",
            project=config.wandb_project or "grpo",
            group=config.wandb_group,
            config=public(config),
            **more,
        )

    def write(self, step: int, numbers: dict[str, float]) -> None:
        self._run.log(numbers, step=step)

    def close(self) -> None:
        self._run.finish()


class WandbSink(RunSink):
    """Weights & Biases; offline with WANDB_MODE=offline."""

    def __init__(self, config: TrainConfig, steps_done: int = 0) -> None:
        own = os.environ.get("WANDB_RUN_ID") or run_id(config, steps_done)
        super().__init__("wandb", config, id=own, dir=str(config.log_dir))


class TrackioSink(RunSink):
    """trackio's database on this machine (TRACKIO_DIR, by default in Hugging Face's cache): `trackio show`."""

    def __init__(self, config: TrainConfig, steps_done: int = 0) -> None:
        name = f"{config.log_dir.absolute().name}-{run_id(config, steps_done)}"  # identifies the run
        # Figures of the machine would be under keys that trackio chooses.
        super().__init__("trackio", config, name=name, embed=False, auto_log_gpu=False, auto_log_cpu=False)

    def write(self, step: int, numbers: dict[str, float]) -> None:
        super().write(step, {key: value for key, value in numbers.items() if math.isfinite(value)})  # JSON has no NaN


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


SINKS = {"wandb": WandbSink, "tensorboard": TensorBoardSink, "trackio": TrackioSink}


def build_metric_log(config: TrainConfig, console: RunConsole, steps_done: int) -> MetricLog:
    """The sinks that the configuration asks for; `steps_done` steps were logged before."""
    path = config.log_dir / METRICS_FILE
    sinks: list[Sink] = [JsonlSink(path, steps_done), console]
    sinks += [SINKS[tracker](config, steps_done) for tracker in config.trackers]
    earlier = read_rows(path)
    for row in earlier:
        console.remember(row)
    return MetricLog(sinks, earlier)
