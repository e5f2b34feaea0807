"""A run's folder as the report needs it: figures over steps, samples, options and events.

Everything but metrics.jsonl may be missing.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from grpo_common.redaction import HIDDEN, Redaction, redact, redacted_text
from grpo_trainer.config.options import read
from grpo_trainer.config.rules import SET_BY_THE_RUN
from grpo_trainer.config.train import TrainConfig
from grpo_trainer.errors import ConfigError
from grpo_trainer.files import METRICS_FILE, SAMPLES_FILE, folders_named
from grpo_trainer.launch.plan import SET_FOR_ENVIRONMENTS
from grpo_trainer.metrics.health import Episode, episodes
from grpo_trainer.metrics.rows import Check, Row, a_sample, figures, read_file
from grpo_trainer.saving.manifest import STATE_FILE, DamagedError, read_state

Rows = Sequence[Mapping[str, Any]]
DERIVED = frozenset({*SET_BY_THE_RUN, "server.port", "server.gpus", "resume"})
"""Options of the trainer that a run sets, or that say nothing of what was trained."""
CONFIG_FILE = Path("config", "trainer.toml")


@dataclass
class Series:
    """Values of one figure over steps; None is a value that was not finite."""

    steps: list[float] = field(default_factory=list)
    values: list[float | None] = field(default_factory=list)


@dataclass(frozen=True)
class Event:
    """Something out of the ordinary."""

    source: str
    text: str
    routine: bool = False
    """A warning of a server that was starting, or anything from one that was ending; there are always some."""


@dataclass(frozen=True)
class Run:
    """A run's folder."""

    name: str
    folder: Path
    rows: Rows
    """Of metrics.jsonl, one a step."""
    unhealthy: Mapping[str, Sequence[Episode]]
    """The episodes during which a figure was out of its usual range, by name of the check."""
    series: Mapping[str, Series]
    """Every figure over its steps, those of environments under their names."""
    samples: Rows
    """Of samples.jsonl, with names of environments."""
    configs: Mapping[str, Mapping[str, Any]]
    """Process -> the tables of its file, without secrets."""
    events: Sequence[Event]
    total_steps: int | None
    """What it set out to do; None: not known."""
    checkpoints: Sequence[str]
    """Names of the folders."""
    final_step: int | None = None
    """The step of what the run left at its end; None: there is none."""
    unreadable: Sequence[str] = ()
    """What of the folder could not be read, and is left out, as sentences."""

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
        """Return what was measured and finite."""
        return [value for value in self.series.get(key, Series()).values if value is not None]

    @property
    def settings(self) -> dict[str, Any]:
        """What the user set for the trainer and, as `NAME.OPTION`, for environments; without secrets."""
        found: dict[str, Any] = {}
        layer = read(TrainConfig, [], self.configs.get("trainer", {}))  # an earlier version may have other names
        found |= {key: given.value for key, given in layer.items() if key not in DERIVED}
        for name, tables in self.configs.items():
            if not name.startswith("env-"):
                continue
            kind, own, data = name.removeprefix("env-"), tables.get("env"), tables.get("data")
            own = own if isinstance(own, Mapping) else {}
            found |= {f"{kind}.{key}": value for key, value in own.items() if key not in SET_FOR_ENVIRONMENTS}
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


def final_step(folder: Path) -> int | None:
    """Of the newest `*_final`, which is being written or replaced while this looks."""
    steps = []
    for path in folder.glob("*_final"):
        with suppress(OSError, DamagedError):
            steps.append(read_state(path).progress.step)
    return max(steps, default=None)


