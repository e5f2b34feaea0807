"""A run's folder as the report needs it. Everything but metrics.jsonl may be missing."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_common.redaction import HIDDEN, Redaction, redact
from grpo_common.trace import read_events as read_trace
from grpo_trainer.config.run import SET_BY_THE_RUN, TRACE_FILE
from grpo_trainer.errors import ConfigError
from grpo_trainer.files import METRICS_FILE, SAMPLES_FILE, folders_named
from grpo_trainer.launch.plan import SET_FOR_ENVIRONMENTS
from grpo_trainer.metrics.health import Episode, episodes
from grpo_trainer.metrics.rows import Check, Row, a_sample, figures, read_file
from grpo_trainer.report.events import Event, read_events
from grpo_trainer.report.series import Series, read_environments, read_series
from grpo_trainer.report.timeline import Interval, intervals
from grpo_trainer.saving.manifest import STATE_FILE, DamagedError, read_state

DERIVED = frozenset({*SET_BY_THE_RUN, "resume"})
"""Options of the trainer that a run sets, or that say nothing of what was trained."""
CONFIG_FILE = Path("config", "trainer.toml")


@dataclass(frozen=True)
class Run:
    """A run's folder.

    Attributes:
        rows: of metrics.jsonl, one a step.
        unhealthy: the episodes during which a figure was out of its usual range, by name of the check.
        series: every figure over its steps, those of environments under their names.
        samples: of samples.jsonl, with names of environments.
        configs: process -> the tables of its file, without secrets.
        unreadable: what of the folder could not be read, and is left out, as sentences.
        total_steps: what it set out to do; None: not known.
        checkpoints: names of the folders.
        final_step: the step of what the run left at its end; None: there is none.
        timeline: the stages that `--trace` recorded.
    """

    name: str
    folder: Path
    rows: Sequence[Mapping[str, Any]]
    unhealthy: Mapping[str, Sequence[Episode]]
    series: Mapping[str, Series]
    samples: Sequence[Mapping[str, Any]]
    configs: Mapping[str, Mapping[str, Any]]
    events: Sequence[Event]
    total_steps: int | None
    checkpoints: Sequence[str]
    final_step: int | None = None
    timeline: Sequence[Interval] = ()
    unreadable: Sequence[str] = ()

    @property
    def steps(self) -> int:
        return int(self.rows[-1]["step"]) if self.rows else 0

    @property
    def is_done(self) -> bool:
        return is_done(self.steps, self.total_steps, self.final_step)

    @property
    def resumed(self) -> list[int]:
        """The first step after each time that the run was resumed."""
        return [row["step"] for row in self.rows if row.get("train/resumed")]

    def numbers(self, key: str) -> list[float]:
        """What was measured and finite."""
        return [value for value in self.series.get(key, Series()).values if value is not None]

    @property
    def settings(self) -> dict[str, Any]:
        """What the user set for the trainer and, as `NAME.OPTION`, for environments; without secrets."""
        found = {key: value for key, value in self.configs.get("trainer", {}).items() if key not in DERIVED}
        for name, tables in self.configs.items():
            if not name.startswith("env-"):
                continue
            kind, own = name.removeprefix("env-"), tables.get("env")
            own = own if isinstance(own, Mapping) else {}
            found |= {f"{kind}.{key}": value for key, value in own.items() if key not in SET_FOR_ENVIRONMENTS}
            data = tables.get("data")
            found |= {f"{kind}.data.{key}": value for key, value in (data if isinstance(data, Mapping) else {}).items()}
            if rewards := tables.get("rewards"):
                found[f"{kind}.rewards"] = rewards
        return {key: value for key, value in found.items() if value != HIDDEN}


def is_done(steps: int, total_steps: int | None, final_step: int | None) -> bool:
    """All steps are taken; one that was resumed for more of them has an older end in its folder."""
    if total_steps is not None:
        return steps >= total_steps
    return steps > 0 and final_step == steps


def read_settings(folder: Path) -> dict[str, Any]:
    """The trainer's options in a run's folder, with secrets; none if it was started by hand, or by another user."""
    path = folder / CONFIG_FILE
    return tomllib.loads(path.read_bytes().decode("utf-8-sig")) if os.access(path, os.R_OK) else {}


def read_run(folder: Path, *, may_be_empty: bool = False) -> Run:
    """Read a run's folder.

    Args:
        may_be_empty: a run that is only starting has no step yet.

    Raises:
        ConfigError: it holds no run.
    """
    path = folder / METRICS_FILE
    if not path.exists() and not (may_be_empty and folder.is_dir()):
        raise ConfigError(
            field=str(folder), got=f"no {METRICS_FILE}", wanted="a run's folder (--run-dir, or --log-dir)"
        )
    unreadable: list[str] = []

    def read(file: Path, check: Check = figures) -> list[Row]:
        found = read_file(file, check)
        unreadable.extend(_left_out(file.relative_to(folder), found.unreadable))
        return found.rows

    rows = read(path)
    own = [read(file) for file in sorted((folder / "logs").glob("env-*.metrics.jsonl"))]
    series, environments = read_series(rows, read_environments(folder / "logs", own))
    samples = read(folder / SAMPLES_FILE, a_sample)
    for sample in samples:
        number = sample["environment"]
        sample["environment"] = None if number is None else environments.get(number, f"environment {number}")
    found = _read_configs(folder / "config", unreadable)
    configs = {name: each.value for name, each in found.items()}
    secrets = {secret for each in found.values() for secret in each.secrets}
    steps = configs.get("trainer", {}).get("training_steps")
    return Run(
        name=folder.resolve().name,
        folder=folder,
        rows=rows,
        unhealthy=episodes(rows),
        series=series,
        samples=samples,
        configs=configs,
        events=read_events(rows, folder / "logs", secrets),
        total_steps=steps if isinstance(steps, int) else None,
        checkpoints=[path.name for path in folders_named(folder / "checkpoints", r"[^.].*", containing=STATE_FILE)],
        final_step=final_step(folder / "checkpoints"),
        timeline=_timeline(folder / TRACE_FILE, unreadable),
        unreadable=unreadable,
    )


def _read_configs(folder: Path, unreadable: list[str]) -> dict[str, Redaction]:
    """Return the tables of each process's file without secrets; say which files can't be read."""
    found = {}
    for path in sorted(folder.glob("*.toml")):
        if not os.access(path, os.R_OK):
            continue  # another user's
        try:
            found[path.stem] = redact(tomllib.loads(path.read_bytes().decode("utf-8-sig")))
        except (OSError, ValueError, RecursionError) as error:
            unreadable.append(f"config/{path.name} is not TOML: {error}")
    return found


def _timeline(path: Path, unreadable: list[str]) -> list[Interval]:
    if not path.exists():
        return []
    events, lines = read_trace(path)
    unreadable += _left_out(path.name, lines)
    return intervals(events)


def _left_out(name: object, lines: int) -> list[str]:
    """Return a sentence about the lines of a file that can't be read; none if there are none."""
    return [f"{name}: {lines} {'line is' if lines == 1 else 'lines are'} unreadable and left out"] if lines else []


def final_step(folder: Path) -> int | None:
    """Of the newest `*_final`, which is being written or replaced while this looks."""
    steps = []
    for path in folder.glob("*_final"):
        with suppress(OSError, DamagedError):
            steps.append(read_state(path).progress.step)
    return max(steps, default=None)
