"""A run's configuration as process specifications: pure, so that what a run starts can be read and tested.

Every process gets a configuration file of its own under `RUN_DIR/config/`; the command line that uses it can be
repeated by hand.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from grpo_common.trace import FILE_VARIABLE, NAME_VARIABLE
from grpo_trainer.config.bridge import AllWeightsOptions, LoraOnly
from grpo_trainer.config.environments import EnvironmentProcess, environment_module
from grpo_trainer.config.options import dump, key_of
from grpo_trainer.config.run import RunConfig
from grpo_trainer.config.server import DEGREES, KEY_VARIABLE, ServerProcess, VllmConfig, arguments
from grpo_trainer.config.train import API_KEY_VARIABLE, TrainConfig
from grpo_trainer.errors import ConfigError
from vllm_server.protocol.bridge_config import FILE_NAME

LOOPBACK = "127.0.0.1"
CACHE_FLAG = "--kv-cache-memory-bytes"
"""Of vLLM: the size of its key-value cache; without it, vLLM measures what is free."""
NO_ENV: Mapping[str, str] = MappingProxyType({})
STOP_SECONDS_ALL_WEIGHTS = 120.0
"""A trainer of all weights may take so long to save them with their optimizer when it is asked to stop."""


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
        told: it waits on its standard input for a line, see `Child.tell`; otherwise that is empty.
    """

    name: str
    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    ready_url: str | None = None
    ready_timeout: float = 600.0
    ends_run: bool = False
    may_end: bool = False
    stop_seconds: float = 3.0
    told: bool = False

    @property
    def arguments(self) -> tuple[str, ...]:
        """What follows `python -m MODULE`."""
        return self.argv[3:]


@dataclass(frozen=True)
class RunPlan:
    """What a run starts, stage by stage: a stage starts when all processes of the one before are ready.

    Most runs have one stage: whoever needs another process waits for it, when it has done what it can do without.
    """

    stages: tuple[tuple[ProcessSpec, ...], ...]
    config_files: Mapping[Path, Mapping[str, Any]]
    ports: Mapping[str, int]

    @property
    def processes(self) -> tuple[ProcessSpec, ...]:
        return tuple(process for stage in self.stages for process in stage)


def plan_run(
    config: RunConfig,
    ports: Mapping[str, int],
    *,
    python: str,
    on_gpu: bool,
    cache_bytes: int | None = None,
    env: Mapping[str, str] = NO_ENV,
) -> RunPlan:
    """Plan the processes of `grpo run`.

    Args:
        config: the run.
        ports: resolved (never 0) ports of "api" and of each server.
        python: the interpreter of every process.
        on_gpu: whether server and trainer run on a GPU; on a CPU all processes share its cores.
        cache_bytes: size of the server's key-value cache on each of its GPUs; None: it measures what is free.
        env: added to the environment of every process.

    Raises:
        ConfigError: the trainer is to use the server's weights, but from another device.
    """
    _check_device(config.trainer, on_gpu=on_gpu)
    _check_gpus(config.server, on_gpu=on_gpu)
    folder = config.run_dir / "config"
    trainer = _trainer_table(config, ports, on_gpu)
    files: dict[Path, Mapping[str, Any]] = {folder / "trainer.toml": trainer}
    environments = []
    for name, environment in _named(config.environments):
        files[folder / f"{name}.toml"] = _environment_tables(config, name, environment, ports)
        environments.append(_environment_process(name, environment, folder / f"{name}.toml", python))
    servers = [_api_process(config, ports, python)]
    if not config.trainer.owns_server:
        servers += _server_processes(config, ports, python, on_gpu, cache_bytes)
    trainers = _trainer_processes(config, folder / "trainer.toml", ports, python)
    overlaps = not on_gpu or _may_overlap(config, cache_bytes)
    stages = ((*servers, *trainers, *environments),) if overlaps else ((*servers, *environments), trainers)
    shared = {} if on_gpu else SHARED_CORES
    planned = tuple(
        tuple(_with_env(process, {**shared, **env, **_traced(config, process)}) for process in stage)
        for stage in stages
    )
    return RunPlan(stages=planned, config_files=files, ports=dict(ports))


def _may_overlap(config: RunConfig, cache_bytes: int | None) -> bool:
    """Whether the trainer may use a GPU while the server starts there.

    A server that measures how much memory is free for its cache would count the trainer's, and vLLM ends with an error
    when memory is given back meanwhile. Several trainer processes measure together, when all servers are there.
    """
    if config.trainer.owns_server:
        return True
    is_fixed = cache_bytes is not None or says_cache_size(config.trainer.vllm.extra_args)
    return is_fixed and config.options.trainer_gpus == 1


SHARED_CORES = MappingProxyType({"OMP_WAIT_POLICY": "passive"})
"""On a CPU: idle OpenMP threads sleep instead of spinning on cores that another process needs."""


def _traced(config: RunConfig, process: ProcessSpec) -> dict[str, str]:
    file = config.trace_file
    return {} if file is None else {FILE_VARIABLE: str(file), NAME_VARIABLE: process.name}