def read_run(folder: Path, *, may_be_empty: bool = False) -> Run:
    """Read a run's folder; raise a `ConfigError` if it holds no run. One that only starts `may_be_empty`."""
    path, logs = folder / METRICS_FILE, folder / "logs"
    if not path.exists() and not (may_be_empty and folder.is_dir()):
        wanted = "a run's folder (--run-dir, or --log-dir)"
        raise ConfigError(field=str(folder), got=f"no {METRICS_FILE}", wanted=wanted)
    unreadable: list[str] = []

    def read(file: Path, check: Check = figures) -> list[Row]:
        found = read_file(file, check)
        if lines := found.unreadable:
            said = "line is" if lines == 1 else "lines are"
            unreadable.append(f"{file.relative_to(folder)}: {lines} {said} unreadable and left out")
        return found.rows

    rows = read(path)
    own = [read(file) for file in sorted(logs.glob("env-*.metrics.jsonl"))]
    series, environments = read_series(rows, logs / "api.log", own)
    samples = read(folder / SAMPLES_FILE, a_sample)
    for sample in samples:
        number = sample["environment"]
        sample["environment"] = None if number is None else environments.get(number, f"environment {number}")
    found: dict[str, Redaction] = {}
    for file in sorted((folder / "config").glob("*.toml")):
        if not os.access(file, os.R_OK):
            continue  # another user's
        try:
            found[file.stem] = redact(tomllib.loads(file.read_bytes().decode("utf-8-sig")))
        except (OSError, ValueError, RecursionError) as error:
            unreadable.append(f"config/{file.name} is not TOML: {error}")
    configs = {name: each.value for name, each in found.items()}
    steps = configs.get("trainer", {}).get("training_steps")
    return Run(
        name=folder.resolve().name,
        folder=folder,
        rows=rows,
        unhealthy=episodes(rows),
        series=series,
        samples=samples,
        configs=configs,
        events=read_events(rows, logs, {secret for each in found.values() for secret in each.secrets}),
        total_steps=steps if isinstance(steps, int) else None,
        checkpoints=[path.name for path in folders_named(folder / "checkpoints", r"[^.].*", containing=STATE_FILE)],
        final_step=final_step(folder / "checkpoints"),
        unreadable=unreadable,
    )


# Figures over steps ------------------------------------------------------------------------------------------

OF_ENVIRONMENT = re.compile(r"reward/env_(\d+)(_std)?")
EVALUATION = re.compile(r"eval/([^/]+)/(.+)")
REGISTERED = re.compile(r"environment (\d{1,15}) registered: (\S+),")
"""A line of the rollout API's log: which number has which name, such as `sums_0`; both again after a resume."""
NOT_MEASURED = re.compile(r"step|time|format|train/resumed|health/.*")
"""Keys of rows that have no plot; the report marks resumes and health in the other plots."""


def read_series(rows: Rows, api_log: Path, own: Sequence[Rows]) -> tuple[dict[str, Series], dict[int, str]]:
    """Return every figure of a run over its steps, and what each environment's number stands for.

    Keys are those of metrics.jsonl, but `reward/env/NAME` and `reward/env_std/NAME` for an environment's rewards,
    `eval/NAME/FIGURE` at the step that was evaluated, and `env/NAME/FIGURE` for what an environment wrote itself: its
    own rows are those of `env-NAME.metrics.jsonl`, whose keys begin with that name. A trainer that was started by hand
    has no log of the rollout API.
    """
    registered = REGISTERED.findall(api_log.read_text(errors="replace")) if api_log.exists() else []
    names = {int(number): name for number, name in registered}
    columns, found = _columns(rows), list[tuple[str, str, str, Series]]()  # environment, begin and end of a key, values
    for key, series in columns.items():
        if NOT_MEASURED.fullmatch(key):
            continue
        if reward := OF_ENVIRONMENT.fullmatch(key):
            name = names.get(int(reward[1]), f"environment_{reward[1]}")
            found.append((name, f"reward/env{reward[2] or ''}/", "", series))
        elif not (evaluation := EVALUATION.fullmatch(key)):
            found.append(("", key, "", series))
        elif evaluation[2] != "step":
            evaluated = columns.get(f"eval/{evaluation[1]}/step", Series())
            at = dict(zip(evaluated.steps, evaluated.values, strict=True))
            steps = [step if (value := at.get(step)) is None else value for step in series.steps]
            found.append((evaluation[1], "eval/", f"/{evaluation[2]}", Series(steps, series.values)))
    for each in own:
        newest: list[Mapping[str, Any]] = []  # without rows of steps that a resumed run took again: the file only grows
        for row in each:
            while newest and newest[-1]["step"] >= row["step"]:
                newest.pop()
            newest.append(row)
        for key, series in _columns(newest).items():
            name, _, figure = key.partition("/")
            if figure and not figure.startswith("eval/"):  # metrics.jsonl has these
                found.append((name, "env/", f"/{figure}", series))
    labels = labels_of({name for name, *_ in found if name})
    series = {f"{begin}{labels.get(name, '')}{end}": each for name, begin, end, each in found}
    return series, {number: labels[name] for number, name in names.items() if name in labels}


