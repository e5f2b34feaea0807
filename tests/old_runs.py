"""Folders of runs that earlier versions left (tests/data/formats)."""

from __future__ import annotations

import shutil
import tomllib
from pathlib import Path

from grpo_trainer.config.options import build
from grpo_trainer.config.train import TrainConfig

FIRST = Path(__file__).parent / "data" / "formats" / "v0.1.0"
FINISHED, UNFINISHED = FIRST / "finished", FIRST / "unfinished"
MODEL = FIRST / "model"
HOME = "/home/user/grpo"
"""Where the runs were."""


def copy_of(run: Path, folder: Path) -> Path:
    """Copy a run into a folder, where a test may change it."""
    return Path(shutil.copytree(run, folder / run.name))


def config_of(run: Path, folder: Path, **more: object) -> TrainConfig:
    """A run's own options, with its model where it is now and its copy's checkpoints and logs."""
    options = tomllib.loads((run / "config" / "trainer.toml").read_text())
    options |= {"model_name": str(MODEL), "save_path": str(folder / "checkpoints"), "log_dir": str(folder)}
    return build(TrainConfig, {**options, "resume": "auto", "device": "cpu", **more})


def content(folder: Path) -> dict[Path, bytes]:
    """Every file's content, but that of SQLite's index of a journal: each process that opens the file makes it."""
    files = (path for path in folder.rglob("*") if path.is_file() and not path.name.endswith("-shm"))
    return {path.relative_to(folder): path.read_bytes() for path in files}
