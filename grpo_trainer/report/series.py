"""What a run measured, as series over steps: its own rows, and those of its environments.

The rollout API gives each environment a number and a name such as `sums_0`, and both again when it comes back after a
resume.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Rows = Sequence[Mapping[str, Any]]
OF_ENVIRONMENT = re.compile(r"reward/env_(\d+)(_std)?")
EVALUATION = re.compile(r"eval/([^/]+)/(.+)")
REGISTERED = re.compile(r"environment (\d{1,15}) registered: (\S+),")
"""A line of the rollout API's log: which number has which name."""
UNKNOWN = "environment"
"""What comes before the number of one whose name is not known."""
NOT_MEASURED = re.compile(r"step|time|format|train/resumed|health/.*")
"""Keys of rows that have no plot; the report marks resumes and health in the other plots."""


@dataclass
class Series:
    """Values of one figure; None is a value that was not finite."""

    steps: list[float] = field(default_factory=list)
    values: list[float | None] = field(default_factory=list)


@dataclass(frozen=True)
class Environments:
    """Rows of metrics.jsonl that name environments by number, and the rows of the environments' own files.

    Attributes:
        names: number at the rollout API -> the name that it gave.
        own: rows of each `env-NAME.metrics.jsonl`; keys begin with that name.
    """

    names: Mapping[int, str] = field(default_factory=dict)
    own: Sequence[Rows] = ()


def read_environments(logs: Path, own: Sequence[Rows]) -> Environments:
    """What the processes of `grpo run` leave in its folder of logs; a trainer that was started by hand has none.

    Args:
        own: rows of the environments' files.
    """
    api = logs / "api.log"
    found = REGISTERED.findall(api.read_text(errors="replace")) if api.exists() else []
    return Environments({int(number): name for number, name in found}, [*map(_newest_of_each_step, own)])


def _newest_of_each_step(rows: Rows) -> Rows:
    """Without rows of steps that a resumed run took again: the file only grows."""
    kept: list[Mapping[str, Any]] = []
    for row in rows:
        while kept and kept[-1]["step"] >= row["step"]:
            kept.pop()
        kept.append(row)
    return kept


def read_series(rows: Rows, environments: Environments) -> tuple[dict[str, Series], dict[int, str]]:
    """Return every figure of a run over its steps, and what each environment's number stands for.

    Keys are those of metrics.jsonl, but `reward/env/NAME` and `reward/env_std/NAME` for an environment's rewards,
    `eval/NAME/FIGURE` at the step that was evaluated, and `env/NAME/FIGURE` for what an environment wrote itself.
    """
    found = [*_of_rows(columns(rows), environments.names)]
    found += [column for own in environments.own for column in _of_file(columns(own))]
    labels = labels_of({name for name, _, _ in found if name})
    series = {key.format(name=labels[name]) if name else key: each for name, key, each in found}
    numbers = {number: labels[name] for number, name in environments.names.items() if name in labels}
    return series, numbers


def columns(rows: Rows) -> dict[str, Series]:
    """Rows as one series for each key."""
    found: defaultdict[str, Series] = defaultdict(Series)
    for row in rows:
        step = row["step"]
        for key, value in row.items():
            column = found[key]
            column.steps.append(step)
            column.values.append(value)
    return found


Column = tuple[str, str, Series]
"""Name of an environment or nothing, key with `{name}` in its place, values."""


def _of_rows(found: Mapping[str, Series], names: Mapping[int, str]) -> Iterable[Column]:
    for key, series in found.items():
        if NOT_MEASURED.fullmatch(key):
            continue
        if own := OF_ENVIRONMENT.fullmatch(key):
            name = names.get(int(own[1]), f"{UNKNOWN}_{own[1]}")
            yield name, f"reward/env{own[2] or ''}/{{name}}", series
        elif own := EVALUATION.fullmatch(key):
            if own[2] != "step":
                evaluated = found.get(f"eval/{own[1]}/step", Series())
                at = {
                    step: value
                    for step, value in zip(evaluated.steps, evaluated.values, strict=True)
                    if value is not None
                }
                steps = [at.get(step, step) for step in series.steps]
                yield own[1], f"eval/{{name}}/{_escaped(own[2])}", Series(steps, series.values)
        else:
            yield "", key, series


def _of_file(found: Mapping[str, Series]) -> Iterable[Column]:
    for key, series in found.items():
        name, _, figure = key.partition("/")
        if figure and not figure.startswith("eval/"):  # metrics.jsonl has these
            yield name, f"env/{{name}}/{_escaped(figure)}", series


def _escaped(key: str) -> str:
    return key.replace("{", "{{").replace("}", "}}")


def labels_of(names: Iterable[str]) -> dict[str, str]:
    """Return what to call each numbered name: `sums` for the first `sums_N`, and `sums (2)` for the second."""
    by_stem: dict[str, list[str]] = {}
    for name in sorted(names, key=_stem):
        by_stem.setdefault(_stem(name)[0], []).append(name)
    return {
        name: f"{stem} ({place})" if place > 1 else stem
        for stem, own in by_stem.items()
        for place, name in enumerate(own, start=1)
    }


def _stem(name: str) -> tuple[str, int]:
    stem, _, number = name.rpartition("_")
    return (stem, int(number)) if stem and number.isdecimal() else (name, 0)
