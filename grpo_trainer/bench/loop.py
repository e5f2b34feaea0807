"""`grpo bench loop`: a whole `grpo run` on a synthetic environment.

The figures are read from what a run writes (metrics.jsonl), and from its server's /metrics while it runs.
"""

from __future__ import annotations

import os
import platform
import sys
import tempfile
import threading
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from importlib.metadata import version
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import httpx
import msgspec
from pydantic import model_validator

from grpo_trainer.bench.load import RUNNING, cache_tokens, counter_total
from grpo_trainer.bench.models import CACHE_BYTES_TINY, SHAPES, ModelOptions, cpu_name, gpus_used_mb
from grpo_trainer.config.options import option
from grpo_trainer.config.server import KEY_VARIABLE, KvCacheDtype, Quantization
from grpo_trainer.errors import ConfigError, ProcessFailedError, ServerError
from grpo_trainer.files import METRICS_FILE, refuse_to_mix_runs
from grpo_trainer.launch.plan import ProcessSpec
from grpo_trainer.launch.supervisor import Supervisor
from grpo_trainer.machine import list_gpus
from grpo_trainer.metrics.rows import read_rows
from vllm_server.protocol import BRIDGE_INFO_ROUTE, BridgeInfo, Transport

ENVIRONMENT = "environments.synthetic"
GROUP = 8
"""Completions of a prompt."""
LAST_STEPS = 5
"""Steps at the end of a run that are not measured. Their groups are generated before, so that training, alone on the
machine, is faster."""
STOP_SECONDS = 30.0
"""Time before an interrupted run is killed; its last checkpoint is not needed."""
LOOK_SECONDS = 0.5
"""Between readings of the server's metrics: vLLM writes all of them for each answer, which costs it CPU time."""
MEMORY_EVERY = 8
"""Readings of the metrics for one of the GPUs' memory."""
OF_SHAPE: Mapping[str, Mapping[str, float]] = MappingProxyType(
    {
        "tiny": {  # for two CPU cores
            "sequences": 32,
            "prompt_len": 16,
            "completion_mean": 12.0,
            "completion_len": 48,
            "max_tokens_per_microbatch": 1024,
        },
        "7b": {"max_tokens_per_microbatch": 12_288},
        "14b": {"max_tokens_per_microbatch": 8192},
        "32b": {"max_tokens_per_microbatch": 8192},
    }
)
"""Defaults that a shape changes."""
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
"""A step of metrics.jsonl."""


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
    dummy_weights: bool = option(
        False,
        help="Write only the model's configuration. The server fills in dummy weights (--load-format dummy), and the "
        "trainer shares them. For models that take minutes to write; needs --bridge shared_vllm, or lora_only with "
        "--share-base.",
    )
    run_dir: Path | None = option(
        None, help="Folder in which the run is kept: logs, metrics, checkpoints (default: a temporary folder)."
    )
    bridge: Literal["shared_vllm", "lora_only", "broadcast", "lora_restart", "none"] = option(
        "shared_vllm", help="Weight bridge, the same as --weight-bridge-mode of `grpo run`."
    )
    share_base: bool = option(False, help="With lora_only: the trainer uses the server's base model.")
    transport: Literal["auto", Transport] = option(
        "auto", help="With lora_only: transport of adapters, the same as --lora-transport of `grpo run`."
    )
    quantization: Quantization = option("none", help="Quantisation of the server's weights; needs a GPU.")
    kv_cache_dtype: KvCacheDtype = option("auto", help="Dtype of the server's KV cache.")
    sequences: int = option(
        256,
        help="Completions in a step, a multiple of 8 (default: 256; with --shape tiny 32).",
        ge=GROUP,
        multiple_of=GROUP,
    )
    prompt_len: int = option(256, help="Tokens of a prompt (default: 256; with --shape tiny 16).", ge=1)
    completion_mean: float = option(
        350.0,
        help="Mean completion length in tokens, before truncation to --completion-len. Each token is the last with "
        "probability 1 / VALUE (default: 350; with --shape tiny 12).",
        ge=1,
    )
    completion_len: int = option(
        1024, help="Maximum tokens of a completion (default: 1024; with --shape tiny 48).", ge=1
    )
    max_tokens_per_microbatch: int = option(
        16_384, help="Maximum tokens of a microbatch (default: 16384; 7b: 12288; 14b, 32b: 8192; tiny: 1024).", gt=1
    )

    @model_validator(mode="before")
    @classmethod
    def _fill_in(cls, given: Any) -> Any:
        """Fill in the defaults of the shape."""
        return {**OF_SHAPE.get(given.get("shape", ""), {}), **given} if isinstance(given, dict) else given

    @model_validator(mode="after")
    def _can_be_measured(self) -> LoopOptions:
        for flag, given in (("--share-base", self.share_base), ("--transport", self.transport != "auto")):
            if given and self.bridge != "lora_only":
                fix = "leave it out"
                raise ConfigError(field=flag, got=f"--bridge {self.bridge}", wanted="--bridge lora_only", fix=fix)
        if self.dummy_weights and not (self.bridge == "shared_vllm" or self.share_base):
            raise ConfigError(
                "the trainer has no weights to load",
                field="--dummy-weights",
                got=f"--bridge {self.bridge}",
                wanted="a trainer that shares the server's weights",
                fix="use --bridge shared_vllm, or lora_only with --share-base",
            )
        if self.warmup_steps >= self.steps:
            raise ConfigError(
                "no step is left to measure",
                field="--warmup-steps",
                got=self.warmup_steps,
                wanted=f"fewer than --steps {self.steps}",
            )
        if self.completion_mean > (vocabulary := SHAPES[self.shape].vocab):
            raise ConfigError(
                "completions end at one token id of the vocabulary or more",
                field="--completion-mean",
                got=self.completion_mean,
                wanted=f"at most {vocabulary}, the vocabulary of --shape {self.shape}",
            )
        if self.max_tokens_per_microbatch < (longest := self.prompt_len + self.completion_len):
            raise ConfigError(
                "a pass must hold the longest sequence",
                field="--max-tokens-per-microbatch",
                got=self.max_tokens_per_microbatch,
                wanted=f"at least {longest}, --prompt-len and --completion-len together",
            )
        return self


