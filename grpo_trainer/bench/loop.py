"""`grpo bench loop`: a whole `grpo run` on a synthetic environment. The figures are read from what the run writes."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from pydantic import model_validator

from grpo_trainer.bench.models import CACHE_BYTES_TINY, ModelOptions
from grpo_trainer.config.options import option
from grpo_trainer.errors import ConfigError, ProcessFailedError
from grpo_trainer.files import METRICS_FILE, refuse_to_mix_runs
from grpo_trainer.launch.plan import ProcessSpec
from grpo_trainer.launch.supervisor import Supervisor
from grpo_trainer.metrics.rows import read_rows

ENVIRONMENT = "environments.synthetic"
GROUP = 8
"""Completions of a prompt."""
LAST_STEPS = 5
"""Steps at the end of a run that are not measured. Their groups are generated before, so that training, alone on the
machine, is faster."""
STOP_SECONDS = 30.0
"""Time before an interrupted run is killed; its last checkpoint is not needed."""
SPLIT = MappingProxyType(
    {
        "wait_s": "train/data_fetch_time",
        "step_s": "train/step_time",
        "publish_s": "train/sync_time",
        "save_s": "train/save_time",
    }
)
"""Consecutive parts of a training step -> the metric of their seconds."""
Row = Mapping[str, Any]


class LoopOptions(ModelOptions):
    """Run."""

    steps: int = option(
        20,
        help=f"Optimisation steps, warm-up included; {LAST_STEPS} more follow, which are not measured. With fewer than "
        "15 the layers are not compiled, and the figures are lower.",
        ge=2,
    )
    warmup_steps: int = option(
        5,
        help="First steps that are not measured. The first batches are generated together; then the trainer waits for "
        "the next.",
        ge=1,
    )
    run_dir: Path | None = option(
        None, help="Folder in which the run is kept: logs, metrics, checkpoints (default: a temporary folder)."
    )
    bridge: Literal["shared_vllm", "lora_only", "broadcast", "lora_restart", "none"] = option(
        "shared_vllm", help="Weight bridge, the same as --weight-bridge-mode of `grpo run`."
    )
    share_base: bool = option(False, help="With lora_only: the trainer uses the server's base model.")

    @model_validator(mode="after")
    def _measures_a_step(self) -> LoopOptions:
        if self.warmup_steps >= self.steps:
            raise no_step(self.warmup_steps, f"fewer than --steps {self.steps}")
        return self


def no_step(got: object, wanted: str) -> ConfigError:
    """Return the error of a run that has no measured step."""
    return ConfigError("no step is left to measure", field="--warmup-steps", got=got, wanted=wanted)


def work_of(shape: str) -> dict[str, float]:
    """Return a step's sequences, and tokens of a prompt, of a completion and of a microbatch.

    Each token of a completion is the last with probability 1 / `completion_mean`, unless the completion is cut.
    """
    names = ("sequences", "prompt_len", "completion_mean", "completion_len", "max_tokens_per_microbatch")
    if shape == "tiny":  # for two CPU cores
        return dict(zip(names, (32, 16, 12.0, 48, 1024), strict=True))
    most = {"7b": 12_288, "14b": 8192, "32b": 8192}.get(shape, 16_384)
    return dict(zip(names, (256, 256, 350.0, 1024, most), strict=True))


def measure(options: LoopOptions, more: Sequence[str]) -> dict[str, Any]:
    """Write a model, train it, and return the figures; options in `more`, those of `grpo run`, take precedence.

    Raises:
        GrpoError: a process failed, or a signal arrived; all started processes have ended.
    """
    say = partial(print, file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory(prefix="grpo-bench-") as name:
        model = (options.model_dir or Path(name) / "model").absolute()
        run_dir = (options.run_dir or Path(name) / "run").absolute()
        refuse_to_mix_runs(run_dir, "never", "--run-dir")
        # Another process writes the model: its GPU memory is free when the run starts.
        writes = (sys.executable, "-m", "grpo_trainer.bench.models", options.shape, str(model))
        began = 0.0
        try:
            for process in (ProcessSpec("model", writes, ends_run=True), run_process(options, model, run_dir, more)):
                began = time.time()
                with Supervisor(run_dir / "logs", say=say, echo=say) as supervisor:
                    supervisor.start(process)
                    supervisor.run(())
        except ProcessFailedError as error:
            if options.run_dir is None:
                error.add(summary="; --run-dir FOLDER keeps the logs")
            raise
        versions = json.loads((run_dir / "versions.json").read_bytes())[-1]
        return line(options, more, read_rows(run_dir / METRICS_FILE), began, versions)


def run_process(options: LoopOptions, model: Path, run_dir: Path, more: Sequence[str]) -> ProcessSpec:
    """Return `grpo run` as a user would type it."""
    work = work_of(options.shape)
    asked = {
        "model-name": model,
        "run-dir": run_dir,
        "weight-bridge-mode": options.bridge,
        "training-steps": options.steps + LAST_STEPS,
        "batch-size": GROUP,
        "gradient-accumulation-steps": work["sequences"] // GROUP,
        "seq-len": work["prompt_len"] + work["completion_len"],
        "max-tokens-per-microbatch": work["max_tokens_per_microbatch"],
        "server.port": 0,
        "api.port": 0,
        "env": ENVIRONMENT,
        "env.group_size": GROUP,
        "env.prompt_tokens": work["prompt_len"],
        "env.completion_mean": work["completion_mean"],
    }
    if options.shape == "tiny":
        asked["server.extra-args"] = f"--kv-cache-memory-bytes,{CACHE_BYTES_TINY}"
    flags = [word for name, value in asked.items() for word in (f"--{name}", str(value))]
    argv = (sys.executable, "-m", "grpo_trainer", "run", *flags, *["--share-base"] * options.share_base, *more)
    return ProcessSpec("run", argv, {"PYTHONUNBUFFERED": "1"}, ends_run=True, stop_seconds=STOP_SECONDS)


def line(
    options: LoopOptions,
    more: Sequence[str],
    rows: Sequence[Row],
    began: float,
    versions: Mapping[str, Any],
) -> dict[str, Any]:
    """Return conditions, then figures: those of the steps after `--warmup-steps` and before the last `LAST_STEPS`.

    The run was started at `began`, in Unix seconds; `versions` is the last start in versions.json.

    Raises:
        ConfigError: no step is left.
    """
    measured = rows[options.warmup_steps : max(0, len(rows) - LAST_STEPS)]
    if not measured:
        got = f"{options.warmup_steps}, of {len(rows)} steps that the run took"
        raise no_step(got, f"fewer than the run takes, less {LAST_STEPS}")
    gpus, used = versions["gpus"], [row["gpu/memory_used_gib"] for row in measured if "gpu/memory_used_gib" in row]
    return {
        **options.model_dump(exclude={"model_dir", "run_dir"}),
        **work_of(options.shape),
        "group_size": GROUP,
        "steps": options.warmup_steps + len(measured),
        "run_options": list(more),
        "device": ", ".join(dict.fromkeys(gpus)) or "cpu",
        "devices": len(gpus) or os.cpu_count(),
        "versions": {name: versions.get(name) for name in ("vllm", "torch", "python")},
        **step_figures(measured),
        "start_s": start_figures(began, rows[0]),
        # All processes on the trainer's first GPU, at the ends of the steps.
        "peak_memory_gb": {"gpu": round(max(used) * 2**30 / 1e9, 3) if used else None},
        "load_average": round(os.getloadavg()[0], 2),
    }


def _total(rows: Sequence[Row], key: str) -> float:
    """Return a metric's sum over the steps; steps without it count as 0."""
    return sum(row.get(key) or 0.0 for row in rows)


