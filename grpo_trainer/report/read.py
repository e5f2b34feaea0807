"""A run's folder as the report needs it. Everything but metrics.jsonl may be missing."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_common.trace import read_events
from grpo_trainer.config.run import TRACE_FILE
from grpo_trainer.errors import ConfigError
from grpo_trainer.files import METRICS_FILE
from grpo_trainer.logs.samples import SAMPLES_FILE
from grpo_trainer.metrics.health import Episode, episodes
from grpo_trainer.metrics.rows import read_rows
from grpo_trainer.report.series import Series, read_environments, read_series
from grpo_trainer.report.timeline import Interval, intervals
from grpo_trainer.saving.manifest import STATE_FILE, DamagedError, read_state

SECRET = re.compile(r"(?m)^(\s*\S*(?:api_key|token|secret|password)\S*\s*=\s*)(.+)$")
"""A line of TOML that nobody else should read."""
NO_SECRET = frozenset({"token_budget"})
LOUD = re.compile(r"\b(WARNING|ERROR|CRITICAL)\b")
PLACES = re.compile(r"^\$ |^\(\w+ pid=\d+\) |\d+")
"""What differs between two lines that say the same: who said it, when, and its figures."""
STARTED, SHUTDOWN = "Application startup complete.", "[shutdown]"
"""What ends a server's start in its log, and what begins its end. vLLM warns of dozens of things before and after."""
COMMAND = "$ "
"""How the line begins with which the supervisor starts a process."""
CONFIG_FILE = Path("config", "trainer.toml")
NEWEST_LINES, LOG_BYTES = 60, 1 << 20
"""Of each log: how many loud lines are shown, out of how much of its end."""


@dataclass(frozen=True)
class Event:
    """Something out of the ordinary.

    Attributes:
        routine: a warning of a server that was starting, or anything from one that was ending; there are always some.
    """

    source: str
    text: str
    routine: bool = False


@dataclass(frozen=True)
class Run:
    """A run's folder.

    Attributes:
        rows: of metrics.jsonl, one a step.
        unhealthy: the episodes during which a figure was out of its usual range, by name of the check.
        series: every figure over its steps, those of environments under their names.
        samples: of samples.jsonl, with names of environments.
        configs: process -> its TOML file, without secrets.
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
    configs: Mapping[str, str]
    events: Sequence[Event]
    total_steps: int | None
    checkpoints: Sequence[str]
    final_step: int | None = None
    timeline: Sequence[Interval] = ()

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
        """The trainer's options, flat; secrets are left out."""
        return {key: value for key, value in tomllib.loads(self.configs.get("trainer", "")).items() if value != "…"}


def is_done(steps: int, total_steps: int | None, final_step: int | None) -> bool:
    """All steps are taken; one that was resumed for more of them has an older end in its folder."""
    if total_steps is not None:
        return steps >= total_steps
    return steps > 0 and final_step == steps


def read_settings(folder: Path) -> dict[str, Any]:
    """The trainer's options in a run's folder, with secrets; none if it was started by hand."""
    path = folder / CONFIG_FILE
    return tomllib.loads(path.read_text()) if path.exists() else {}


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
    rows = read_rows(path) if path.exists() else []
    series, environments = read_series(rows, read_environments(folder / "logs"))
    samples = read_rows(folder / SAMPLES_FILE) if (folder / SAMPLES_FILE).exists() else []
    for sample in samples:
        number = sample["environment"]
        sample["environment"] = None if number is None else environments.get(number, f"environment {number}")
    configs = {file.stem: without_secrets(file.read_text()) for file in sorted((folder / "config").glob("*.toml"))}
    steps = tomllib.loads(configs.get("trainer", "")).get("training_steps")
    return Run(
        name=folder.resolve().name,
        folder=folder,
        rows=rows,
        unhealthy=episodes(rows),
        series=series,
        samples=samples,
        configs=configs,
        events=[*_steps_out_of_the_ordinary(rows), *_loud_lines(folder / "logs")],
        total_steps=int(steps) if steps is not None else None,
        checkpoints=_checkpoints(folder / "checkpoints"),
        final_step=final_step(folder / "checkpoints"),
        timeline=_timeline(folder / TRACE_FILE),
    )


def _timeline(path: Path) -> list[Interval]:
    try:
        return intervals(read_events(path)) if path.exists() else []
    except ValueError as error:
        raise ConfigError(field=str(path), got=str(error), wanted="a timeline that --trace wrote") from None


def without_secrets(toml: str) -> str:
    """The same with keys to servers replaced."""
    return SECRET.sub(lambda match: match[0] if _is_harmless(match) else f'{match[1]}"…"', toml)


def _is_harmless(match: re.Match[str]) -> bool:
    """Numbers, and names of tokenizers and budgets, are no secrets."""
    key, value = match[1].strip().rstrip("=").strip(), match[2].strip()
    return "tokenizer" in key or value.replace(".", "").isdigit() or key in NO_SECRET


def _checkpoints(folder: Path) -> list[str]:
    if not folder.is_dir():
        return []
    found = [path for path in folder.iterdir() if (path / STATE_FILE).exists() and not path.name.startswith(".")]
    return [path.name for path in sorted(found, key=lambda path: path.stat().st_mtime)]


def final_step(folder: Path) -> int | None:
    """Of the newest `*_final`, which is being written or replaced while this looks."""
    steps = []
    for path in folder.glob("*_final"):
        with suppress(OSError, DamagedError):
            steps.append(read_state(path).progress.step)
    return max(steps, default=None)


def _steps_out_of_the_ordinary(rows: Sequence[Mapping[str, Any]]) -> list[Event]:
    told = {
        "train/skipped": "skipped: nothing to learn from, or a loss or gradient that is not finite",
        "rollout/dropped_stale_groups": "groups dropped as too old",
        "rollout/refused_groups": "groups left out that can't be trained on",
    }
    found = []
    for row in rows:
        for key, text in told.items():
            if (value := row.get(key)) and value > 0:
                found.append(Event(f"step {row['step']}", f"{value:g} × {text}"))
        if "train/loss" in row and row["train/loss"] is None:
            found.append(Event(f"step {row['step']}", "the loss was not finite"))
    return found


def _loud_lines(folder: Path) -> list[Event]:
    """The newest warnings and errors of each process, equal ones once."""
    found = []
    for path in sorted(folder.glob("*.log")):
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - LOG_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
        loud = {PLACES.sub("", event.text): event for event in _loud(path.stem, lines)}
        found += list(loud.values())[-NEWEST_LINES:]
    return found


def _loud(source: str, lines: Sequence[str]) -> Iterator[Event]:
    starts = STARTED in "\n".join(lines)
    starting = starts and not any(line.startswith(COMMAND) for line in lines)  # a log that nobody else began
    ending = False
    for line in lines:
        if line.startswith(COMMAND):
            starting, ending = starts, False
        elif STARTED in line:
            starting = False
        ending = ending or SHUTDOWN in line
        if found := LOUD.search(line):
            routine = ending or (starting and found[1] == "WARNING")
            yield Event(source, without_secrets(line.strip())[:400], routine)
