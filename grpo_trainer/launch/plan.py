"""Turns a run's configuration into process specifications: a pure function, so that a plan can be read and tested.

Each trainer and environment has its own configuration file in `RUN_DIR/config/`, and its command line can be repeated
by hand.
"""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from hashlib import sha256
from itertools import count
from pathlib import Path
from types import MappingProxyType
from typing import Any
from urllib.parse import urlsplit

from environments.running.settings_check import AGENT, tool_parser
from grpo_common.http import address
from grpo_common.redaction import redacted_arguments
from grpo_common.status import VARIABLE as STATUS_VARIABLE
from grpo_common.trace import FILE_VARIABLE, NAME_VARIABLE
from grpo_trainer.config.options import dump, key_of
from grpo_trainer.config.processes import EnvironmentProcess, RunConfig, environment_command
from grpo_trainer.config.server import DEGREES, KEY_VARIABLE, arguments
from grpo_trainer.config.train import API_KEY_VARIABLE, TrainConfig
from grpo_trainer.launch.places import HERE, LOOPBACK, NO_PLACES, Place, Places, meeting_address, trainer_names
from grpo_trainer.server_client import answers
from vllm_server.protocol.bridge_config import FILE_NAME

CACHE_FLAG = "--kv-cache-memory-bytes"
"""vLLM's flag for the size of its KV cache; without it, vLLM measures the free memory."""
API_START_SECONDS = 60.0
"""Most seconds until the rollout API answers."""
SEED_FLAG = "--seed"
PARSER_FLAG = "--tool-call-parser"
"""vLLM's flag for the seed of its sampling; its default is 0 at every start."""
TRAINERS = "trainers"
"""The trainer processes, which restart together."""
STOP_SECONDS_ALL_WEIGHTS = 120.0
"""Time for a trainer of all weights to save them and the optimizer's states after SIGTERM."""


@dataclass(frozen=True)
class ProcessSpec:
    """One process of a run."""

    name: str
    """Unique; also the name of its log file."""
    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    """Added to the environment that it inherits."""
    ready_url: str | None = None
    """Answers 200 once the process is ready; None: it is ready as soon as it runs."""
    ready_key: str | None = field(default=None, repr=False)
    """Bearer token of requests to `ready_url`."""
    ready_timeout: float = 600.0
    ends_run: bool = False
    """The run is over when this process exits with 0."""
    may_end: bool = False
    """An exit with 0 is no failure."""
    stop_seconds: float = 3.0
    """Between SIGTERM and SIGKILL."""
    place: Place = HERE
    restarts: str = ""
    """Processes with the same name here restart together when one ends unexpectedly; empty: it does not restart."""
    after_errors: bool = False
    """It restarts after errors that it reports itself, too, not only when it was killed."""
    again: tuple[str, ...] = ()
    """Further arguments when it restarts."""
    seed: str | None = None
    """Of a server: each of its starts has another `sampling_seed` of this; None: it has none, or the user's."""


