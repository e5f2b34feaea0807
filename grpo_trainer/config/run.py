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

import difflib
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import field_validator, model_validator

from grpo_trainer.config.bridge import SharedVllm
from grpo_trainer.config.environments import EnvironmentProcess, check_environments
from grpo_trainer.config.options import Section, build, key_of, leaves, option, override, split_arguments
from grpo_trainer.config.server import SAID_TWICE, ServerProcess, flags_of_one, one_server, why_not_shared
from grpo_trainer.config.train import TrainConfig
from grpo_trainer.errors import ConfigError
from grpo_trainer.suggestions import no_flag, unknown_key

SET_BY_THE_RUN = {
    "trainer_rank": "--trainer-gpus",
    "world_size": "--trainer-gpus",
    "init_method": "--trainer-gpus",
    "atropos_url": "--api.port",
    "rollout_url": "--api.port",
    "vllm_host": "--server.port",
    "vllm_port": "--server.port",
    "vllm_also": "--server.replicas",
    "vllm_gpus": "--server.gpus",
    "save_path": "--run-dir",
    "log_dir": "--run-dir",
}
"""Options of the trainer that a run derives, and what to use instead."""


QUEUE_FILE = "queue.sqlite"
"""In a run's folder."""
TRACE_FILE = "trace.json"
"""In a run's folder, with `--trace`."""


class ApiProcess(Section):
    """Rollout API."""

    port: int = option(8000, help="Port; 0 picks a free one.", ge=0, le=65535)
    store: Path | None = option(
        None,
        help="SQLite file that keeps the queue over restarts; none: memory only (default: queue.sqlite in --run-dir).",
    )
    extra_args: tuple[str, ...] = option((), help="More arguments for `grpo api`, comma-separated.")

    @field_validator("extra_args", mode="before")
    @classmethod
    def _split(cls, value: Any) -> Any:
        return split_arguments(value) if isinstance(value, str) else value

    @field_validator("extra_args")
    @classmethod
    def _hold_no_key(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if any(word.partition("=")[0] == "--api-key" for word in value):
            raise ConfigError(
                "a list of processes would show the key",
                got="--api-key",  # and not the key
                wanted="other arguments than --api-key",
                fix="use --rollout-api-key, or ROLLOUT_API_KEY",
            )
        return value


class RunOptions(Section):
    """Run."""

    run_dir: Path = option(Path("runs/latest"), help="Folder of logs, metrics, checkpoints and process configurations.")
    trace: bool = option(
        False, help=f"Record a timeline of all processes in {TRACE_FILE} of --run-dir, for https://ui.perfetto.dev."
    )
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
            raise ConfigError(
                field="[[environments]]", got="none", wanted="at least one", fix='add name = "arithmetic"'
            )
        return self

    @property
    def run_dir(self) -> Path:
        return self.options.run_dir

    @property
    def store(self) -> Path | None:
        """Where the rollout API keeps its queue; None: in memory."""
        if self.api.store is None:
            return self.run_dir / QUEUE_FILE
        return None if str(self.api.store) == "none" else self.api.store

    @property
    def trace_file(self) -> Path | None:
        """Where processes record what they do; None: nowhere."""
        return (self.run_dir / TRACE_FILE).absolute() if self.options.trace else None


def read_toml(path: Path) -> dict[str, Any]:
    """The tables of a TOML file.

    Raises:
        ConfigError: the file is missing or is no TOML; the message has line and column.
    """
    try:
        return tomllib.loads(path.read_text())
    except FileNotFoundError:
        raise ConfigError(
            "no such file", field="--config", got=path, wanted="a TOML file", fix="correct the path"
        ) from None
    except IsADirectoryError:
        raise ConfigError(field="--config", got=f"{path}, a folder", wanted="a TOML file") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"not TOML: {error}", field=f"--config {path}", fix="correct the file there") from None


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
            raise unknown_key(key, [*tables, *run_keys])
    given: dict[str, dict[str, Any]] = {table: _table(file, table) for table in ("trainer", "server", "api")}
    given["run"] = {key: value for key, value in file.items() if key not in tables}
    typed: dict[str, dict[str, Any]] = {table: {} for table in given}
    for key, value in flags.items():
        table, _, name = key.rpartition(".")
        if key != "env":
            typed[table or ("run" if key in run_keys else "trainer")][name] = value
    _leave_to_flags(given, typed)
    sections = {"run": RunOptions, "trainer": TrainConfig, "server": ServerProcess, "api": ApiProcess}
    given = {table: override(sections[table], given[table], typed[table]) for table in given}
    for key in given["trainer"]:
        if (instead := SET_BY_THE_RUN.get(key.replace("-", "_"))) is not None:
            raise ConfigError("set by the run itself", field=f"--{key.replace('_', '-')}", fix=f"use {instead}")
    trainer = build(TrainConfig, given["trainer"])
    server, vllm = one_server(build(ServerProcess, given["server"], where="server."), trainer.vllm)
    if trainer.shares_weights:
        _check_sharing(trainer, server)
    config = RunConfig(
        options=build(RunOptions, given["run"]),
        trainer=trainer.model_copy(update={"vllm": vllm}),
        api=build(ApiProcess, given["api"], where="api."),
        server=server,
        environments=_environments(file.get("environments", []), flags.get("env"), env_args),
    )
    check_environments(config.environments, trainer.sequences_per_step)
    return config


