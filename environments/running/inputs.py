"""What a run can be repeated from: `RUN_DIR/inputs/NAME.json`, and copies of the user's code beside it.

    {"data": [{"name": "rows.jsonl", "rows": 500, "fingerprint": "ab12…"}],
     "files": [{"path": "/home/me/my.py", "sha256": "cd34…", "copy": "my-cd34ef56.py"}],
     "versions": {"python": "3.11.7", "datasets": "5.2.0", …}, "earlier": []}

`earlier` has the records that the run had before, if its data or code changed when it was resumed.
"""

from __future__ import annotations

import hashlib
import json
import logging
import platform
import re
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

from environments.config import ConfigError

log = logging.getLogger(__name__)

PACKAGES: Final = ("grpo-trainer", "datasets", "math-verify", "transformers", "tokenizers", "vllm", "torch")
CHECKPOINTS: Final = "checkpoints/*/state.json"
"""Below the run's folder; without one, no step has been saved, and a new record replaces the old one."""


@dataclass(frozen=True)
class DataInput:
    """A data set that an environment reads.

    Attributes:
        fingerprint: Changes if the content does.
    """

    name: str
    rows: int
    fingerprint: str


@dataclass(frozen=True)
class Inputs:
    """What an environment depends on besides its settings: data sets, and files of the user's code."""

    data: tuple[DataInput, ...] = ()
    files: tuple[Path, ...] = ()


def record_path(folder: Path, name: str) -> Path:
    """Return the record of the environment of this name."""
    return folder / f"{re.sub(r'[^A-Za-z0-9_.-]', '_', name)}.json"


def refuse_changed(record: Path, data: Sequence[DataInput], *, allowed: bool) -> None:
    """Compare data sets with those that a resumed run began with.

    Raises:
        ConfigError: They differ, and that is not allowed.
    """
    before = _read(record)
    if before is None:
        return
    known = [DataInput(**each) for each in before["data"]]
    pairs = list(zip(known, data, strict=False))
    changed = [pair for pair in pairs if pair[0].fingerprint != pair[1].fingerprint]
    if not changed and len(known) == len(data):
        return
    old, new = changed[0] if changed else (known[0] if known else None, data[0] if data else None)
    error = ConfigError(
        "the data differ from those that the run began with",
        field=f"--data {new.name if new else ''}".strip(),
        got=_said(new),
        wanted=_said(old),
        fix="restore them, or continue with these by --allow-changed-data",
    )
    if not allowed:
        raise error
    log.warning("%s", error)


def keep(record: Path, inputs: Inputs) -> None:
    """Write the record, and copies of the files. If that fails, log a warning and continue."""
    files = [_Copied.of(path, record.parent) for path in inputs.files if path.is_file()]
    now = {
        "data": [asdict(each) for each in inputs.data],
        "files": [asdict(each) for each in files],
        "versions": _versions(),
    }
    before = _read(record)
    earlier = list(before.pop("earlier", [])) if before else []
    if before is not None and before != now:
        earlier.append(before)
        old = {each["path"]: each["sha256"] for each in before["files"]}
        for each in files:
            if old.get(each.path, each.sha256) != each.sha256:
                log.warning("%s has changed since the run began; %s has both versions", each.path, record.parent)
    partial = record.with_suffix(".partial")
    try:
        record.parent.mkdir(parents=True, exist_ok=True)
        for each in files:
            shutil.copyfile(each.path, record.parent / each.copy)
        partial.write_text(json.dumps({**now, "earlier": earlier}, indent=1))
        partial.replace(record)
    except OSError as error:
        log.warning("what the run depends on is not written to %s: %s", record, error)


@dataclass(frozen=True)
class _Copied:
    path: str
    sha256: str
    copy: str

    @classmethod
    def of(cls, path: Path, folder: Path) -> _Copied:
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        stem = re.sub(r"[^\w.-]", "_", path.stem)
        return cls(str(path.resolve()), digest, f"{stem}-{digest[:8]}{path.suffix}")


def _read(record: Path) -> dict[str, Any] | None:
    """Return the record of a run that has a checkpoint; None if there is none."""
    if not any(record.parent.parent.glob(CHECKPOINTS)):
        return None
    try:
        return json.loads(record.read_text())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        log.warning("%s can't be read: %s", record, error)
        return None


def _said(data: DataInput | None) -> str:
    return "no data set" if data is None else f"{data.rows:,} rows, fingerprint {data.fingerprint[:12]}"


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