@dataclass(frozen=True)
class RunPlan:
    """The processes of a run, stage by stage: a stage starts when all processes of the stage before are ready.

    Most runs have one stage. There, a process that needs another one waits for it, after the work that it can do alone.
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
    env: Mapping[str, str] = MappingProxyType({}),
    places: Places = NO_PLACES,
    step: int = 0,
) -> RunPlan:
    """Plan the processes of `grpo run`.

    Args:
        ports: resolved (never 0) ports of "api" and of each server.
        on_gpu: whether server and trainer run on a GPU; on a CPU all processes share its cores.
        cache_bytes: size of the server's KV cache on each of its GPUs; None: the server measures the free memory.
        env: added to the environment of every process.
        step: the last one of a run that is resumed.
    """
    folder = config.run_dir / "config"
    trainer = _trainer_table(config, ports, on_gpu, places)
    files: dict[Path, Mapping[str, Any]] = {folder / "trainer.toml": trainer}
    environments = []
    for name, seed, environment in _named(config.environments):
        file = folder / f"{name}.toml"
        files[file] = _environment_tables(config, name, seed, environment, ports, places)
        argv = (python, "-m", *environment_command(environment.name), "serve", "--config", str(file))
        environments.append(ProcessSpec(name, argv, may_end=True, restarts=name, after_errors=True))
    servers = [_api_process(config, ports, python)]
    if not config.trainer.owns_server:
        servers += _server_processes(config, ports, python, on_gpu, cache_bytes, places, step)
    trainers = _trainer_processes(config, folder / "trainer.toml", ports, python, places)
    # May the trainer use a GPU while the server starts on it? A server that measures the free memory for its cache
    # would count the trainer's memory as used, and vLLM exits with an error if memory is freed during the measurement.
    is_fixed = cache_bytes is not None or gives(config.trainer.server.extra_args, CACHE_FLAG)
    overlaps = not on_gpu or config.trainer.owns_server or is_fixed
    stages = ((*servers, *trainers, *environments),) if overlaps else ((*servers, *environments), trainers)
    env = {**({} if on_gpu else SHARED_CORES), **env}

    def completed(process: ProcessSpec) -> ProcessSpec:
        """Return a process with its place, and with the environment that all have."""
        place = places.get(process.name, HERE)
        file = config.trace_file if place.is_here else None  # the file is on the head
        traced = {} if file is None else {FILE_VARIABLE: str(file), NAME_VARIABLE: process.name}
        says = {} if process.ready_url else {STATUS_VARIABLE: str(config.run_dir / "status" / f"{process.name}.json")}
        return replace(process, env={**env, **traced, **says, **process.env, "PYTHONUNBUFFERED": "1"}, place=place)

    planned = tuple(tuple(map(completed, stage)) for stage in stages)
    return RunPlan(stages=planned, config_files=files, ports=dict(ports))


SHARED_CORES = MappingProxyType({"OMP_WAIT_POLICY": "passive"})
"""Environment on a CPU: idle OpenMP threads sleep instead of spinning on cores that another process needs."""


def _api_process(config: RunConfig, ports: Mapping[str, int], python: str) -> ProcessSpec:
    port, key = ports["api"], config.trainer.rollout_api_key
    argv = [python, "-m", "environments.api", "--host", LOOPBACK, "--port", str(port)]
    argv += ["--run-dir", str(config.run_dir)]
    if config.store:
        argv += ["--store", str(config.store)]
    return ProcessSpec(
        name="api",
        argv=(*argv, *config.api.extra_args),
        env={API_KEY_VARIABLE: key} if key else {},
        ready_url=f"http://{LOOPBACK}:{port}/",
        ready_key=key,
        ready_timeout=API_START_SECONDS,
        restarts="api" if config.store else "",  # without a file it would have forgotten the run
    )


def server_process(
    trainer: TrainConfig,
    *,
    python: str,
    on_gpu: bool,
    model: str,
    flags: tuple[str, ...] = (),
    name: str = "server",
    step: int = 0,
) -> ProcessSpec:
    """Return the server's process for a trainer's configuration.

    Requests name the served model by the trainer's --model-name in any case. The server starts with a step: 0, or that
    of a resumed run or of a restarted server.
    """
    vllm = trainer.server
    argv = [python, "-m", "vllm_server", "--model", model, "--served-model-name", trainer.model_name]
    argv += ["--host", vllm.host, "--port", str(vllm.port)]
    argv += ["--max-model-len", str(trainer.served_len)]
    argv += ["--dtype", trainer.served_dtype(on_gpu=on_gpu)]
    seed = None if gives(vllm.extra_args, SEED_FLAG) else f"{trainer.seed} {name} {step}"
    if seed is not None:
        argv += [SEED_FLAG, sampling_seed(seed, 0)]
    if trainer.logits_dtype != "auto":
        argv += ["--logits-dtype", trainer.logits_dtype]
    if trainer.routing_replay == "server":
        argv += ["--return-routed-experts"]
    if on_gpu:
        argv += ["--gpu-memory-utilization", str(vllm.gpu_memory_utilization)]
    if vllm.enforce_eager:
        argv += ["--enforce-eager"]
    if vllm.quantization != "none":
        argv += ["--quantization", vllm.quantization]
    if vllm.kv_cache_dtype != "auto":
        argv += ["--kv-cache-dtype", vllm.kv_cache_dtype]
    for each in DEGREES:
        if (degree := getattr(vllm, each)) > 1:
            argv += [f"--{each.replace('_', '-')}", str(degree)]
    key = {KEY_VARIABLE: vllm.api_key} if vllm.api_key else {}
    return ProcessSpec(
        name=name,
        argv=(*argv, *flags, *vllm.extra_args),
        env={**key, **({"CUDA_VISIBLE_DEVICES": vllm.gpus} if vllm.gpus else {})},
        ready_url=f"{vllm.url}/health",
        ready_key=vllm.api_key,
        ready_timeout=vllm.startup_timeout,
        stop_seconds=5.0,
        seed=seed,
    )


def sampling_seed(seed: str, start: int) -> str:
    """Return vLLM's seed for a start of a server, counted from 0, so that no two of a run sample the same numbers.

    `seed` is what tells apart the servers of a run, and one run from another.
    """
    return str(int.from_bytes(sha256(f"{seed} {start}".encode()).digest()[:4]) >> 1)


def started_again(spec: ProcessSpec, start: int) -> ProcessSpec:
    """Return a process as it starts on the same machine for the `start`-th time, counted from 0."""
    argv = [*spec.argv, *spec.again]
    if spec.seed is not None:
        argv[argv.index(SEED_FLAG) + 1] = sampling_seed(spec.seed, start)
    return replace(spec, argv=tuple(argv), again=())


def weight_flags(trainer: TrainConfig, log_dir: Path) -> tuple[str, ...]:
    """Return a server's flags for what a trainer publishes to it."""
    if trainer.weight_bridge_mode == "lora_only":
        root = (trainer.lora_root or log_dir / "adapters").absolute()
        names = ("--max-lora-rank", str(trainer.lora_r), "--lora-name", trainer.lora_name)
        return (*names, "--lora-keep-versions", str(trainer.keep_versions), "--lora-root", str(root))
    return ("--receive-weights",) if trainer.weight_bridge_mode == "broadcast" else ()


