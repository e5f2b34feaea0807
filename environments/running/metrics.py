"""Report an environment's work between two steps of the trainer: on the console and in a file."""

import json
import logging
from collections import Counter
from pathlib import Path
from statistics import fmean
from typing import Literal, TextIO

from environments.api import wire
from environments.config import ConfigError
from environments.trajectory import trained_tokens
from grpo_common.formats import KEY, ROWS_FORMAT

log = logging.getLogger(__name__)


def open_lines(option: str, path: Path, mode: Literal["a", "x"] = "a") -> TextIO:
    """Open a JSONL file to append to (`a`), or create a new one (`x`). Each line survives a crash of this process.

    Raise a ConfigError, which names the option, if it can't be written, or should be new and exists.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return path.open(mode, buffering=1, encoding="utf-8")
    except FileExistsError:
        raise ConfigError(
            field=option, got=f"{path}, which exists", wanted="a new file", fix="name another file, or remove it"
        ) from None
    except OSError as error:
        fix = "name a file in a folder that you may write to"
        raise ConfigError("cannot be written", field=f"{option} {path}", got=error.strerror, fix=fix) from None


class Reporter:
    """Counts an environment's work since the trainer's last step, and reports it when the next step is there."""

    def __init__(self, name: str) -> None:
        self.name = name  # prefix of each metric's name in the file
        self.file: TextIO | None = None  # one JSON object a line: the step and the metrics
        self.groups = 0  # that were sent
        self.dropped = Counter[str]()  # groups that were not, by reason
        self._scores, self._lengths, self._versions = list[float](), list[int](), Counter[int]()

    def add(self, group: wire.ScoredData) -> None:
        self.groups += 1
        self._scores += wire.counted_scores(group)
        self._lengths += [trained_tokens(mask) for mask in group.masks]
        self._versions.update(group.policy_versions or [])

    def line(self, measures: dict[str, float]) -> str:
        """Return the counts, and the environment's own figures, as text."""
        parts = [f"{self.groups} groups sent"]
        if self._scores:
            parts.append(f"mean score {fmean(self._scores):.3f}, {fmean(self._lengths):.1f} tokens")
        if self._versions:
            oldest, newest = min(self._versions), max(self._versions)
            parts.append(f"policy {oldest}" if oldest == newest else f"policies {oldest} to {newest}")
        parts += [f"{name} {value:.3f}" for name, value in measures.items()]
        parts += [f"{count} dropped ({reason})" for reason, count in self.dropped.items()]
        return ", ".join(parts)

    def end_step(self, step: int, measures: dict[str, float]) -> None:
        """Report counts and measures since the last call, and count from 0."""
        log.info("step %d: %s", step, self.line(measures))
        metrics: dict[str, float] = {"groups_sent": self.groups, "groups_dropped": self.dropped.total()}
        if self._scores:
            metrics |= {"score_mean": fmean(self._scores), "completion_length_mean": fmean(self._lengths)}
        if self._versions:
            metrics["policy_version_oldest"] = min(self._versions)
        metrics |= {f"groups_dropped/{reason}": count for reason, count in self.dropped.items()}
        self.record(step, metrics | measures)
        self.groups = 0
        for counts in (self.dropped, self._scores, self._lengths, self._versions):
            counts.clear()

    def record(self, step: int, metrics: dict[str, float]) -> None:
        if self.file is not None:
            named = {f"{self.name}/{key}": value for key, value in metrics.items()}
            self.file.write(json.dumps({KEY: ROWS_FORMAT, "step": step, **named}, default=float) + "\n")