def step_figures(rows: Sequence[Row]) -> dict[str, Any]:
    """Return speed and split of a mean step, in seconds and in tokens per second.

    Completion tokens are those of the completions that were trained on; trained tokens are those and their prompts.
    """
    steps, seconds = len(rows), _total(rows, "train/seconds")
    split = {name: _total(rows, key) / steps for name, key in SPLIT.items()}
    split["step_s"] -= sum(map(fenced, rows)) / steps
    split["other_s"] = max(0.0, seconds / steps - sum(split.values()))
    completions = _total(rows, "batch/trained_tokens")
    return {
        "step_s": _short(seconds / steps),
        "completion_tokens_per_s": round(completions / seconds, 1),
        "trained_tokens_per_s": round(_total(rows, "batch/tokens") / seconds, 1),
        "completion_tokens_mean": round(completions / _total(rows, "batch/sequences"), 1),
        "split": {name: _short(value) for name, value in split.items()},
        "staleness": {
            "mean": _short(_total(rows, "rollout/staleness_mean") / steps),
            "max": max(row.get("rollout/staleness_max") or 0.0 for row in rows),
        },
    }


def fenced(row: Row) -> float:
    """Return the seconds of publishing that lie within the step: of shared weights it is a fence around the update.

    Weights that are sent are written within a fence, too, but after the step.
    """
    is_shared = "publish/write_time" in row and "publish/send_time" not in row
    return row["train/sync_time"] if is_shared else 0.0


def start_figures(began: float, first: Row) -> dict[str, float | None]:
    """Return when each phase of the start was reached, in seconds since the command.

    `server_ready` is when the trainer had found the server, after its imports; None: it waited for no server. The first
    step was over when its row was written; before that it published, trained and waited.
    """
    first_step = first["time"] - began
    first_batch = first_step - first["train/step_time"] - first["train/sync_time"] + fenced(first)
    reached = {
        "server_ready": first.get("start/server_reached"),
        "trainer_ready": first_batch - first["train/data_fetch_time"],
        "first_batch": first_batch,
        "first_step": first_step,
    }
    return {phase: None if seconds is None else round(seconds, 2) for phase, seconds in reached.items()}


def _short(value: float) -> float:
    """Round to four significant digits."""
    return float(f"{value:.4g}")
