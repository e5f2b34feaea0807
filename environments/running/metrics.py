"""Report an environment's work between two steps of the trainer: on the console, in a file and to W&B."""

import json
import logging
import os
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any, Literal, Protocol
from uuid import uuid4

from environments.api import wire
from environments.config import BaseEnvConfig, ConfigError
from environments.trajectory import trained_tokens
from grpo_common.formats import KEY, ROWS_FORMAT
from grpo_common.redaction import redacted

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Tally:
    """Counts of sent groups, and of dropped groups by reason; `measures` are the environment's own figures."""

    groups: int = 0
    scores: list[float] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    versions: Counter[int] = field(default_factory=Counter)
    dropped: Counter[str] = field(default_factory=Counter)
    measures: dict[str, float] = field(default_factory=dict)

    def add(self, group: wire.ScoredData) -> None:
        """Count a group that was sent."""
        self.groups += 1
        self.scores += wire.counted_scores(group)
        self.lengths += [trained_tokens(mask) for mask in group.masks]
        self.versions.update(group.policy_versions or [])

    def metrics(self) -> dict[str, float]:
        """Return the counts as metrics."""
        metrics: dict[str, float] = {"groups_sent": self.groups, "groups_dropped": self.dropped.total()}
        if self.scores:
            metrics |= {"score_mean": fmean(self.scores), "completion_length_mean": fmean(self.lengths)}
        if self.versions:
            metrics["policy_version_oldest"] = min(self.versions)
        metrics |= {f"groups_dropped/{reason}": count for reason, count in self.dropped.items()}
        return metrics | self.measures

    def line(self) -> str:
        """Return the counts as text."""
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
    """A destination of metrics besides the console: a file, or a run of W&B."""

    def log(self, data: dict[str, Any], step: int) -> Any: ...
    def finish(self) -> Any: ...


class JsonlFile:
    """A JSONL file, each line of which survives a crash of this process."""

    def __init__(self, option: str, path: Path, mode: Literal["ab", "xb"] = "ab") -> None:
        """Open a file to append to (`ab`), or create a new one (`xb`).

        Raises:
            ConfigError: It can't be written, or should be new and exists; the message names the option.
        """
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open(mode)
        except FileExistsError:
            raise ConfigError(
                field=option, got=f"{path}, which exists", wanted="a new file", fix="name another file, or remove it"
            ) from None
        except OSError as error:
            fix = "name a file in a folder that you may write to"
            raise ConfigError("cannot be written", field=f"{option} {path}", got=error.strerror, fix=fix) from None

    def write(self, line: bytes) -> None:
        """Write one line and flush it."""
        self._file.write(line + b"\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class JsonlSink(JsonlFile):
    """Writes one JSON object a line: the step and the metrics."""

    def log(self, data: dict[str, Any], step: int) -> None:
        """Write one line."""
        self.write(json.dumps({KEY: ROWS_FORMAT, "step": step, **data}, default=float).encode())

    finish = JsonlFile.close


class Reporter:
    """Keeps the tally of the current step and reports it when the step is over.

    Args:
        name: prefix of each metric's name in the sinks, which several environments may share.
    """

    def __init__(self, name: str, sinks: Sequence[Sink] = ()) -> None:
        self.tally = Tally()
        self._name = name
        self._sinks = sinks

    def end_step(self, step: int, measures: dict[str, float]) -> None:
        """Report work and measures since the last call, and start a new tally."""
        self.tally.measures = measures
        log.info("step %d: %s", step, self.tally.line())
        self.record(step, self.tally.metrics())
        self.tally = Tally()

    def record(self, step: int, metrics: dict[str, float]) -> None:
        """Pass metrics to the sinks."""
        for sink in self._sinks:
            sink.log({f"{self._name}/{key}": value for key, value in metrics.items()}, step=step)

    def close(self) -> None:
        """Finish the records."""
        for sink in self._sinks:
            sink.finish()


def open_wandb(config: BaseEnvConfig, name: str, info: wire.WandbInfo) -> Sink:
    """Return a W&B run in the trainer's project and group.

    An environment that starts again continues its run: the id is kept beside its metrics. WANDB_RUN_ID is the id of the
    trainer's run, so the environment's is made from it.

    Raises:
        ConfigError: wandb is not installed or does not start.
    """
    try:
        import wandb
    except ImportError:
        fix = "pip install 'grpo-trainer[wandb]', or leave the option out"
        raise ConfigError(field="--env.use_wandb", got="no module wandb", wanted="the package", fix=fix) from None
    try:
        run_id = None
        if trainers := os.environ.get("WANDB_RUN_ID"):
            run_id = re.sub(r"[^\w-]", "-", f"{trainers}-{name}")
        elif config.metrics_path is not None:
            path = config.metrics_path.with_suffix(".wandb_id")
            if not path.exists():
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(uuid4().hex[:12])
            run_id = path.read_text().strip()
        settings = redacted(config.model_dump(mode="json"))
        return wandb.init(id=run_id, resume="allow", project=info.project, group=info.group, name=name, config=settings)
    except (RuntimeError, OSError) as error:
        raise ConfigError(field="--env.use_wandb", got=error, fix="log in to W&B, or omit the option") from None