def measure(options: LoopOptions, more: Sequence[str]) -> dict[str, Any]:
    """Write a model, train it, and return the figures.

    Args:
        more: additional options of `grpo run`, which take precedence.

    Raises:
        GrpoError: a process failed, or a signal arrived; all started processes have ended.
    """
    with tempfile.TemporaryDirectory(prefix="grpo-bench-") as name:
        model = (options.model_dir or Path(name) / "model").absolute()
        run_dir = (options.run_dir or Path(name) / "run").absolute()
        refuse_to_mix_runs(run_dir, "never", "--run-dir")
        writes = (sys.executable, "-m", "grpo_trainer.bench.models", options.shape, str(model))
        run = run_process(options, model, run_dir, more)
        try:
            _run(ProcessSpec("model", (*writes, *["no-weights"] * options.dummy_weights), ends_run=True), run_dir)
            began, watch = time.time(), Watch(run_dir)
            with watch.watching():
                _run(run, run_dir)
        except ProcessFailedError as error:
            if options.run_dir is None:
                error.add(summary="; --run-dir FOLDER keeps the logs")
            raise
        return line(options, more, read_rows(run_dir / METRICS_FILE), began, watch)


def run_process(options: LoopOptions, model: Path, run_dir: Path, more: Sequence[str]) -> ProcessSpec:
    """Return `grpo run` as a user would type it."""
    extra = ["--kv-cache-memory-bytes", str(CACHE_BYTES_TINY)] if options.shape == "tiny" else []
    extra += ["--load-format", "dummy"] if options.dummy_weights else []
    asked = {
        "model-name": model,
        "run-dir": run_dir,
        "weight-bridge-mode": options.bridge,
        "training-steps": options.steps + LAST_STEPS,
        "batch-size": GROUP,
        "gradient-accumulation-steps": options.sequences // GROUP,
        "seq-len": options.prompt_len + options.completion_len,
        "max-tokens-per-microbatch": options.max_tokens_per_microbatch,
        "server.port": 0,
        "api.port": 0,
        "env": ENVIRONMENT,
        "env.group_size": GROUP,
        "env.prompt_tokens": options.prompt_len,
        "env.completion_mean": options.completion_mean,
        "server.quantization": options.quantization,
        "server.kv-cache-dtype": options.kv_cache_dtype,
        **({"lora-transport": options.transport} if options.transport != "auto" else {}),
        **({"server.extra-args": ",".join(extra)} if extra else {}),
    }
    flags = [word for name, value in asked.items() for word in (f"--{name}", str(value))]
    flags += ["--share-base"] * options.share_base
    flags += ["--no-proof"] * options.dummy_weights  # so small that a synthetic change moves no logprob
    argv = (sys.executable, "-m", "grpo_trainer", "run", *flags, *more)
    return ProcessSpec("run", argv, {"PYTHONUNBUFFERED": "1"}, ends_run=True, stop_seconds=STOP_SECONDS)


