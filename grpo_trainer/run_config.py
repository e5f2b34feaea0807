"""`grpo run`: one file or a set of flags for the rollout API, the server, the environments and the trainer.

In TOML, a table each; the keys of `[trainer]` are the flags of `grpo train`:

    run_dir = "runs/sums"

    [trainer]
    model_name = "runs/demo-model"
    weight_bridge_mode = "lora_only"

    [server]
    port = 0

    [[environments]]
    name = "arithmetic"
    env = { group_size = 8 }

On the command line the trainer's flags stand as they are, the others carry their table's name: `--server.port 0`,
`--api.port 0`; `--env NAME` picks the environment and `--env.KEY`, `--openai.KEY` set its options.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from pydantic import Field, model_validator

from grpo_trainer.config import TrainConfig
from grpo_trainer.errors import ConfigError
from grpo_trainer.options import Section, build, leaves, option, unknown_key
from vllm_server.protocol import DEFAULT_PORT

SET_BY_THE_RUN = {
    "trainer_rank": "--trainer-gpus",
    "world_size": "--trainer-gpus",
    "init_method": "--trainer-gpus",
    "atropos_url": "--api.port",
    "rollout_url": "--api.port",
    "vllm_host": "--server.port",
    "vllm_port": "--server.port",
    "save_path": "--run-dir",
    "log_dir": "--run-dir",
}
"""Options of the trainer that a run derives, and what to use instead."""


DEGREES = frozenset({"--tensor-parallel-size", "-tp", "--pipeline-parallel-size", "-pp", "--data-parallel-size", "-dp"})
UNSHARED = DEGREES | {"--quantization", "-q", "--enable-sleep-mode"}
"""Arguments of a server whose weights no trainer can use."""


class ApiProcess(Section):
    """Rollout API."""

    port: int = option(8000, help="Port; 0 picks a free one.", ge=0, le=65535)
    store: Path | None = option(None, help="SQLite file that keeps the queue over restarts (default: memory only).")
    extra_args: tuple[str, ...] = option((), help="More arguments for `grpo api`, comma-separated.")


class ServerProcess(Section):
    """vLLM server."""

    port: int = option(DEFAULT_PORT, help="Port; 0 picks a free one.", ge=0, le=65535)
    dtype: str = option("auto", help="Weights and activations; auto: as the trainer's --dtype.")
    max_model_len: int | None = option(None, help="Longest sequence served (default: the trainer's --seq-len).", gt=0)
    gpu_memory_utilization: float = option(
        0.45, help="Share of the GPU's memory for vLLM, trainer on the same GPU.", gt=0, le=1
    )
    enforce_eager: bool = option(False, help="No CUDA graphs: several times slower.")
    extra_args: tuple[str, ...] = option((), help="More arguments for `grpo serve`, comma-separated.")


class EnvironmentProcess(Section):
    """Environment."""

    name: str = option("arithmetic", help="arithmetic, or the module of your own environment.", flags=("--env",))
    env: dict[str, Any] = Field(default_factory=dict)
    openai: dict[str, Any] = Field(default_factory=dict)


class RunOptions(Section):
    """Run."""

    run_dir: Path = option(Path("runs/latest"), help="Folder of logs, metrics, checkpoints and process configurations.")
    trainer_gpus: int = option(
        1, help="GPUs of the trainer: a process each, with a share of every batch; the server is on the first.", ge=1
    )


class RunConfig(Section):
    """Everything that `grpo run` starts."""

    options: RunOptions
    trainer: TrainConfig
    api: ApiProcess = ApiProcess()
    server: ServerProcess = ServerProcess()
    environments: tuple[EnvironmentProcess, ...] = (EnvironmentProcess(),)

    @model_validator(mode="after")
    def _at_least_one_environment(self) -> RunConfig:
        if not self.environments:
            raise ValueError('[[environments]]: got none, wanted at least one; add name = "arithmetic"')
        return self

    @property
    def run_dir(self) -> Path:
        return self.options.run_dir


def read_toml(path: Path) -> dict[str, Any]:
    """The tables of a TOML file.

    Raises:
        ConfigError: the file is missing or is no TOML; the message has line and column.
    """
    try:
        return tomllib.loads(path.read_text())
    except FileNotFoundError:
        raise ConfigError(f"--config {path}: no such file") from None
    except IsADirectoryError:
        raise ConfigError(f"--config {path}: is a folder, wanted a TOML file") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {path}: not valid TOML: {error}") from None


def build_run(file: Mapping[str, Any], flags: Mapping[str, Any], env_args: Sequence[str] = ()) -> RunConfig:
    """A run's configuration from a file's tables and flags; flags win.

    Args:
        file: the tables of the TOML file, empty without one.
        flags: values by key; `server.` and `api.` keys carry their prefix, `run_dir` and `env` are the run's.
        env_args: what the command line has beyond known flags: `--env.KEY VALUE` and `--openai.KEY VALUE`.

    Raises:
        ConfigError: an unknown key, a wrong value, or an option that the run sets itself.
    """
    tables = {"trainer", "server", "api", "environments"}
    run_keys = [leaf.key for leaf in leaves(RunOptions)]
    for key in file:
        if key not in tables and key.replace("-", "_") not in run_keys:
            raise ConfigError(unknown_key(key, [*tables, *run_keys]))
    given: dict[str, dict[str, Any]] = {table: _table(file, table) for table in ("trainer", "server", "api")}
    given["run"] = {key: value for key, value in file.items() if key not in tables}
    for key, value in flags.items():
        table, _, name = key.rpartition(".")
        if table:
            given[table][name] = value
        elif key in run_keys:
            given["run"][key] = value
        elif key != "env":
            given["trainer"][key] = value
    for key in given["trainer"]:
        if (instead := SET_BY_THE_RUN.get(key.replace("-", "_"))) is not None:
            raise ConfigError(f"--{key.replace('_', '-')}: set by the run itself; use {instead}")
    config = RunConfig(
        options=build(RunOptions, given["run"]),
        trainer=build(TrainConfig, given["trainer"]),
        api=build(ApiProcess, _split_lists(given["api"]), where="api."),
        server=build(ServerProcess, _split_lists(given["server"]), where="server."),
        environments=_environments(file.get("environments", []), flags.get("env"), env_args),
    )
    if config.trainer.shares_weights:
        _check_sharing(config)
    return config


def _check_sharing(config: RunConfig) -> None:
    """The server would refuse most of it, too, but only once it is started.

    Raises:
        ConfigError: no trainer could use this server's weights.
    """
    words = [word for argument in config.server.extra_args for word in argument.split("=")]
    for flag, value in pairwise([*words, ""]):
        if flag in UNSHARED and not (flag in DEGREES and value == "1"):
            raise ConfigError(
                f"--server.extra-args {flag}: the trainer is to use the server's weights, which must be whole, plain, "
                "and stay where they are; leave it out, or use --weight-bridge-mode none or lora_only"
            )
    if config.server.dtype not in ("auto", config.trainer.model.dtype):
        raise ConfigError(
            f"--server.dtype {config.server.dtype}: there is one copy of the weights; leave it out and use --dtype"
        )


def _table(file: Mapping[str, Any], name: str) -> dict[str, Any]:
    value = file.get(name, {})
    if not isinstance(value, dict):
        raise ConfigError(f"{name}: got {value!r}, wanted a table: [{name}]")
    return dict(value)


def _split_lists(values: dict[str, Any]) -> dict[str, Any]:
    extra = values.get("extra_args")
    return {**values, "extra_args": extra.split(",")} if isinstance(extra, str) else values


def _environments(tables: Any, name: str | None, args: Sequence[str]) -> tuple[EnvironmentProcess, ...]:
    if isinstance(tables, dict):  # [environments] instead of [[environments]]: meant as one
        tables = [tables]
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise ConfigError(f"environments: got {tables!r}, wanted tables: [[environments]]")
    options = _env_options(args)
    if not (name or any(options.values())):
        return tuple(_environment(table) for table in tables) or (EnvironmentProcess(),)
    if len(tables) > 1:
        raise ConfigError(f"--env: the file has {len(tables)} environments, a flag can't tell which; edit the file")
    table = tables[0] if tables else {}
    merged = {group: {**table.get(group, {}), **options.get(group, {})} for group in ("env", "openai")}
    return (_environment({"name": "arithmetic", **table, **({"name": name} if name else {}), **merged}),)


def _environment(table: dict[str, Any]) -> EnvironmentProcess:
    known = list(EnvironmentProcess.model_fields)
    for key in table:
        if key not in known:
            raise ConfigError(unknown_key(key, known, "environments."))
    for group in ("env", "openai"):
        if not isinstance(table.get(group, {}), dict):
            raise ConfigError(f"environments.{group}: got {table[group]!r}, wanted a table of options")
    return EnvironmentProcess(**table)


def _env_options(args: Sequence[str]) -> dict[str, dict[str, Any]]:
    """`--env.group_size 8 --openai.api_key=x` as `{"env": {"group_size": "8"}, "openai": {"api_key": "x"}}`."""
    found: dict[str, dict[str, Any]] = {"env": {}, "openai": {}}
    rest = list(args)
    while rest:
        flag, equals, value = rest.pop(0).partition("=")
        group, _, key = flag.removeprefix("--").partition(".")
        if not flag.startswith("--") or group not in found or not key:
            flags = [leaf.flags[0] for leaf in leaves(TrainConfig)]
            raise ConfigError(unknown_key(flag, flags))
        if not equals:
            if not rest:
                raise ConfigError(f"{flag}: wanted a value after it")
            value = rest.pop(0)
        found[group][key.replace("-", "_")] = value
    return found
