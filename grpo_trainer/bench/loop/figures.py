"""Computes the figures of `grpo bench loop` from rows of metrics.jsonl and samples of the processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from grpo_trainer.bench.loop.options import GROUP, LAST_STEPS
from grpo_trainer.errors import ConfigError

Row = Mapping[str, Any]
"""A step of metrics.jsonl."""

SPLIT = {
    "wait_s": "train/data_fetch_time",
    "step_s": "train/step_time",
    "publish_s": "train/sync_time",
    "save_s": "train/save_time",
}
"""Consecutive parts of a training step -> the metric of their seconds."""
BENCH = "bench"
"""Role of this process, which samples the others."""
CPU_ROLES = {
    "environment": "environment",
    "api": "api",
    "server": "server_front_end",
    "engine": "server_engine",
    "trainer": "trainer",
    "run": "supervisor",
    BENCH: "bench",
}
"""Role of a process -> the name under which its CPU time is reported."""


@dataclass(frozen=True)
class Window:
    """The measured period, in Unix seconds, and its steps."""

    begin: float
    end: float
    rows: Sequence[Row]

    @classmethod
    def of(cls, rows: Sequence[Row], warmup_steps: int) -> Window:
        """Return the steps after the first `warmup_steps` and before the last `LAST_STEPS`.

        Raises:
            ConfigError: there is none.
        """
        measured = rows[warmup_steps : max(0, len(rows) - LAST_STEPS)]
        if not measured:
            raise ConfigError(
                "no step is left to measure",
                field="--warmup-steps",
                got=f"{warmup_steps}, of {len(rows)} steps that the run took",
                wanted=f"fewer than the run takes, less {LAST_STEPS}",
            )
        return cls(rows[warmup_steps - 1]["time"], measured[-1]["time"], measured)

    def total(self, key: str) -> float:
        """Return a metric's sum over the steps; steps without it count as 0."""
        return sum(row.get(key) or 0.0 for row in self.rows)

    @property
    def seconds(self) -> float:
        return self.total("train/seconds")

    @property
    def groups(self) -> float:
        return self.total("batch/sequences") / GROUP


@dataclass(frozen=True)
class Look:
    """One sample of a run's processes.

    Attributes:
        time: Unix seconds.
        cpu_s: role -> CPU seconds of its processes, including ended ones.
    """

    time: float
    cpu_s: Mapping[str, float]


@dataclass(frozen=True)
class Load:
    """One answer of the server about its load.

    Attributes:
        time: Unix seconds.
        running: number of running sequences; 0 while the server is away.
    """

    time: float
    running: float


def step_figures(window: Window) -> dict[str, Any]:
    """Return speed and split of a mean step, in seconds and in tokens per second.

    Completion tokens are those of the completions that were trained on; trained tokens are those and their prompts.
    """
    steps, seconds = len(window.rows), window.seconds
    split = {name: window.total(key) / steps for name, key in SPLIT.items()}
    split["step_s"] -= sum(map(fenced, window.rows)) / steps
    split["other_s"] = max(0.0, seconds / steps - sum(split.values()))
    completions = window.total("batch/trained_tokens")
    return {
        "step_s": _short(seconds / steps),
        "completion_tokens_per_s": round(completions / seconds, 1),
        "trained_tokens_per_s": round(window.total("batch/tokens") / seconds, 1),
        "completion_tokens_mean": round(completions / window.total("batch/sequences"), 1),
        "split": {name: _short(value) for name, value in split.items()},
        "checkpoint_share": _short(window.total("train/save_time") / seconds),
        "staleness": {
            "mean": _short(window.total("rollout/staleness_mean") / steps),
            "max": max(row.get("rollout/staleness_max") or 0.0 for row in window.rows),
        },
    }


def fenced(row: Row) -> float:
    """Return the seconds of publishing that lie within the step: of shared weights it is a fence around the update.

    Weights that are sent are written within a fence, too, but after the step.
    """
    is_shared = "publish/write_time" in row and "publish/send_time" not in row
    return row["train/sync_time"] if is_shared else 0.0


def cpu_per_group(window: Window, looks: Sequence[Look]) -> dict[str, float]:
    """Return milliseconds of CPU for each group that was trained on, by role.

    Args:
        looks: at least one, in order; between two of them a process is taken to use its CPU evenly.
    """
    times = [look.time for look in looks]

    def used(role: str) -> float:
        cpu_s = [look.cpu_s.get(role, 0.0) for look in looks]
        begin, end = np.interp([window.begin, window.end], times, cpu_s)
        return float(end - begin)

    return {name: _short(1e3 * used(role) / window.groups) for role, name in CPU_ROLES.items()}


def can_hold(cache_tokens: int | None, max_num_seqs: int | None, sequence_tokens: float) -> int | None:
    """Return how many sequences of this mean length a server can work on at once; None: it says no limit.

    Args:
        cache_tokens: tokens that its KV cache has room for.
        max_num_seqs: vLLM's own limit.
    """
    by_cache = None if cache_tokens is None else int(cache_tokens / sequence_tokens)
    limits = [limit for limit in (by_cache, max_num_seqs) if limit is not None]
    return min(limits, default=None)


def server_figures(window: Window, loads: Sequence[Load], holds: int | None) -> dict[str, Any]:
    """Return how busy the server was: sequences that ran, and the share of the time below half of what it can hold.

    Args:
        holds: see `can_hold`.
    """
    running = [load.running for load in loads if window.begin <= load.time <= window.end]
    below = None if holds is None else sum(each < holds / 2 for each in running)
    return {
        "running_mean": round(sum(running) / len(running), 1) if running else None,
        "can_hold": holds,
        "below_half_share": _short(below / len(running)) if running and below is not None else None,
        "looks": len(running),
    }


def start_figures(began: float, seen: Mapping[str, float], first: Row) -> dict[str, float]:
    """Return when each phase of the start was reached, in seconds since the command, in their order.

    Args:
        began: when the command was started, in Unix seconds.
        seen: phase -> when it was seen to be reached, in Unix seconds.
        first: the first step. It was over when its row was written; before that it published, trained and waited.
    """
    batch = first["time"] - first["train/step_time"] - first["train/sync_time"] + fenced(first)
    reached = {
        **seen,
        "trainer_ready": batch - first["train/data_fetch_time"],
        "first_batch": batch,
        "first_step": first["time"],
    }
    return {phase: round(moment - began, 2) for phase, moment in sorted(reached.items(), key=lambda item: item[1])}


def _short(value: float) -> float:
    """Round to four significant digits."""
    return float(f"{value:.4g}")