class Watch:
    """Readings of a run's server, from a thread."""

    def __init__(self, run_dir: Path) -> None:
        self.running: list[tuple[float, float]] = []
        """Unix seconds, and the sequences that ran then; 0 while the server is away."""
        self.info: BridgeInfo | None = None
        """Who the server is; None: it never answered."""
        self.ready_at: float | None = None
        """Unix seconds of its first answer."""
        self.cache_tokens: int | None = None
        """Tokens that its KV cache has room for; None: it did not say."""
        self.gpu_mb: float | None = None
        """The highest reading of memory in use on all GPUs, in units of 1e6 bytes; None: there is none."""
        self._config = run_dir / "config" / "trainer.toml"

    @contextmanager
    def watching(self) -> Iterator[None]:
        done = threading.Event()
        with ThreadPoolExecutor(1, "watch") as pool:
            watching = pool.submit(self._until, done)
            try:
                yield
            finally:
                done.set()
            watching.result()

    def _until(self, done: threading.Event) -> None:
        key, reading = os.environ.get(KEY_VARIABLE), 0
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        with httpx.Client(timeout=5.0, trust_env=False, headers=headers) as http:
            while not done.wait(LOOK_SECONDS):
                if self._config.exists():
                    self._ask(http, f"http://127.0.0.1:{tomllib.loads(self._config.read_text())['server']['port']}")
                if reading % MEMORY_EVERY == 0:
                    used = gpus_used_mb(os.environ.get("CUDA_VISIBLE_DEVICES"))
                    self.gpu_mb = self.gpu_mb if used is None else max(self.gpu_mb or 0.0, used)
                reading += 1

    def _ask(self, http: httpx.Client, url: str) -> None:
        asked, running = time.time(), 0.0
        with suppress(httpx.HTTPError):  # it starts, or has ended
            if self.info is None:
                answer = http.get(f"{url}{BRIDGE_INFO_ROUTE}").raise_for_status()
                self.info = msgspec.json.decode(answer.content, type=BridgeInfo)
                self.ready_at = asked
            metrics = http.get(f"{url}/metrics").raise_for_status().text
            self.cache_tokens = self.cache_tokens or cache_tokens(metrics)
            running = counter_total(metrics, RUNNING)
        if self.info is not None:
            self.running.append((asked, running))


def _run(process: ProcessSpec, run_dir: Path) -> None:
    """Run a process to its end."""
    say = partial(print, file=sys.stderr, flush=True)
    with Supervisor(run_dir / "logs", say=say, echo=say) as supervisor:
        supervisor.start(process)
        supervisor.run(())


def line(options: LoopOptions, more: Sequence[str], rows: Sequence[Row], began: float, watch: Watch) -> dict[str, Any]:
    """Return conditions, then figures: those of the steps after `--warmup-steps` and before the last `LAST_STEPS`.

    Args:
        rows: of all steps.
        began: when the run was started, in Unix seconds.

    Raises:
        ConfigError: no step is left.
        ServerError: the server never answered with its description.
    """
    if (info := watch.info) is None:
        raise ServerError(field="inference server", got="no answer while the run went on", wanted="one")
    measured = rows[options.warmup_steps : max(0, len(rows) - LAST_STEPS)]
    if not measured:
        raise ConfigError(
            "no step is left to measure",
            field="--warmup-steps",
            got=f"{options.warmup_steps}, of {len(rows)} steps that the run took",
            wanted=f"fewer than the run takes, less {LAST_STEPS}",
        )
    gpus = list_gpus(os.environ.get("CUDA_VISIBLE_DEVICES"))[0] if info.device == "cuda" else ()
    conditions = options.model_dump(exclude={"model_dir", "run_dir", "dummy_weights"})
    return {
        **conditions,
        "group_size": GROUP,
        "steps": options.warmup_steps + len(measured),
        "run_options": list(more),
        "device": ", ".join(dict.fromkeys(gpu.name for gpu in gpus)) or cpu_name(),
        "devices": len(gpus) or os.cpu_count(),
        "dtype": info.dtype,
        "versions": {"vllm": info.vllm_version, "torch": version("torch"), "python": platform.python_version()},
        **step_figures(measured),
        "server": server_figures(measured, rows[options.warmup_steps - 1]["time"], watch, info.max_num_seqs),
        "start_s": start_figures(began, watch.ready_at, rows[0]),
        "peak_memory_gb": {"gpu": None if not gpus or watch.gpu_mb is None else round(watch.gpu_mb / 1e3, 3)},
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
        "checkpoint_share": _short(_total(rows, "train/save_time") / seconds),
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


def server_figures(rows: Sequence[Row], begin: float, watch: Watch, max_num_seqs: int | None) -> dict[str, Any]:
    """Return how busy the server was: sequences that ran, and how many it can hold.

    It can hold as many sequences of the steps' mean length as its KV cache has room for, and `max_num_seqs` at most.

    Args:
        begin: when the first of the steps began, in Unix seconds.
    """
    tokens = _total(rows, "batch/tokens") / _total(rows, "batch/sequences")
    by_cache = None if watch.cache_tokens is None else int(watch.cache_tokens / tokens)
    holds = min((limit for limit in (by_cache, max_num_seqs) if limit is not None), default=None)
    running = [number for at, number in watch.running if begin <= at <= rows[-1]["time"]]
    return {"running_mean": round(sum(running) / len(running), 1) if running else None, "can_hold": holds}


def start_figures(began: float, server_ready: float | None, first: Row) -> dict[str, float]:
    """Return when each phase of the start was reached, in seconds since the command, in their order.

    Args:
        first: the first step. It was over when its row was written; before that it published, trained and waited.
    """
    batch = first["time"] - first["train/step_time"] - first["train/sync_time"] + fenced(first)
    reached = {
        "server_ready": batch if server_ready is None else server_ready,
        "trainer_ready": batch - first["train/data_fetch_time"],
        "first_batch": batch,
        "first_step": first["time"],
    }
    return {phase: round(moment - began, 2) for phase, moment in sorted(reached.items(), key=lambda item: item[1])}


def _short(value: float) -> float:
    """Round to four significant digits."""
    return float(f"{value:.4g}")
