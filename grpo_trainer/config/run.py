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
`--api.port 0`; `--env NAME` picks the environment and `--env.KEY`, `--openai.KEY`, `--data.KEY` set its options.
`--data D --reward R` is the environment `dataset`; in TOML:

    [data]
    path = "problems.jsonl"

    [[rewards]]
    function = "my.py:right"
"""

from __future__ import annotations

import difflib
import os
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pydantic import field_validator

from environments.running import settings_check
from grpo_common.errors import Problem, collected
from grpo_common.roster import FOLDER
from grpo_trainer.config.environments import EnvironmentProcess, problems_of_tables
from grpo_trainer.config.options import Section, build, leaves, option, override, shown
from grpo_trainer.config.rules import SET_BY_THE_RUN, checked
from grpo_trainer.config.server import ALIASES, ServerProcess
from grpo_trainer.config.train import TrainConfig
from grpo_trainer.config.values import Arguments
from grpo_trainer.errors import ConfigError
from grpo_trainer.suggestions import flags_of, unknown_key, unknown_word

QUEUE_FILE = "queue.sqlite"
"""In a run's folder."""
TRACE_FILE = "trace.json"
"""In a run's folder, with `--trace`."""


class ApiProcess(Section):
    """Rollout API."""

    port: int = option(8000, help="Port; 0 picks a free one.", ge=0, le=65535)
    store: Path | None = option(
        None,
        help="SQLite file that keeps the queue over restarts; none: in memory only (default: queue.sqlite in "
        "--run-dir).",
    )
    extra_args: Arguments = option((), help="More arguments for `grpo api`, comma-separated.")

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
        1,
        help="GPUs for the trainer: one process on each, which trains its share of every batch. With shared weights "
        "each GPU also has a server, or a shard of a tensor-parallel server.",
        ge=1,
    )
    cluster: str | None = option(
        None,
        help="Run on the machines of a Ray cluster: auto, or the HOST:PORT of its head (default: on this machine). "
        "This machine must belong to it.",
    )
    cluster_nodes: int = option(1, help="Wait until the cluster has this many machines.", ge=1)
    max_restarts: int = option(
        3,
        help="How often in a row a process restarts that ends unexpectedly after the first trained step; 0: the run "
        "ends. A trainer continues from its last checkpoint. Servers restart with broadcast, and with lora_only "
        "without --share-base.",
        ge=0,
    )


class RunConfig(Section):
    """Everything that `grpo run` starts."""

    options: RunOptions
    trainer: TrainConfig
    api: ApiProcess = ApiProcess()
    server: ServerProcess = ServerProcess()
    environments: tuple[EnvironmentProcess, ...] = (EnvironmentProcess(),)

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
    def roster(self) -> Path | None:
        """Folder with the list of servers; None: they stay the same for the whole run."""
        return (self.run_dir / FOLDER).absolute() if self.trainer.servers_may_change else None

    @property
    def trace_file(self) -> Path | None:
        """Where processes record what they do; None: nowhere."""
        return (self.run_dir / TRACE_FILE).absolute() if self.options.trace else None