def _with_env(process: ProcessSpec, env: Mapping[str, str]) -> ProcessSpec:
    return ProcessSpec(**{**process.__dict__, "env": {**env, **process.env, "PYTHONUNBUFFERED": "1"}})


def _api_process(config: RunConfig, ports: Mapping[str, int], python: str) -> ProcessSpec:
    store = ("--store", str(config.store)) if config.store else ()
    port, key = ports["api"], config.trainer.rollouts.api_key
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
        env={API_KEY_VARIABLE: key} if key else {},
        ready_url=f"http://{LOOPBACK}:{port}/",
        ready_timeout=60.0,
    )


def server_process(
    trainer: TrainConfig,
    *,
    python: str,
    on_gpu: bool,
    model: str,
    flags: tuple[str, ...] = (),
    name: str = "server",
) -> ProcessSpec:
    """The server as a trainer's configuration wants it.

    Args:
        model: folder or hub name of what it serves; clients call it by the trainer's --model-name all the same.
        flags: more of its flags.
    """
    vllm = trainer.vllm
    argv = [python, "-m", "vllm_server", "--model", model, "--served-model-name", trainer.model.name]
    argv += ["--host", vllm.host, "--port", str(vllm.port)]
    argv += ["--max-model-len", str(trainer.served_len)]
    argv += ["--dtype", trainer.served_dtype(on_gpu=on_gpu)]
    if trainer.model.logits_dtype != "auto":
        argv += ["--logits-dtype", trainer.model.logits_dtype]
    if on_gpu:
        argv += ["--gpu-memory-utilization", str(vllm.gpu_memory_utilization)]
    if vllm.enforce_eager:
        argv += ["--enforce-eager"]
    for each in DEGREES:
        if (degree := getattr(vllm, each)) > 1:
            argv += [VllmConfig.flags()[each], str(degree)]
    key = {KEY_VARIABLE: vllm.api_key} if vllm.api_key else {}
    return ProcessSpec(
        name=name,
        argv=(*argv, *flags, *vllm.extra_args),
        env={**key, **({"CUDA_VISIBLE_DEVICES": vllm.gpus} if vllm.gpus else {})},
        ready_url=f"{vllm.url}/health",
        ready_timeout=vllm.startup_timeout,
        stop_seconds=5.0,
    )


def lora_flags(trainer: TrainConfig, bridge: LoraOnly, log_dir: Path) -> tuple[str, ...]:
    """A server's flags for the adapters that a trainer publishes.

    Args:
        log_dir: the trainer's.
    """
    root = (bridge.lora_root or log_dir / "adapters").absolute()
    names = ("--max-lora-rank", str(bridge.r), "--lora-name", bridge.name)
    return (*names, "--lora-keep-versions", str(trainer.keep_versions), "--lora-root", str(root))


def says_cache_size(extra_args: tuple[str, ...]) -> bool:
    """Whether the user has fixed the size of the server's key-value cache."""
    return any(key_of(flag) == key_of(CACHE_FLAG) for flag, _ in arguments(extra_args))


def waiting_server(server: ProcessSpec) -> ProcessSpec:
    """A process that makes a server's imports, in this one's environment, and serves once it is told the arguments."""
    python = server.argv[0]
    return replace(server, argv=(python, "-m", "vllm_server.standby"), ready_url=None, told=True)


def _server_processes(
    config: RunConfig, ports: Mapping[str, int], python: str, on_gpu: bool, cache_bytes: int | None
) -> Iterator[ProcessSpec]:
    bridge = config.trainer.bridge
    flags = [] if cache_bytes is None else [CACHE_FLAG, str(cache_bytes)]
    if isinstance(bridge, LoraOnly):
        flags += lora_flags(config.trainer, bridge, config.run_dir)
    trainer = reached(config, ports, on_gpu)
    shared = ["--shared-weights", "--bridge-config-path", str(_bridge_config_path(config))]
    for name, vllm in zip(config.server.names, trainer.vllm.each, strict=True):
        own = (*flags, *shared) if trainer.shares_weights and name == config.server.names[0] else tuple(flags)
        one = trainer.model_copy(update={"vllm": vllm})
        yield server_process(one, python=python, on_gpu=on_gpu, model=one.model.name, flags=own, name=name)


def _check_device(trainer: TrainConfig, *, on_gpu: bool) -> None:
    device = trainer.model.device
    if trainer.shares_weights and device != "auto" and device.startswith("cuda") != on_gpu:
        where = "a GPU's memory" if on_gpu else "main memory"
        raise ConfigError(
            "the trainer is to use the server's weights",
            field="--device",
            got=device,
            wanted=f"the device where they are: {where}",
            fix="use --device auto",
        )


def _check_gpus(server: ServerProcess, *, on_gpu: bool) -> None:
    if on_gpu and server.replicas > 1 and server.gpus is None:
        example = ";".join(map(str, range(server.replicas)))
        raise ConfigError(
            "all would start on the same GPU",
            field="--server.replicas",
            got=server.replicas,
            wanted="--server.gpus with it",
            fix=f"name the GPUs of each server: --server.gpus '{example}' (the trainer is on the first that it sees)",
        )


