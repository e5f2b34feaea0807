"""Small runs of `grpo run` for tests: their commands, their metrics, their ends."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from tests.processes import running, tail, wait_for

KV_CACHE = f"--kv-cache-memory-bytes,{64 << 20}"
OF_MODE: dict[str, dict[str, object]] = {
    "lora_only": {},
    "shared_vllm": {"lora-r": None, "lr": 1e-4},
    "broadcast": {"lora-r": None, "lr": 1e-4},
    "lora_restart": {"vllm-restart-interval": 2},
    "none": {"lora-r": None, "lr": 1e-4, "vllm-restart-interval": 2},
}


def of_mode(mode: str, **others: object) -> dict[str, object]:
    """Options of a small run in one mode."""
    return {"weight-bridge-mode": mode, "server.extra-args": KV_CACHE, **OF_MODE[mode], **others}


def arguments(model: Path, run_dir: Path, **options: object) -> list[str]:
    settings: dict[str, object] = {
        "model-name": model,
        "run-dir": run_dir,
        "weight-bridge-mode": "lora_only",
        "training-steps": 3,
        "batch-size": 32,
        "gradient-accumulation-steps": 1,
        "lr": 1e-3,
        "lora-r": 8,
        "seq-len": 64,
        "checkpoint-interval": 1,
        "server.port": 0,
        "api.port": 0,
        **{name.replace("_", "-").replace("--", "."): value for name, value in options.items()},
    }
    given = {key: value for key, value in settings.items() if value is not None}
    return ["-m", "grpo_trainer", "run", *(word for key, value in given.items() for word in _words(key, value))]


def _words(key: str, value: object) -> tuple[str, ...]:
    return (f"--{key}",) if value is True else (f"--{key}", str(value))


@contextmanager
def started(model: Path, run_dir: Path, log: Path, **options: object) -> Iterator[subprocess.Popen[bytes]]:
    with running(*arguments(model, run_dir, **options), log=log) as process:
        yield process


def rows(run_dir: Path) -> list[dict[str, Any]]:
    """Those of a run that may be going on: the last one may not be written as a whole yet."""
    path = run_dir / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().split("\n")[:-1]] if path.exists() else []


def wait_for_step(run_dir: Path, step: int, process: subprocess.Popen[bytes], log: Path) -> None:
    wait_for(
        f"step {step}",
        lambda: process.poll() is not None or any(row["step"] >= step for row in rows(run_dir)),
        log,
        300,
    )
    assert process.poll() is None or rows(run_dir)[-1]["step"] >= step, tail(log)


def finished(process: subprocess.Popen[bytes], log: Path, seconds: float = 300) -> int:
    wait_for("the run is over", lambda: process.poll() is not None, log, seconds)
    return process.wait()


def member(process: subprocess.Popen[bytes], module: str) -> int:
    """The process of the run that runs a module."""
    (pid,) = [
        child.pid for child in psutil.Process(process.pid).children() if f"-m {module}" in " ".join(child.cmdline())
    ]
    return pid
