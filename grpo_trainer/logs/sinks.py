"""Where a step's numbers go: a line on the console, an object in metrics.jsonl, trackers on request."""

from __future__ import annotations

import json
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol, TextIO

from rich.console import Console

from grpo_trainer.config.train import TrainConfig
from grpo_trainer.files import METRICS_FILE
from grpo_trainer.logs.machine import machine_metrics
from grpo_trainer.logs.trackers import SINKS
from grpo_trainer.metrics.health import BEGIN, WINDOW, Row, episodes, first_entropy, flagged, flags, signs
from grpo_trainer.metrics.remaining import RECENT, duration, seconds_left
from grpo_trainer.metrics.rows import keep_steps, read_rows
from grpo_trainer.metrics.types import Metrics, merge, reduce

log = logging.getLogger(__name__)


class Sink(Protocol):
    """Takes the numbers of one step."""

    def write(self, step: int, numbers: dict[str, float]) -> None: ...

    def close(self) -> None: ...


class MetricLog:
    """Reduces a step's metrics once and hands them to every sink.

    Args:
        earlier: rows of the steps that a resumed run has behind it; its next row has `train/resumed`.
        say: takes a line about each figure that leaves its usual range, the first time that it does.
    """

    def __init__(
        self, sinks: Sequence[Sink], earlier: Sequence[Row] = (), say: Callable[[str], None] = log.warning
    ) -> None:
        self._sinks = sinks
        self._first: list[Row] = list(earlier[:BEGIN])
        self._recent: deque[Row] = deque(earlier[-WINDOW:], maxlen=WINDOW)
        self._resumed = bool(earlier)
        self._said = {*episodes(earlier)}
        self._say = say
        machine_metrics()  # utilisation counts from here on
        self._last = time.perf_counter()

    def log(self, step: int, *parts: Metrics) -> dict[str, float]:
        """Write the metrics of `step` (steps done, from 1)."""
        now = time.perf_counter()
        seconds, self._last = now - self._last, now
        numbers = reduce(merge(parts))
        numbers["train/seconds"] = seconds
        numbers["train/tokens_per_second"] = numbers.get("batch/tokens", 0.0) / seconds
        numbers |= machine_metrics()
        if self._resumed:
            numbers["train/resumed"] = 1.0
            self._resumed = False
        if len(self._first) < BEGIN:
            self._first.append(numbers)
        self._recent.append(numbers)
        found = signs([*self._recent], first_entropy(self._first))
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
    """One JSON object a step, `{"step": …, "time": Unix seconds, key: number, …}`, flushed at once."""

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
            self._file.write(json.dumps({"step": step, "time": time.time(), **finite}) + "\n")
            self._file.flush()
        except OSError as error:
            error.filename = str(self._path)  # a write error knows no name
            raise

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


class ConsoleSink:
    """One aligned line a step, and one for each evaluation."""

    def __init__(self, console: Console, total_steps: int) -> None:
        self._console = console
        self._total = total_steps
        self._explained = False
        self._recent: deque[float] = deque(maxlen=RECENT)

    def write(self, step: int, numbers: dict[str, float]) -> None:
        if "train/seconds" in numbers:
            self._recent.append(numbers["train/seconds"])
        left = seconds_left(self._total - step, self._recent)
        line = step_line(step, self._total, numbers, left)
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)
        for evaluation in evaluation_lines(numbers):
            self._console.print(evaluation, markup=False, highlight=False, soft_wrap=True)
        learnt = "grpo/mean_ratio" in numbers
        if not self._explained and learnt and abs(numbers.get("train/loss", 1.0)) < 1e-3:
            self._explained = True
            self._console.print(
                "(a loss near 0 is right: the ratio is about 1 and advantages sum to 0; watch the reward)",
                style="dim",
                soft_wrap=True,
            )

    def close(self) -> None:
        pass


def step_line(step: int, total: int, numbers: dict[str, float], left: float | None = None) -> str:
    """A step in one line: reward, loss, ratio, staleness, groups without a spread, tokens/s, seconds, time left, and
    which figures are out of their usual range.

    What there is no number of is left out; a step that taught nothing says so in the place of loss and ratio.

    Args:
        left: seconds that the run still takes, if they are known.
    """
    served = "publish/served_version" if "publish/served_version" in numbers else "publish/version"

    def part(form: str, key: str) -> str:
        return form.format(numbers[key]) if key in numbers else ""

    learnt = [part("loss {:+.4f}", "train/loss"), part("ratio {:.3f}", "grpo/mean_ratio")]
    seconds = [
        part("wait {:.2f}", "train/data_fetch_time"),
        part("step {:.2f}", "train/step_time"),
        part("publish {:.3f} s", "train/sync_time"),
    ]
    parts = [
        f"Step {step:>{len(str(total))}}/{total}",
        part("reward {:.3f}", "reward/mean"),
        *(learnt if "grpo/mean_ratio" in numbers else ["nothing to learn: no group has a spread of rewards"]),
        part("stale {:.1f}", "rollout/staleness_mean"),
        part("zero-var {:.0%}", "batch/zero_variance_share"),
        part("{:,.0f} tok/s", "train/tokens_per_second"),
        " ".join(filter(None, seconds)),
        part("v{:.0f}", served),  # older than what was published, where restarts are far between
        f"{duration(left)} left" if left else "",
        f"OUT OF RANGE: {', '.join(unusual)}" if (unusual := flagged(numbers)) else "",
    ]
    return "  ".join(filter(None, parts))


def evaluation_lines(numbers: dict[str, float]) -> list[str]:
    """A line for each environment that was evaluated: at which step, and each figure with its confidence interval."""
    found: dict[str, dict[str, float]] = {}
    for key, value in numbers.items():
        if key.startswith("eval/"):
            _, name, figure = key.split("/", 2)
            found.setdefault(name, {})[figure] = value
    return [_evaluation_line(name, figures) for name, figures in found.items()]


def _evaluation_line(name: str, figures: dict[str, float]) -> str:
    parts = []
    for key, value in figures.items():
        base, _, bound = key.rpartition("_")
        if key == "step" or (bound in ("low", "high") and base in figures):
            continue
        low, high = figures.get(f"{key}_low"), figures.get(f"{key}_high")
        parts.append(
            f"{key} {value:.4g}" + (f" ({low:.3g} to {high:.3g})" if low is not None and high is not None else "")
        )
    return f"Evaluation of {name} at step {figures.get('step', 0):.0f}: {', '.join(parts)}"


def build_metric_log(config: TrainConfig, console: Console, steps_done: int) -> MetricLog:
    """The sinks that the configuration asks for; `steps_done` steps were logged before."""
    path = config.log_dir / METRICS_FILE
    sinks: list[Sink] = [JsonlSink(path, steps_done), ConsoleSink(console, config.training_steps)]
    sinks += [SINKS[tracker](config, steps_done) for tracker in config.logging.trackers]
    earlier = read_rows(path) if path.exists() else []
    return MetricLog(sinks, earlier)