def gives(extra_args: tuple[str, ...], name: str) -> bool:
    """Return whether the user's arguments for vLLM have a flag."""
    return any(key_of(flag) == key_of(name) for flag, _ in arguments(extra_args))


def _server_processes(
    config: RunConfig,
    ports: Mapping[str, int],
    python: str,
    on_gpu: bool,
    cache_bytes: int | None,
    places: Places,
    step: int,
) -> Iterator[ProcessSpec]:
    flags = [] if cache_bytes is None else [CACHE_FLAG, str(cache_bytes)]
    flags += weight_flags(config.trainer, config.run_dir)
    has_agent = any(environment.name == AGENT for environment in config.environments)
    if has_agent and not gives(config.server.extra_args, PARSER_FLAG):
        flags += ["--enable-auto-tool-choice", PARSER_FLAG, tool_parser(config.trainer.model_name)]
    trainer = reached(config, ports, on_gpu, places)
    sharing = config.server.names[: config.options.trainer_gpus] if trainer.shares_weights else ()
    for name, vllm in zip(config.server.names, trainer.server.each, strict=True):
        path = str(_bridge_config_path(config, name))
        own = (*flags, "--shared-weights", "--bridge-config-path", path) if name in sharing else tuple(flags)
        one = trainer.model_copy(update={"server": vllm})
        model = one.model_name
        process = server_process(one, python=python, on_gpu=on_gpu, model=model, flags=own, name=name, step=step)
        yield replace(process, restarts=name, after_errors=True) if trainer.servers_may_change else process


def _bridge_config_path(config: RunConfig, server: str = "server") -> Path:
    """Return the path of a server's bridge file; the number of a further server stands before the suffix."""
    path = (config.run_dir / "config" / FILE_NAME).absolute()
    return path.with_stem(path.stem + server.removeprefix("server"))


def reached(config: RunConfig, ports: Mapping[str, int], on_gpu: bool, places: Places = NO_PLACES) -> TrainConfig:
    """Return the trainer's configuration with the addresses, GPUs and dtype of the run's servers."""
    trainer = config.trainer
    where = {"host": places.get("server", HERE).address, "port": ports["server"], "gpus": config.server.gpus}
    where |= {"also": _others(config, ports, places), "dtype": trainer.served_dtype(on_gpu=on_gpu)}
    return trainer.model_copy(update={"server": trainer.server.model_copy(update=where)})


def _others(config: RunConfig, ports: Mapping[str, int], places: Places) -> tuple[str, ...]:
    """Return the addresses of all servers except the first."""
    return tuple(address(places.get(name, HERE).address, ports[name]) for name in config.server.names[1:])


