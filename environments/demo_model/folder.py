"""The folder of a demo model: the settings it was built with, and when it may be replaced. Imports nothing heavy."""

import json
import os
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from grpo_common.errors import UserError
from grpo_common.folders import whole_folder

MARKER = "demo_model.json"
"""File in the output folder that marks it as a demo model's, for later runs."""
RELEASED = "HuggingFaceTB/SmolLM2-135M-Instruct"
"""The released model."""


SIZE, RELEASED_SIZE = 4 * 2**20, 300 * 2**20
"""Bytes of a model, at most: of one that is built, and of the released one."""


class DemoModelError(UserError, RuntimeError):
    """The demo model cannot be built, downloaded or written."""


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
    """Raise a DemoModelError unless `out` is absent, empty or an earlier demo model, or `force` is set."""
    if out.is_dir():
        if not force and not (out / MARKER).is_file() and any(out.iterdir()):
            raise DemoModelError(
                field="OUT",
                got=f"{out}, which is not empty and holds no {MARKER}",
                wanted="an empty folder or a demo model's",
                fix="choose another folder, or replace it with --force",
            )
    elif out.exists():
        raise DemoModelError(field="OUT", got=f"{out}, a file", wanted="a folder", fix="choose another path")


def try_to_write(out: Path, size: int) -> None:
    """Raise an OSError unless a file of `size` bytes has room where `write_whole` will write; it goes at once."""
    there = next(folder for folder in out.resolve().parents if folder.exists())
    with tempfile.TemporaryFile(dir=there) as file:
        os.posix_fallocate(file.fileno(), 0, size)


def finished_before(out: Path, recipe: Recipe | None) -> str | None:
    """Return the summary line of an earlier run with the same recipe if `out` has its result, else None.

    A recipe of None stands for the released model.
    """
    wanted = {"released": RELEASED} if recipe is None else {"recipe": asdict(recipe)}
    try:
        marker = json.loads((out / MARKER).read_text())
        return marker.get("summary") if wanted.items() <= marker.items() else None
    except (FileNotFoundError, NotADirectoryError, ValueError, RecursionError, AttributeError):
        return None


def write_whole(out: Path, write: Callable[[Path], dict[str, Any]]) -> str:
    """Have `write` fill a folder and return its marker's content; replace `out` by it. Return the marker's summary.

    `out` is never visible half-written.
    """
    with whole_folder(out) as partial:
        marker = write(partial)
        (partial / MARKER).write_text(json.dumps(marker, indent=2) + "\n")
    return marker["summary"]
