"""Where a step's numbers go: the console, an object in metrics.jsonl, trackers on request."""

from __future__ import annotations

import json
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol, TextIO

from grpo_common.formats import KEY, ROWS_FORMAT
from grpo_trainer.config.train import TrainConfig
from grpo_trainer.files import METRICS_FILE
from grpo_trainer.logs.console import RunConsole
from grpo_trainer.logs.machine import machine_metrics
from grpo_trainer.logs.trackers import SINKS
from grpo_trainer.metrics.health import WINDOW, Row, baseline, episodes, flags, signs
from grpo_trainer.metrics.rows import keep_steps, rows_so_far
from grpo_trainer.metrics.types import Metrics, merge, reduce

log = logging.getLogger(__name__)


class Sink(Protocol):
    """Takes the numbers of one step."""

    def write(self, step: int, numbers: dict[str, float]) -> None: ...

    def close(self) -> None: ...


class MetricLog:
    """Reduces a step's metrics once and hands them to every sink.

    A step's seconds are from the end of the step before to its own, without waiting for the last evaluation; those of
    the first one are from `start`.

    Args:
        earlier: rows of the steps that a resumed run has behind it; its next row has `train/resumed`.
        say: takes a line about each figure that leaves its usual range, the first time that it does.
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
        self.start()

    def start(self) -> None:
        """Begin the first step's seconds: what the process did before is its start."""
        machine_metrics()  # utilisation counts from here on
        self._last = time.perf_counter()

    def log(self, step: int, *parts: Metrics) -> dict[str, float]:
        """Write the metrics of `step` (steps done, from 1)."""
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
        for sink in self._sinks:
            sink.close()


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
            self._file.close()


def build_metric_log(config: TrainConfig, console: RunConsole, steps_done: int) -> MetricLog:
    """The sinks that the configuration asks for; `steps_done` steps were logged before."""
    path = config.log_dir / METRICS_FILE
    sinks: list[Sink] = [JsonlSink(path, steps_done), console]
    sinks += [SINKS[tracker](config, steps_done) for tracker in config.logging.trackers]
    earlier = rows_so_far(path)
    for row in earlier:
        console.remember(row)
    return MetricLog(sinks, earlier)
