"""What an environment did between two steps of the trainer, told on the console, in a file and to W&B."""

import json
import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any, Protocol

from environments.api import wire
from environments.config import BaseEnvConfig, ConfigError

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Tally:
    """Counts of groups sent and of groups that were not, by reason."""

    groups: int = 0
    scores: list[float] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    versions: Counter[int] = field(default_factory=Counter)
    dropped: Counter[str] = field(default_factory=Counter)
    measures: dict[str, float] = field(default_factory=dict)

    def add(self, group: wire.ScoredData) -> None:
        """Counts a group that was sent."""
        self.groups += 1
        self.scores += group.scores
        self.lengths += [sum(entry != wire.IGNORED for entry in mask) for mask in group.masks]
        self.versions.update(group.policy_versions or [])

    def metrics(self) -> dict[str, float]:
        """The counts as numbers with names."""
        metrics: dict[str, float] = {"groups_sent": self.groups, "groups_dropped": self.dropped.total()}
        if self.scores:
            metrics["score_mean"] = fmean(self.scores)
            metrics["completion_length_mean"] = fmean(self.lengths)
        if self.versions:
            metrics["policy_version_oldest"] = min(self.versions)
        metrics |= {f"groups_dropped/{reason}": count for reason, count in self.dropped.items()}
        return metrics | self.measures

    def line(self) -> str:
        """The counts as a phrase."""
        parts = [f"{self.groups} groups sent"]
        if self.scores:
            parts.append(f"mean score {fmean(self.scores):.3f}, {fmean(self.lengths):.1f} tokens")
        if self.versions:
            oldest, newest = min(self.versions), max(self.versions)
            parts.append(f"policy {oldest}" if oldest == newest else f"policies {oldest} to {newest}")
        parts += [f"{name} {value:.3f}" for name, value in self.measures.items()]
        parts += [f"{count} dropped ({reason})" for reason, count in self.dropped.items()]
        return ", ".join(parts)


class Sink(Protocol):
    """Where metrics go besides the console."""

    def log(self, data: dict[str, Any], step: int) -> Any:
        """Records the metrics of a step."""

    def finish(self) -> Any:
        """Ends the record."""


class JsonlSink:
    """A JSON object a line: the step and the metrics."""

    def __init__(self, path: Path) -> None:
        """Goes on with a file, or makes it.

        Raises:
            ConfigError: It cannot be written.
        """
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("a")
        except OSError as error:
            raise ConfigError(
                "cannot be written", field=f"--env.metrics_path {path}", got=error.strerror, fix="name another file"
            ) from None

    def log(self, data: dict[str, Any], step: int) -> None:
        """Writes one line, at once."""
        self._file.write(json.dumps({"step": step, **data}) + "\n")
        self._file.flush()

    def finish(self) -> None:
        """Closes the file."""
        self._file.close()


class Reporter:
    """Keeps the tally of the current step and tells it when the step is over."""

    def __init__(self, name: str, sinks: Sequence[Sink] = ()) -> None:
        """`name` stands before each metric's name in the sinks, which several environments may share."""
        self.tally = Tally()
        self._name = name
        self._sinks = sinks

    def end_step(self, step: int, measures: dict[str, float]) -> None:
        """Tells what was done since the last call and what was measured, and starts a new tally."""
        self.tally.measures = measures
        log.info("step %d: %s", step, self.tally.line())
        self.record(step, self.tally.metrics())
        self.tally = Tally()

    def record(self, step: int, metrics: dict[str, float]) -> None:
        """Hands metrics to the sinks."""
        for sink in self._sinks:
            sink.log({f"{self._name}/{key}": value for key, value in metrics.items()}, step=step)

    def close(self) -> None:
        """Ends the records."""
        for sink in self._sinks:
            sink.finish()


def open_wandb(config: BaseEnvConfig, name: str, info: wire.WandbInfo) -> Sink:
    """A W&B run in the trainer's project and group.

    Raises:
        ConfigError: wandb is not installed or does not start.
    """
    try:
        import wandb
    except ImportError:
        raise ConfigError(
            field="--env.use_wandb",
            got="no module wandb",
            wanted="the package",
            fix="pip install 'grpo-trainer[wandb]', or leave the option out",
        ) from None
    try:
        settings = config.model_dump(mode="json", exclude={"rollout_api_key"})
        return wandb.init(project=info.project, group=info.group, name=name, config=settings)
    except (RuntimeError, OSError) as error:
        raise ConfigError(field="--env.use_wandb", got=error, fix="log in to W&B, or leave the option out") from None
