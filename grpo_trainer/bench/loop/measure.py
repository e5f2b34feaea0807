"""The whole measurement: write a model, run the training, and compute the figures."""

from __future__ import annotations

import os
import platform
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from grpo_trainer.bench.devices import cpu_name, gpu_names
from grpo_trainer.bench.loop.figures import Window, can_hold, cpu_per_group, server_figures, start_figures, step_figures
from grpo_trainer.bench.loop.options import GROUP, LoopOptions
from grpo_trainer.bench.loop.processes import model_process, run_process
from grpo_trainer.bench.loop.sampling import Watch
from grpo_trainer.errors import ProcessFailedError, ServerError
from grpo_trainer.files import METRICS_FILE, refuse_to_mix_runs
from grpo_trainer.launch.plan import ProcessSpec
from grpo_trainer.launch.supervisor import Supervisor
from grpo_trainer.metrics.rows import read_rows


def measure(options: LoopOptions, more: Sequence[str]) -> dict[str, Any]:
    """Write a model, train it, and return the figures.

    Args:
        more: additional options of `grpo run`.

    Raises:
        GrpoError: a process failed, or a signal arrived; all started processes have ended.
    """
    with tempfile.TemporaryDirectory(prefix="grpo-bench-") as name:
        model = (options.model.model_dir or Path(name) / "model").absolute()
        run_dir = (options.run_dir or Path(name) / "run").absolute()
        refuse_to_mix_runs(run_dir, "never", "--run-dir")
        try:
            _finish(model_process(options, model), run_dir)
            began, watch = _finish(run_process(options, model, run_dir, more), run_dir)
        except ProcessFailedError as error:
            if options.run_dir is None:
                error.add(summary="; --run-dir FOLDER keeps the logs")
            raise
        return as_dict(options, more, read_rows(run_dir / METRICS_FILE), began, watch)


def _finish(process: ProcessSpec, run_dir: Path) -> tuple[float, Watch]:
    """Run a process to its end, and return its start in Unix seconds and the samples of it."""
    tell = partial(print, file=sys.stderr, flush=True)
    with Supervisor(run_dir / "logs", say=tell, echo=tell) as supervisor:
        began = time.time()
        watch = Watch(supervisor.start(process).pid, run_dir)
        with watch.watching():
            supervisor.run(())  # it is started: until it is done
    return began, watch


def as_dict(
    options: LoopOptions, more: Sequence[str], rows: Sequence[dict[str, Any]], began: float, watch: Watch
) -> dict[str, Any]:
    """Return the line: conditions, then figures.

    Raises:
        ServerError: the server never answered with its description.
    """
    info = watch.info
    if info is None:
        raise ServerError(field="inference server", got="no answer while the run went on", wanted="one")
    window = Window.of(rows, options.warmup_steps)
    holds = can_hold(
        watch.cache_tokens, info.max_num_seqs, window.total("batch/tokens") / window.total("batch/sequences")
    )
    names = gpu_names(os.environ.get("CUDA_VISIBLE_DEVICES")) if info.device == "cuda" else None
    return {
        **options.choice.model_dump(),
        "shape": options.model.shape,
        **options.work.model_dump(),
        "group_size": GROUP,
        "steps": options.warmup_steps + len(window.rows),
        "warmup_steps": options.warmup_steps,
        "run_options": list(more),
        "device": ", ".join(dict.fromkeys(names)) if names else cpu_name(),
        "devices": len(names) if names else os.cpu_count(),
        "dtype": info.dtype,
        "versions": {"vllm": info.vllm_version, "torch": version("torch"), "python": platform.python_version()},
        **step_figures(window),
        "server": server_figures(window, watch.loads, holds),
        "cpu_ms_per_group": cpu_per_group(window, watch.looks),
        "start_s": start_figures(began, watch.seen, rows[0]),
        "peak_memory_gb": {
            "rss": {role: round(held / 1e9, 3) for role, held in watch.rss.items()},
            "pss": round(watch.pss / 1e9, 3) or None,
            "gpu": None if names is None or watch.gpu_mb is None else round(watch.gpu_mb / 1e3, 3),
        },
        "load_average": round(os.getloadavg()[0], 2),
    }