def _leave_to_flags(given: dict[str, dict[str, Any]], typed: Mapping[str, Mapping[str, Any]]) -> None:
    """Options of the server have two names: a flag by one name wins over the file's value by the other."""
    for name in SAID_TWICE:
        bare = key_of(flags_of_one(name)[1])
        for table, key, other, others_key in (("server", name, "trainer", bare), ("trainer", bare, "server", name)):
            if key in typed[table]:
                given[other] = {k: value for k, value in given[other].items() if k.replace("-", "_") != others_key}


def _check_sharing(trainer: TrainConfig, server: ServerProcess) -> None:
    """The server would refuse most of it, too, but only once it is started.

    Raises:
        ConfigError: no trainer could use this server's weights.
    """
    if server.replicas > 1 and isinstance(trainer.bridge, SharedVllm):
        raise ConfigError(
            "with --weight-bridge-mode shared_vllm the weights are one server's memory",
            field="--server.replicas",
            got=server.replicas,
            wanted="1, or another mode",
        )
    if (unfit := why_not_shared(server)) is not None:
        flag, value = unfit
        raise ConfigError(
            "the trainer is to use the server's weights, which must be whole, plain, and stay where they are",
            field=flag,
            got=value,
            wanted="a server that shares its weights",
            fix="leave it out, or use --weight-bridge-mode none or lora_only",
        )
    if server.dtype not in ("auto", trainer.model.dtype):
        raise ConfigError(
            "there is one copy of the weights",
            field="--server.dtype",
            got=server.dtype,
            wanted=f"--dtype {trainer.model.dtype}",
            fix="leave it out and use --dtype",
        )


def _table(file: Mapping[str, Any], name: str) -> dict[str, Any]:
    value = file.get(name, {})
    if not isinstance(value, dict):
        raise ConfigError(field=name, got=repr(value), wanted=f"a table: [{name}]")
    return dict(value)


def _environments(tables: Any, name: str | None, args: Sequence[str]) -> tuple[EnvironmentProcess, ...]:
    if isinstance(tables, dict):  # [environments] instead of [[environments]]: meant as one
        tables = [tables]
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise ConfigError(field="environments", got=repr(tables), wanted="tables: [[environments]]")
    options = _env_options(args)
    if not (name or any(options.values())):
        return tuple(_environment(table) for table in tables) or (EnvironmentProcess(),)
    if len(tables) > 1:
        raise ConfigError(
            "a flag can't tell which environment of the file is meant",
            field="--env",
            got=f"{len(tables)} environments",
            wanted="one environment in the file",
            fix="edit the file",
        )
    table = tables[0] if tables else {}
    merged = {group: {**table.get(group, {}), **options.get(group, {})} for group in ("env", "openai")}
    return (_environment({"name": "arithmetic", **table, **({"name": name} if name else {}), **merged}),)


def _environment(table: dict[str, Any]) -> EnvironmentProcess:
    known = list(EnvironmentProcess.model_fields)
    for key in table:
        if key not in known:
            raise unknown_key(key, known, "environments.")
    for group in ("env", "openai"):
        if not isinstance(table.get(group, {}), dict):
            raise ConfigError(field=f"environments.{group}", got=repr(table[group]), wanted="a table of options")
    return EnvironmentProcess(**table)


def _env_options(args: Sequence[str]) -> dict[str, dict[str, Any]]:
    """`--env.group_size 8 --openai.api_key=x` as `{"env": {"group_size": "8"}, "openai": {"api_key": "x"}}`."""
    found: dict[str, dict[str, Any]] = {"env": {}, "openai": {}}
    rest = list(args)
    while rest:
        flag, equals, value = rest.pop(0).partition("=")
        group, _, key = flag.removeprefix("--").partition(".")
        if not flag.startswith("--") or group not in found or not key:
            raise _unknown_flag(flag, group, key)
        if not equals:
            if not rest:
                raise ConfigError(field=flag, got="nothing", wanted="a value after it")
            value = rest.pop(0)
        found[group][key.replace("-", "_")] = value
    return found


def _unknown_flag(flag: str, group: str, key: str) -> ConfigError:
    """Return the error for what is no flag of a run's; the name of its table may be wrong."""
    if not flag.startswith("--"):
        return no_flag(flag)
    tables = {"server": ServerProcess, "api": ApiProcess}
    if key and group in tables:
        return unknown_key(f"--{key}", [leaf.key for leaf in leaves(tables[group])], f"{group}.")
    near = difflib.get_close_matches(group, ["env", "openai", *tables], n=1) if key else []
    if near:
        return ConfigError("unknown option", field=flag, fix=f"did you mean --{near[0]}.{key}?")
    sections = (TrainConfig, RunOptions)
    known = [name for section in sections for leaf in leaves(section) for name in leaf.flags]
    return unknown_key(flag, [*known, "--env", "--config"])