def _columns(rows: Rows) -> dict[str, Series]:
    found: defaultdict[str, Series] = defaultdict(Series)
    for row in rows:
        for key, value in row.items():
            found[key].steps.append(row["step"])
            found[key].values.append(value)
    return found


def labels_of(names: Iterable[str]) -> dict[str, str]:
    """Return what to call each numbered name: `sums` for the first `sums_N`, and `sums (2)` for the second."""

    def stem(name: str) -> tuple[str, int]:
        before, _, number = name.rpartition("_")
        return (before, int(number)) if before and number.isdecimal() else (name, 0)

    labels: dict[str, str] = {}
    count: defaultdict[str, int] = defaultdict(int)
    for name in sorted(names, key=stem):
        before = stem(name)[0]
        count[before] += 1
        labels[name] = f"{before} ({count[before]})" if count[before] > 1 else before
    return labels


# Events ------------------------------------------------------------------------------------------------------

LOUD = re.compile(r"\b(WARNING|ERROR|CRITICAL)\b")
PLACES = re.compile(r"^\$ |^\(\w+ pid=\d+\) |\d+")
"""What differs between two lines that say the same: who said it, when, and its figures."""
STARTED, SHUTDOWN = "Application startup complete.", "[shutdown]"
"""What ends a server's start in its log, and what begins its end. vLLM warns of dozens of things before and after."""
COMMAND = "$ "
"""How the line begins with which the supervisor starts a process."""
UNUSUAL = {
    "train/skipped": "skipped: nothing to learn from, or a loss or gradient that is not finite",
    "rollout/dropped_stale_groups": "groups dropped as too old",
    "rollout/refused_groups": "groups left out that can't be trained on",
}
"""Counts among a step's metrics that are events if they are not 0."""
NEWEST_LINES, LOG_BYTES, MOST_OF_LINE = 60, 1 << 20, 400
"""Of each log: how many loud lines are shown, out of how much of its end, and how many characters of each."""


def read_events(rows: Rows, logs: Path, secrets: Iterable[str]) -> list[Event]:
    """Return the events of a run's steps, then the newest warnings and errors of each process, equal ones once.

    Secrets of the run's options are hidden wherever a log repeats them.
    """
    found = [*_of_steps(rows)]
    for path in sorted(logs.glob("*.log")):
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - LOG_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
        loud = {PLACES.sub("", text): (text, routine) for text, routine in _loud(lines)}
        for text, routine in list(loud.values())[-NEWEST_LINES:]:
            found.append(Event(path.stem, redacted_text(text, secrets)[:MOST_OF_LINE], routine))
    return found


def _of_steps(rows: Rows) -> Iterator[Event]:
    """One for consecutive steps of which the same is to be said."""
    spans: dict[str, list[tuple[int, int, float]]] = {}  # first row, last row, how often
    for at, row in enumerate(rows):
        counts = {text: row.get(key) or 0 for key, text in UNUSUAL.items()}
        counts["losses not finite"] = int("train/loss" in row and row["train/loss"] is None)
        for text in (text for text, count in counts.items() if count > 0):
            own = spans.setdefault(text, [])
            first, _, before = own.pop() if own and own[-1][1] == at - 1 else (at, at, 0)
            own.append((first, at, before + counts[text]))
    found = sorted((first, last, count, text) for text, own in spans.items() for first, last, count in own)
    for first, last, count, text in found:
        a, b = rows[first]["step"], rows[last]["step"]
        yield Event(f"step {a}" if a == b else f"steps {a} to {b}", f"{count:g} × {text}")


def _loud(lines: Sequence[str]) -> Iterator[tuple[str, bool]]:
    """Yield each warning and error, and whether it is routine."""
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
            yield line.strip()[: 10 * MOST_OF_LINE], ending or (starting and found[1] == "WARNING")
