"""A run's configuration as process specifications: pure, so that what a run starts can be read and tested.

Every process gets a configuration file of its own under `RUN_DIR/config/`; the command line that uses it can be
repeated by hand.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from grpo_trainer.config import require_available
from grpo_trainer.errors import ConfigError
from grpo_trainer.options import dump
from grpo_trainer.run_config import EnvironmentProcess, RunConfig

LOOPBACK = "127.0.0.1"
BUILT_IN_ENVIRONMENTS = MappingProxyType({"arithmetic": "environments.arithmetic_server"})


@dataclass(frozen=True)
class ProcessSpec:
    """One process of a run.

    Attributes:
        name: unique; also the name of its log file.
        argv: full command line.
        env: added to the environment that it inherits.
        ready_url: answers 200 once the process does its work; None: it is ready when it runs.
        ready_timeout: seconds until then, at most.
        ends_run: the run is over when this process has ended with 0.
        may_end: it may end with 0 by itself without that being a failure.
        stop_seconds: how long it may take to end after SIGTERM, before SIGKILL.
    """

    name: str
    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    ready_url: str | None = None
    ready_timeout: float = 600.0
    ends_run: bool = False
    may_end: bool = False
    stop_seconds: float = 3.0


@dataclass(frozen=True)
class RunPlan:
    """What a run starts, stage by stage: a stage starts when all processes of the one before are ready."""

    stages: tuple[tuple[ProcessSpec, ...], ...]
    config_files: Mapping[Path, Mapping[str, Any]]
    ports: Mapping[str, int]

    @property
    def processes(self) -> tuple[ProcessSpec, ...]:
        return tuple(process for stage in self.stages for process in stage)


def plan_run(config: RunConfig, ports: Mapping[str, int], *, python: str, on_gpu: bool) -> RunPlan:
    """Plan the processes of `grpo run`.

    Args:
        config: the run.
        ports: resolved (never 0) ports of "api" and "server".
        python: the interpreter of every process.
        on_gpu: whether server and trainer run on a GPU; on a CPU all processes share its cores.
    """
    folder = config.run_dir / "config"
    trainer = _trainer_table(config, ports, on_gpu)
    files: dict[Path, Mapping[str, Any]] = {folder / "trainer.toml": trainer}
    environments = []
    for name, environment in _named(config.environments):
        files[folder / f"{name}.toml"] = _environment_tables(config, environment, ports)
        environments.append(_environment_process(name, environment, folder / f"{name}.toml", python))
    stages = (
        (_api_process(config, ports, python), _server_process(config, ports, python, on_gpu)),
        (_trainer_process(folder / "trainer.toml", python), *environments),
    )
    shared = {} if on_gpu else SHARED_CORES
    stages = tuple(tuple(_with_env(process, shared) for process in stage) for stage in stages)
    return RunPlan(stages=stages, config_files=files, ports=dict(ports))


SHARED_CORES = MappingProxyType({"OMP_WAIT_POLICY": "passive"})
"""On a CPU: idle OpenMP threads sleep instead of spinning on cores that another process needs."""


def _with_env(process: ProcessSpec, env: Mapping[str, str]) -> ProcessSpec:
    return ProcessSpec(**{**process.__dict__, "env": {**env, **process.env, "PYTHONUNBUFFERED": "1"}})


def _api_process(config: RunConfig, ports: Mapping[str, int], python: str) -> ProcessSpec:
    store = ("--store", str(config.api.store)) if config.api.store else ()
    port = ports["api"]
    return ProcessSpec(
        name="api",
        argv=(
            python,
            "-m",
            "environments.api",
            "--host",
            LOOPBACK,
            "--port",
            str(port),
            *store,
            *config.api.extra_args,
        ),
        ready_url=f"http://{LOOPBACK}:{port}/",
        ready_timeout=60.0,
    )


def _server_process(config: RunConfig, ports: Mapping[str, int], python: str, on_gpu: bool) -> ProcessSpec:
    server, trainer = config.server, config.trainer
    bridge = require_available(trainer.bridge)
    dtype = trainer_dtype(config, on_gpu) if server.dtype == "auto" else server.dtype
    max_model_len = server.max_model_len or trainer.vllm.max_model_len or trainer.model.seq_len
    share = trainer.vllm.gpu_memory_utilization or server.gpu_memory_utilization
    port = ports["server"]
    argv = [
        python,
        "-m",
        "vllm_server",
        "--model",
        trainer.model.name,
        "--host",
        LOOPBACK,
        "--port",
        str(port),
    ]
    argv += ["--max-model-len", str(max_model_len)]
    argv += ["--max-lora-rank", str(bridge.r), "--lora-name", bridge.name]
    argv += ["--lora-keep-versions", str(bridge.keep_versions)]
    argv += ["--lora-root", str((bridge.lora_root or config.run_dir / "adapters").absolute())]
    argv += ["--dtype", dtype]
    if on_gpu:
        argv += ["--gpu-memory-utilization", str(share)]
    if server.enforce_eager:
        argv += ["--enforce-eager"]
    return ProcessSpec(
        name="server",
        argv=(*argv, *server.extra_args),
        ready_url=f"http://{LOOPBACK}:{port}/health",
        ready_timeout=trainer.vllm.startup_timeout,
        stop_seconds=5.0,
    )


def trainer_dtype(config: RunConfig, on_gpu: bool) -> str:
    """What `--dtype auto` comes to, decided once so that trainer and server can't differ."""
    wanted = config.trainer.model
    if wanted.dtype != "auto":
        return wanted.dtype
    return "bfloat16" if on_gpu and wanted.device != "cpu" else "float32"