def _trainer_table(config: RunConfig, ports: Mapping[str, int], on_gpu: bool, places: Places) -> dict[str, Any]:
    trainer = reached(config, ports, on_gpu) if config.trainer.owns_server else config.trainer
    alone = trainer.shares_weights and config.options.trainer_gpus == 1  # each of several asks its own server
    shared = {"vllm_config_path": str(_bridge_config_path(config))} if alone else {}
    table = dump(trainer, only_set=True)
    of_run = ("replicas",) if trainer.owns_server else ("replicas", "gpus")  # the run itself starts these servers
    server = {key: value for key, value in table.get("server", {}).items() if key not in of_run} | {
        **({"host": host} if (host := places.get("server", HERE).address) != LOOPBACK else {}),
        "port": ports["server"],
        **({"also": list(others)} if (others := _others(config, ports, places)) else {}),
        **({"roster": str(config.roster)} if config.roster else {}),
    }
    return table | {
        **shared,
        "server": server,
        "atropos_url": f"http://{LOOPBACK}:{ports['api']}",
        "dtype": trainer.trainer_dtype(on_gpu=on_gpu),
        "save_path": str(config.run_dir / "checkpoints"),
        "log_dir": str(config.run_dir),
    }


def _trainer_processes(
    config: RunConfig, config_file: Path, ports: Mapping[str, int], python: str, places: Places
) -> tuple[ProcessSpec, ...]:
    """Return one process for each of the trainer's GPUs; the first leads the others, which end with it."""
    argv = (python, "-m", "grpo_trainer", "train", "--config", str(config_file))
    seconds = STOP_SECONDS_ALL_WEIGHTS if not config.trainer.trains_adapter else 7.0
    names = trainer_names(config.options.trainer_gpus)

    def variables(rank: int, name: str) -> dict[str, str]:
        """Also of a single process, whatever a job scheduler has set."""
        env = {"WORLD_SIZE": str(len(names)), "RANK": str(rank)}
        if len(names) > 1:
            env |= {"MASTER_ADDR": meeting_address(places), "MASTER_PORT": str(ports["trainers"])}
            # The number of its GPU among those that it sees: on a cluster a process sees only its own.
            env["LOCAL_RANK"] = "0" if places.get(name, HERE).gpus else str(rank)
        return env

    return tuple(
        ProcessSpec(
            name,
            argv,
            variables(rank, name),
            ends_run=rank == 0,
            may_end=rank > 0,
            stop_seconds=seconds,
            restarts=TRAINERS,
            again=("--resume", "auto"),
        )
        for rank, name in enumerate(names)
    )


def _named(environments: tuple[EnvironmentProcess, ...]) -> Iterator[tuple[str, int, EnvironmentProcess]]:
    """Yield a name for process and files, and the lowest seed that no other environment of the kind has.

    The names are env-arithmetic, and env-arithmetic-2 for the second of a kind.
    """
    counts: Counter[str] = Counter()
    taken = {(_kind(each), each.env["seed"]) for each in environments if "seed" in each.env}
    for environment in environments:
        kind = _kind(environment)
        counts[kind] += 1
        seed = next(seed for seed in count() if (kind, seed) not in taken)
        if "seed" not in environment.env:
            taken.add((kind, seed))
        yield f"{kind}-{counts[kind]}" if counts[kind] > 1 else kind, seed, environment


def _kind(environment: EnvironmentProcess) -> str:
    module = environment.name.partition(":")[0].removesuffix(".py").rpartition("/")[2]
    return f"env-{module.rpartition('.')[2].removesuffix('_server')}"


def environment_settings(config: RunConfig) -> Iterator[tuple[str, EnvironmentProcess, Mapping[str, Any]]]:
    """Yield each environment's name, itself, and the tables of its configuration file, before ports are known."""
    ports = dict.fromkeys(("api", *config.server.names), 0)
    for name, seed, environment in _named(config.environments):
        yield name, environment, _environment_tables(config, name, seed, environment, ports, NO_PLACES)


SET_FOR_ENVIRONMENTS = frozenset(
    {
        *("tokenizer_name", "max_token_length", "metrics_path", "wandb_name", "rollout_server_url", "rollout_api_key"),
        *("retry_timeout", "data_record"),
    }
)
"""Options of environments that a run derives, unless the user sets them, and that reports leave out."""


