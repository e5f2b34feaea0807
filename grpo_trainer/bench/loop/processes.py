"""The processes of `grpo bench loop`: one writes the model, then `grpo run` as a user would type it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from grpo_trainer.bench.loop.options import GROUP, LAST_STEPS, LoopOptions
from grpo_trainer.bench.shapes import CACHE_BYTES_TINY
from grpo_trainer.config.environments import environment_command
from grpo_trainer.launch.plan import ProcessSpec

ENVIRONMENT = "environments.synthetic_server"
STOP_SECONDS = 30.0
"""Time before an interrupted run is killed; its last checkpoint is not needed."""


def model_process(options: LoopOptions, folder: Path) -> ProcessSpec:
    """Return the process that writes the model unless the model exists."""
    argv = (sys.executable, "-m", "grpo_trainer.bench.random_model", options.model.shape, str(folder))
    return ProcessSpec("model", (*argv, *["no-weights"] * options.dummy_weights), ends_run=True)


def run_process(options: LoopOptions, model: Path, run_dir: Path, more: Sequence[str]) -> ProcessSpec:
    """Return the run.

    Args:
        more: additional options of `grpo run`, which take precedence.
    """
    work, choice = options.work, options.choice
    extra = ["--kv-cache-memory-bytes", str(CACHE_BYTES_TINY)] if options.model.shape == "tiny" else []
    extra += ["--load-format", "dummy"] if options.dummy_weights else []
    asked = {
        "model-name": model,
        "run-dir": run_dir,
        "weight-bridge-mode": choice.bridge,
        "training-steps": options.steps + LAST_STEPS,
        "batch-size": GROUP,
        "gradient-accumulation-steps": work.sequences // GROUP,
        "seq-len": work.seq_len,
        "max-tokens-per-microbatch": work.max_tokens_per_microbatch,
        "server.port": 0,
        "api.port": 0,
        "env": ENVIRONMENT,
        "env.group_size": GROUP,
        "env.prompt_tokens": work.prompt_len,
        "env.completion_mean": work.completion_mean,
        "server.quantization": choice.quantization,
        "server.kv-cache-dtype": choice.kv_cache_dtype,
        **({"lora-transport": choice.transport} if choice.transport != "auto" else {}),
        **({"server.extra-args": ",".join(extra)} if extra else {}),
    }
    flags = [word for name, value in asked.items() for word in (f"--{name}", str(value))]
    if choice.share_base:
        flags.append("--share-base")
    if options.dummy_weights:  # so small that a synthetic change moves no logprob
        flags.append("--no-proof")
    argv = (sys.executable, "-m", "grpo_trainer", "run", *flags, *more)
    return ProcessSpec("run", argv, {"PYTHONUNBUFFERED": "1"}, ends_run=True, stop_seconds=STOP_SECONDS)


ROLES = (
    ("api", "environments.api"),
    ("environment", " ".join(environment_command(ENVIRONMENT))),
    ("server", "vllm_server"),
    ("trainer", "grpo_trainer train"),
)
"""What each process of a run is started as."""


def role_of(command: str, parent: str) -> str:
    """Return the role of a process of a run.

    Args:
        command: its words, with spaces between.
        parent: the role of its parent; "run" for the supervisor. Helpers have the role of their parent, but processes
            below the server's front end are the "engine".
    """
    if parent in ("server", "engine"):
        return "engine"
    return next((role for role, module in ROLES if f"-m {module} " in f"{command} "), parent)