def _trainer_table(config: RunConfig, ports: Mapping[str, int], on_gpu: bool) -> dict[str, Any]:
    return dump(config.trainer, only_set=True) | {
        "atropos_url": f"http://{LOOPBACK}:{ports['api']}",
        "vllm_port": ports["server"],
        "dtype": trainer_dtype(config, on_gpu),
        "save_path": str(config.run_dir / "checkpoints"),
        "log_dir": str(config.run_dir),
    }


def _trainer_process(config_file: Path, python: str) -> ProcessSpec:
    return ProcessSpec(
        name="trainer",
        argv=(python, "-m", "grpo_trainer", "train", "--config", str(config_file)),
        ends_run=True,
        stop_seconds=7.0,
    )


def _named(environments: tuple[EnvironmentProcess, ...]) -> list[tuple[str, EnvironmentProcess]]:
    """Names for processes and files: env-arithmetic, and env-arithmetic-2 for the second of a kind."""
    counts: dict[str, int] = {}
    named = []
    for environment in environments:
        base = f"env-{environment.name.rpartition('.')[2].removesuffix('_server')}"
        counts[base] = counts.get(base, 0) + 1
        named.append((base if counts[base] == 1 else f"{base}-{counts[base]}", environment))
    return named


def _environment_tables(config: RunConfig, environment: EnvironmentProcess, ports: Mapping[str, int]) -> dict[str, Any]:
    model = config.trainer.model.name
    env = {
        "tokenizer_name": model,
        "rollout_server_url": f"http://{LOOPBACK}:{ports['api']}",
        "use_wandb": False,
        **environment.env,
    }
    openai = {
        "base_url": f"http://{LOOPBACK}:{ports['server']}/v1",
        "model_name": model,
        "server_type": "vllm",
        "api_key": "x",
        **environment.openai,
    }
    return {"env": env, "openai": openai}


def _environment_process(name: str, environment: EnvironmentProcess, config_file: Path, python: str) -> ProcessSpec:
    module = environment_module(environment.name)
    return ProcessSpec(name=name, argv=(python, "-m", module, "serve", "--config", str(config_file)), may_end=True)


def environment_module(name: str) -> str:
    """The module that runs an environment: a built-in by its short name, or a dotted module of the user's."""
    if name in BUILT_IN_ENVIRONMENTS:
        return BUILT_IN_ENVIRONMENTS[name]
    if "." in name:
        return name
    known = ", ".join(BUILT_IN_ENVIRONMENTS)
    raise ConfigError(
        f"--env {name}: unknown environment; built in: {known}. Your own: its module, e.g. my_envs.{name}"
    )