def _environment_tables(
    config: RunConfig,
    name: str,
    seed: int,
    environment: EnvironmentProcess,
    ports: Mapping[str, int],
    places: Places,
) -> dict[str, Any]:
    trainer, model = config.trainer, config.trainer.model_name
    away = trainer.server.startup_timeout + 60.0  # the longest that a server may be while it restarts
    env = {
        "tokenizer_name": model,
        "max_token_length": min(trainer.seq_len, trainer.served_len),
        "metrics_path": str(config.run_dir / "logs" / f"{name}.metrics.jsonl"),
        "data_record": str(config.run_dir / "data" / f"{name}.json"),
        # The second of a kind needs separate metrics, a separate state, and items in another order.
        **({} if name == _kind(environment) else {"wandb_name": name.removeprefix("env-")}),
        **({"seed": seed} if seed else {}),
        "rollout_server_url": f"http://{LOOPBACK}:{ports['api']}",
        **({"rollout_api_key": trainer.rollout_api_key} if trainer.rollout_api_key else {}),
        **({"retry_timeout": away} if trainer.owns_server or trainer.servers_may_change else {}),
        **environment.env,
    }
    first = address(places.get("server", HERE).address, ports["server"])
    openai = {
        "base_url": ",".join(f"http://{each}/v1" for each in (first, *_others(config, ports, places))),
        "model_name": model,
        "server_type": "vllm",
        "api_key": trainer.server.api_key or "x",
        **({"roster": str(config.roster)} if config.roster and "base_url" not in environment.openai else {}),
        **environment.openai,
    }
    allowed = {"allow_changed": True} if config.options.allow_changed_data else {}
    data = {"data": {**environment.data, **allowed}} if environment.data else {}
    rewards = {"rewards": list(environment.rewards)} if environment.rewards else {}
    return {"env": env, "openai": openai, **data, **rewards}


# commands by hand -----------------------------------------------------------------------------------------------


def commands_to_start(
    config: TrainConfig, *, on_gpu: bool, there: Callable[[str], bool] = answers
) -> dict[str, tuple[str, ...]]:
    """Return what `grpo train` alone waits for and its address, with the commands that start it, as one types them.

    An environment is named with the API: without that there is none.
    """
    found: dict[str, tuple[str, ...]] = {}
    if not there(config.atropos_url):
        at, name = urlsplit(config.atropos_url), config.model_name
        api = ["grpo", "api", "--port", str(at.port or 80)]
        if at.hostname not in (None, "localhost", "127.0.0.1"):
            api += ["--host", str(at.hostname)]
        urls = ",".join(f"{each.url}/v1" for each in config.server.each)
        environment = ["grpo", "env", "arithmetic", "serve", "--env.tokenizer_name", name]
        environment += ["--env.rollout_server_url", config.atropos_url, "--env.max_token_length", str(config.seq_len)]
        environment += ["--openai.base_url", urls, "--openai.model_name", name]
        keys = {"--env.rollout_api_key": config.rollout_api_key, "--openai.api_key": config.server.api_key}
        found[f"rollout API at {config.atropos_url}"] = (
            _typed(api, API_KEY_VARIABLE if config.rollout_api_key else None),
            " ".join([_typed(environment), *(f"{flag} …" for flag, key in keys.items() if key)]),
        )
    for each in () if config.owns_server else config.server.each:
        if not there(f"{each.url}/health"):
            one = config.model_copy(update={"server": each})
            found[f"inference server at {each.url}"] = (_server(one, on_gpu=on_gpu),)
    return found


def _server(config: TrainConfig, *, on_gpu: bool) -> str:
    flags = weight_flags(config, config.log_dir)
    if config.shares_weights:
        path = config.vllm_config_path if config.weight_bridge_mode in ("lora_only", "shared_vllm") else None
        flags = (*flags, "--shared-weights", *(("--bridge-config-path", str(path)) if path else ()))
    spec = server_process(config, python="python", on_gpu=on_gpu, model=config.model_name, flags=flags)
    command = _typed(["grpo", "serve", *spec.argv[3:]], KEY_VARIABLE if config.server.api_key else None)
    gpus = spec.env.get("CUDA_VISIBLE_DEVICES")
    return f"CUDA_VISIBLE_DEVICES={gpus} {command}" if gpus else command


def _typed(words: list[str], key: str | None = None) -> str:
    """A command line; its key is named, not shown."""
    command = shlex.join(redacted_arguments(words))
    return f"{key}=… {command}" if key else command
