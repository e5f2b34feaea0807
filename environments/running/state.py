"""What a resumed run continues from: an environment's saved state, and a record of the data sets that it began with."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from environments.config import ConfigError

log = logging.getLogger(__name__)

FOLDER: Final = "environments"
"""Subfolder of the trainer's checkpoint folder."""
KEPT: Final = 1000
"""States that are kept, the newest ones: a run may be resumed from an earlier checkpoint."""
CHECKPOINTS: Final = "checkpoints/*/state.json"
"""Below the run's folder. Without one, no step was saved: the run begins again, and may do so with other data."""


class StateFiles:
    """`FOLDER/NAME/step-N.json`, one for each step at which state was saved; the first save creates the folder."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder = folder / re.sub(r"^\.|[^\w.-]", "_", name)

    def save(self, step: int, state: dict[str, Any]) -> None:
        """Write the state at a step of the trainer. If that fails, log a warning and continue."""
        path = self._folder / f"step-{step}.json"
        try:
            _write(path, state)
            saved = self._saved()
            for at in sorted(saved)[:-KEPT]:
                saved[at].unlink(missing_ok=True)
        except OSError as error:
            # The trainer's folder may be on another machine. A run without saved state is better than a failed run.
            log.warning("state at step %d not saved to %s (%s); --env.state_dir names a folder", step, path, error)

    def newest(
        self, step: int, restore: Callable[[dict[str, Any]], None] = lambda state: None
    ) -> dict[str, Any] | None:
        """Return the newest state that is not later than a step, and that `restore` takes; None if there is none."""
        saved = self._saved()
        for at in sorted((at for at in saved if at <= step), reverse=True):
            try:
                state = json.loads(saved[at].read_bytes())
                if not isinstance(state, dict):
                    raise ValueError("no JSON object")
                restore(state)
            except Exception as error:  # an environment's code may fail in any way on a damaged state
                log.warning("the state in %s can't be read, an older one is looked for: %r", saved[at], error)
                continue
            log.info("state of step %d read from %s", at, saved[at])
            return state
        return None

    def _saved(self) -> dict[int, Path]:
        names = ((re.fullmatch(r"step-([0-9]{1,15})", path.stem), path) for path in self._folder.glob("step-*.json"))
        return {int(name[1]): path for name, path in names if name}


def _write(path: Path, value: Any) -> None:
    """Write JSON to a file, which is never visible half-written."""
    partial = path.with_suffix(".partial")
    path.parent.mkdir(parents=True, exist_ok=True)
    partial.write_text(json.dumps(value))
    partial.replace(path)


@dataclass(frozen=True)
class DataSet:
    """A data set that an environment reads; its fingerprint changes if the content does.

    `RUN_DIR/data/NAME.json` records those that a run began with, so that a resumed run notices other ones:

        {"data": [{"name": "rows.jsonl", "rows": 500, "fingerprint": "ab12…"}]}
    """

    name: str
    rows: int
    fingerprint: str

    def __str__(self) -> str:
        return f"{self.rows:,} rows, fingerprint {self.fingerprint[:12]}"


def refuse_changed(record: Path, data: Sequence[DataSet], *, allowed: bool) -> None:
    """Raise a ConfigError if data sets differ from those that a resumed run began with; if allowed, only warn."""
    known = _read(record)
    fingerprints = [each.fingerprint for each in known]
    if not known or fingerprints == [each.fingerprint for each in data]:
        return
    changed = [each for each in data if each.fingerprint not in fingerprints] or list(data)
    restore = "restore them, or continue with these by --allow-changed-data"
    error = ConfigError(
        "the data differ from those that the run began with",
        field=f"--data {changed[0].name}" if changed else "--data",
        got="; ".join(map(str, data)),
        wanted="; ".join(map(str, known)),
        fix="the run continues with these" if allowed else restore,
    )
    if not allowed:
        raise error
    log.warning("%s", error)


def keep(record: Path, data: Sequence[DataSet]) -> None:
    try:
        _write(record, {"data": [asdict(each) for each in data]})
    except OSError as error:
        log.warning("the fingerprint of the data is not written to %s: %s", record, error)


def _read(record: Path) -> list[DataSet]:
    """Return what the record of a run has that has a checkpoint; nothing if there is none."""
    if not any(record.parent.parent.glob(CHECKPOINTS)):
        return []
    try:
        return [DataSet(**each) for each in json.loads(record.read_bytes())["data"]]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        log.warning("%s can't be read: %s", record, error)
        return []
