"""`RUN_DIR/data/NAME.json`: which data sets a run began with, so that a resumed run notices other ones.

    {"data": [{"name": "rows.jsonl", "rows": 500, "fingerprint": "ab12…"}], "earlier": []}

`earlier` has what was there before, if the run was resumed with changed data.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from environments.config import ConfigError

log = logging.getLogger(__name__)

CHECKPOINTS: Final = "checkpoints/*/state.json"
"""Below the run's folder. Without one, no step was saved: the run begins again, and may do so with other data."""


@dataclass(frozen=True)
class DataSet:
    """A data set that an environment reads; its fingerprint changes if the content does."""

    name: str
    rows: int
    fingerprint: str

    def __str__(self) -> str:
        return f"{self.rows:,} rows, fingerprint {self.fingerprint[:12]}"


def refuse_changed(record: Path, data: Sequence[DataSet], *, allowed: bool) -> None:
    """Raise a ConfigError if data sets differ from those that a resumed run began with; if allowed, only warn."""
    if (before := _read(record)) is None:
        return
    known = [DataSet(**each) for each in before["data"]]
    fingerprints = [each.fingerprint for each in known]
    if fingerprints == [each.fingerprint for each in data]:
        return
    changed = [each for each in data if each.fingerprint not in fingerprints] or list(data)
    error = ConfigError(
        "the data differ from those that the run began with",
        field=f"--data {changed[0].name}" if changed else "--data",
        got="; ".join(map(str, data)),
        wanted="; ".join(map(str, known)),
        fix="restore them, or continue with these by --allow-changed-data",
    )
    if not allowed:
        raise error
    log.warning("%s", error)


def keep(record: Path, data: Sequence[DataSet]) -> None:
    """Write the record. If that fails, log a warning and continue."""
    now, before = [asdict(each) for each in data], _read(record)
    earlier = [] if before is None else before.get("earlier", [])
    if before is not None and before["data"] != now:
        earlier = [*earlier, before["data"]]
    partial = record.with_suffix(".partial")
    try:
        record.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(json.dumps({"data": now, "earlier": earlier}, indent=1))
        partial.replace(record)
    except OSError as error:
        log.warning("the fingerprint of the data is not written to %s: %s", record, error)


def _read(record: Path) -> dict[str, Any] | None:
    """Return the record of a run that has a checkpoint; None if there is none."""
    if not any(record.parent.parent.glob(CHECKPOINTS)):
        return None
    try:
        found = json.loads(record.read_bytes())
        _ = [DataSet(**each) for each in found["data"]], [*found.get("earlier", [])]
        return found
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        log.warning("%s can't be read: %s", record, error)
        return None