def _bridge_config_path(config: RunConfig) -> Path:
    return (config.run_dir / "config" / FILE_NAME).absolute()


def reached(config: RunConfig, ports: Mapping[str, int], on_gpu: bool) -> TrainConfig:
    """The trainer's configuration with where the run's servers are, and in which dtype they generate."""
    trainer = config.trainer
    where = {"host": LOOPBACK, "port": ports["server"], "also": _others(config, ports), "gpus": config.server.gpus}
    where["dtype"] = trainer.served_dtype(on_gpu=on_gpu)
    return trainer.model_copy(update={"vllm": trainer.vllm.model_copy(update=where)})


def _others(config: RunConfig, ports: Mapping[str, int]) -> tuple[str, ...]:
    """Addresses of the servers but the first."""
    return tuple(f"{LOOPBACK}:{ports[name]}" for name in config.server.names[1:])


def _trainer_table(config: RunConfig, ports: Mapping[str, int], on_gpu: bool) -> dict[str, Any]:
    trainer = reached(config, ports, on_gpu) if config.trainer.owns_server else config.trainer
    shared = {"vllm_config_path": str(_bridge_config_path(config))} if trainer.shares_weights else {}
    return dump(trainer, only_set=True) | {
        **shared,
        "atropos_url": f"http://{LOOPBACK}:{ports['api']}",
        "vllm_port": ports["server"],
        **({"vllm_also": list(others)} if (others := _others(config, ports)) else {}),
        "dtype": trainer.trainer_dtype(on_gpu=on_gpu),
        "save_path": str(config.run_dir / "checkpoints"),
        "log_dir": str(config.run_dir),
    }


def _trainer_processes(
    config: RunConfig, config_file: Path, ports: Mapping[str, int], python: str
) -> tuple[ProcessSpec, ...]:
    """One for each of the trainer's GPUs; the first leads the others, which end with it."""
    argv = (python, "-m", "grpo_trainer", "train", "--config", str(config_file))
    seconds = STOP_SECONDS_ALL_WEIGHTS if isinstance(config.trainer.bridge, AllWeightsOptions) else 7.0
    size = config.options.trainer_gpus
    if size == 1:
        return (ProcessSpec("trainer", argv, ends_run=True, stop_seconds=seconds),)
    meeting = {"MASTER_ADDR": LOOPBACK, "MASTER_PORT": str(ports["trainers"]), "WORLD_SIZE": str(size)}
    return tuple(
        ProcessSpec(
            "trainer" if rank == 0 else f"trainer-{rank}",
            argv,
            {**meeting, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            ends_run=rank == 0,
            may_end=rank > 0,
            stop_seconds=seconds,
        )
        for rank in range(size)
    )


def _named(environments: tuple[EnvironmentProcess, ...]) -> list[tuple[str, EnvironmentProcess]]:
    """Names for processes and files: env-arithmetic, and env-arithmetic-2 for the second of a kind."""
    counts: dict[str, int] = {}
    named = []
    for environment in environments:
        base = _base_name(environment)
        counts[base] = counts.get(base, 0) + 1
        named.append((base if counts[base] == 1 else f"{base}-{counts[base]}", environment))
    return named


def _base_name(environment: EnvironmentProcess) -> str:
    return f"env-{environment.name.rpartition('.')[2].removesuffix('_server')}"


def _environment_tables(
    config: RunConfig, name: str, environment: EnvironmentProcess, ports: Mapping[str, int]
) -> dict[str, Any]:
    trainer, model = config.trainer, config.trainer.model.name
    env = {
        "tokenizer_name": model,
        "max_token_length": min(trainer.model.seq_len, trainer.served_len),
        "metrics_path": str(config.run_dir / "logs" / f"{name}.metrics.jsonl"),
        # The second of a kind has metrics and a state of its own.
        **({} if name == _base_name(environment) else {"wandb_name": name.removeprefix("env-")}),
        "rollout_server_url": f"http://{LOOPBACK}:{ports['api']}",
        **({"rollout_api_key": trainer.rollouts.api_key} if trainer.rollouts.api_key else {}),
        "use_wandb": False,
        **({"retry_timeout": restart_patience(trainer)} if trainer.owns_server else {}),
        **environment.env,
    }
    openai = {
        "base_url": ",".join(f"http://{LOOPBACK}:{ports[name]}/v1" for name in config.server.names),
        "model_name": model,
        "server_type": "vllm",
        "api_key": trainer.vllm.api_key or "x",
        **environment.openai,
    }
    return {"env": env, "openai": openai}


def restart_patience(trainer: TrainConfig) -> float:
    """Seconds that the server may be away while the trainer starts it anew."""
    return trainer.vllm.startup_timeout + 60.0


def _environment_process(name: str, environment: EnvironmentProcess, config_file: Path, python: str) -> ProcessSpec:
    module = environment_module(environment.name)
    return ProcessSpec(name=name, argv=(python, "-m", module, "serve", "--config", str(config_file)), may_end=True)