OF_THE_ENVIRONMENT = ("data", "rewards")
"""Tables of a file that may stand outside `[[environments]]` if there is only one environment."""
SECTIONS: Mapping[str, type[Section]] = MappingProxyType(
    {"options": RunOptions, "trainer": TrainConfig, "server": ServerProcess, "api": ApiProcess}
)
"""By their names in `RunConfig`."""


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
        ConfigError: unknown keys, wrong values, options that the run sets itself, or options that do not go together;
            the last only where all else is right.
    """
    problems: list[Problem] = []
    given, typed = _tables_of(file, problems), _tables_of_flags(flags)
    for said in (given, typed):
        _move_to_server(said, problems)
    given = {table: override(section, given[table], typed[table]) for table, section in SECTIONS.items()}
    for key in [key for key in given["trainer"] if key.replace("-", "_") in SET_BY_THE_RUN]:
        flag, instead = f"--{key.replace('_', '-')}", SET_BY_THE_RUN[key.replace("-", "_")]
        problems.append(Problem(flag, fix=f"use {instead}", summary="set by the run itself"))
        del given["trainer"][key]
    built: dict[str, Any] = {}
    for table, section in SECTIONS.items():
        with collected(problems):
            where = f"{table}." if table in ("server", "api") else ""
            built[table] = build(section, given[table], where=where)
    with collected(problems):
        options = _env_options(env_args, problems)
        if flags.get("data") is not None:
            options["data"]["path"] = flags["data"]
        own = {key: file[key] for key in OF_THE_ENVIRONMENT if key in file}
        tables, rewards = file.get("environments", []), flags.get("reward") or ()
        built["environments"] = _environments(tables, flags.get("env"), options, rewards, own)
        problems += problems_of_tables(built["environments"])
    if problems:
        raise ConfigError.of(problems)
    config = RunConfig.model_validate(built)
    return checked(
        config.model_copy(
            update={"trainer": _with_server(config.trainer, config.server), "server": _one_for_each_trainer(config)}
        )
    )


def _tables_of(file: Mapping[str, Any], problems: list[Problem]) -> dict[str, dict[str, Any]]:
    """What a file says, by section."""
    run_keys = [leaf.key for leaf in leaves(RunOptions)]
    tables = ("trainer", "server", "api", "environments", *OF_THE_ENVIRONMENT)
    strange = [key for key in file if key not in tables and key.replace("-", "_") not in run_keys]
    problems += [unknown_key(key, [*tables, *run_keys]) for key in strange]
    given = {table: file.get(table, {}) for table in ("trainer", "server", "api")}
    for table in [table for table, value in given.items() if not isinstance(value, dict)]:
        problems.append(Problem(table, repr(given.pop(table)), f"a table: [{table}]"))
    options = {key: value for key, value in file.items() if key not in (*tables, *strange)}
    return {table: dict(given.get(table, {})) for table in SECTIONS} | {"options": options}


def _tables_of_flags(flags: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """What the command line says, by section."""
    run_keys = [leaf.key for leaf in leaves(RunOptions)]
    typed: dict[str, dict[str, Any]] = {table: {} for table in SECTIONS}
    for key, value in flags.items():
        table, _, name = key.rpartition(".")
        if key not in ("env", "data", "reward"):
            typed[table or ("options" if key in run_keys else "trainer")][name] = value
    return typed


def _move_to_server(said: dict[str, dict[str, Any]], problems: list[Problem]) -> None:
    """Options of the server stand in its table, whatever they were called."""
    there = {key.replace("-", "_"): value for key, value in said["server"].items()}
    for key in [key for key in said["trainer"] if key.replace("-", "_") in ALIASES]:
        name, flag = ALIASES[key.replace("-", "_")], f"--{key.replace('_', '-')}"
        value = said["trainer"].pop(key)
        if there.setdefault(name, value) != value:
            got, why = f"{shown(there[name])} and {flag} {shown(value)}", "in `grpo run` two names of one option"
            problems.append(Problem(ServerProcess.flags()[name], got, "one value", f"leave {flag} out", why))
    said["server"] = there


def _with_server(trainer: TrainConfig, server: ServerProcess) -> TrainConfig:
    """The trainer, which knows of the server what the run says of it."""
    known = {name: getattr(server, name) for name in ALIASES.values() if name in server.model_fields_set}
    vllm = trainer.vllm.model_copy(update=known)
    return trainer.model_copy(
        update={"vllm": vllm, "loss": trainer.loss.for_8_bits() if vllm.in_8_bits else trainer.loss}
    )


def _one_for_each_trainer(config: RunConfig) -> ServerProcess:
    """Return the server's options with a server for each trainer process, on its GPU, where they share weights.

    Numbers of servers or GPUs that the user has given stay.
    """
    server, processes = config.server, config.options.trainer_gpus
    if processes == 1 or not config.trainer.shares_weights or server.tensor_parallel_size > 1:
        return server
    if "replicas" not in server.model_fields_set:
        server = server.model_copy(update={"replicas": processes})
    if server.gpus is None and server.replicas == processes and config.options.cluster is None:
        visible = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")]
        names = visible[:processes] if len(visible) >= processes else map(str, range(processes))
        server = server.model_copy(update={"gpus": ";".join(names)})
    return server


def _environments(
    tables: Any,
    name: str | None,
    options: Mapping[str, Mapping[str, str]],
    rewards: Sequence[str],
    own: Mapping[str, Any],
) -> tuple[EnvironmentProcess, ...]:
    """Return the environments of a file and of flags.

    Args:
        options: options of the environment by table.
        rewards: those of flags, which replace the file's.
        own: the file's tables outside `[[environments]]`.
    """
    if isinstance(tables, dict):  # [environments] instead of [[environments]]: meant as one
        tables = [tables]
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise ConfigError(field="environments", got=repr(tables), wanted="tables: [[environments]]")
    if not (name or any(options.values()) or rewards or own):
        return tuple(_environment(table) for table in tables) or (EnvironmentProcess(),)
    if len(tables) > 1:
        raise ConfigError(
            "it does not say which environment of the file is meant",
            field="--env",
            got=f"{len(tables)} environments",
            wanted="one environment in the file",
            fix="edit the file: an entry of [[environments]] has its own env, openai, data and rewards",
        )
    table = {**(tables[0] if tables else {}), **own}
    if isinstance(table.get("data"), str):
        table["data"] = {"path": table["data"]}
    groups = {group: table.get(group, {}) for group in options}
    merged = {group: {**given, **options[group]} for group, given in groups.items() if isinstance(given, dict)}
    default = settings_check.DATASET if table.get("data") or options["data"] else "arithmetic"
    typed = {**({"name": name} if name else {}), **({"rewards": rewards} if rewards else {})}
    return (_environment({"name": default, **table, **typed, **merged}),)


def _environment(table: dict[str, Any]) -> EnvironmentProcess:
    known = list(EnvironmentProcess.model_fields)
    problems = [unknown_key(key, known, "environments.") for key in table if key not in known]
    for group in ("env", "openai", "data"):
        if not isinstance(table.get(group, {}), dict):
            problems.append(Problem(f"environments.{group}", repr(table[group]), "a table of options"))
    if not isinstance(rewards := table.get("rewards", ()), list | tuple):
        problems.append(Problem("rewards", repr(rewards), "a list, or tables: [[rewards]]"))
    if problems:
        raise ConfigError.of(problems)
    return EnvironmentProcess(**table)


def _env_options(args: Sequence[str], problems: list[Problem]) -> dict[str, dict[str, str]]:
    """`--env.group_size 8 --openai.api_key=x` as `{"env": {"group_size": "8"}, "openai": {"api_key": "x"}}`."""
    found: dict[str, dict[str, str]] = {"env": {}, "openai": {}, "data": {}}
    for flag, value in flags_of(args):
        group, _, key = flag.removeprefix("--").partition(".")
        if not flag.startswith("--") or group not in found or not key:
            problems.append(_unknown_flag(flag, group, key))
        elif value is None:
            problems.append(Problem(flag, "nothing", "a value after it"))
        else:
            found[group][key.replace("-", "_")] = value
    return found


def _unknown_flag(flag: str, group: str, key: str) -> Problem:
    """Return the problem of what is no flag of a run's; the name of its table may be wrong."""
    tables = {"server": ServerProcess, "api": ApiProcess}
    if key and group in tables:
        return unknown_key(f"--{key}", [leaf.key for leaf in leaves(tables[group])], f"{group}.")
    near = difflib.get_close_matches(group, ["env", "openai", "data", *tables], n=1) if key else []
    if near:
        return Problem(flag, fix=f"did you mean --{near[0]}.{key}?", summary="unknown option")
    sections = (TrainConfig, RunOptions)
    known = [name for section in sections for leaf in leaves(section) for name in leaf.flags]
    return unknown_word(flag, [*known, "--env", "--data", "--reward", "--config"])
