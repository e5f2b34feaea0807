"""The folder of a demo model: the settings it was built with, and when it may be replaced. Imports nothing heavy."""

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from environments.demo_model.released import NAME
from grpo_common.errors import UserError

MARKER = "demo_model.json"
"""File in the output folder that marks it as a demo model's, for later runs."""


class DemoModelError(UserError, RuntimeError):
    """The demo model cannot be built or written."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """All settings of the build; two equal recipes give equal files on one machine."""

    seed: int = 0
    low: int = 10
    high: int = 49
    target_accuracy: float = 0.3
    label_smoothing: float = 0.4
    learning_rate: float = 1e-3
    warmup_steps: int = 50
    batch_size: int = 128
    max_steps: int = 2000
    check_interval: int = 2


def claim(out: Path, force: bool) -> None:
    """Check that `out` may be written: it is absent, empty or an earlier demo model, or `force` is set.

    Raises:
        DemoModelError: Something else is there.
    """
    if out.is_dir():
        if force or (out / MARKER).is_file() or not any(out.iterdir()):
            return
        raise DemoModelError(
            field="OUT",
            got=f"{out}, which is not empty and holds no {MARKER}",
            wanted="an empty folder or a demo model's",
            fix="choose another folder, or replace it with --force",
        )
    if out.exists():
        raise DemoModelError(field="OUT", got=f"{out}, a file", wanted="a folder", fix="choose another path")


def finished_before(out: Path, recipe: Recipe | None) -> str | None:
    """Return the summary line of an earlier run with the same recipe if `out` has its result, else None.

    A recipe of None stands for the released model.
    """
    try:
        marker = json.loads((out / MARKER).read_text())
    except (FileNotFoundError, NotADirectoryError, ValueError, RecursionError):
        return None
    if not isinstance(marker, dict):
        return None
    wanted = {"released": NAME} if recipe is None else {"recipe": asdict(recipe)}
    return marker.get("summary") if wanted.items() <= marker.items() else None


def replace_folder(new: Path, out: Path) -> None:
    """Replace `out` by the finished folder `new`. `out` is never visible half-written."""
    old = new.with_name(new.name + ".old")
    if out.exists():
        out.rename(old)
    new.rename(out)
    shutil.rmtree(old, ignore_errors=True)


def write_whole(out: Path, write: Callable[[Path], dict[str, Any]]) -> str:
    """Have `write` fill a folder and return its marker's content; replace `out` by it. Return the marker's summary."""
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = out.with_name(f".{out.name}.partial-{os.getpid()}")
    try:
        partial.mkdir()
        marker = write(partial)
        (partial / MARKER).write_text(json.dumps(marker, indent=2) + "\n")
        replace_folder(partial, out)
        return marker["summary"]
    finally:
        shutil.rmtree(partial, ignore_errors=True)
