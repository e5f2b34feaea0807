"""What `grpo run` starts: options of the run, of the rollout API and of environments, and the folder of a run."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from pydantic import Field, field_validator

from environments.running import settings_check
from environments.running.settings_check import BUILT_IN
from grpo_common.errors import Problem, collected
from grpo_common.roster import FOLDER
from grpo_common.suggest import OF_FILES, nearest
from grpo_trainer.config.options import LARGEST_PORT, Arguments, Section, option
from grpo_trainer.config.server import Server
from grpo_trainer.config.train import TrainConfig
from grpo_trainer.errors import ConfigError

RUNS = Path("runs")
"""Parent folder of the runs that are started without `--run-dir`."""
LATEST = "latest"
"""In `RUNS`: the run folder of version 0.1 by default, now a link to the newest numbered one."""
QUEUE_FILE, TRACE_FILE = "queue.sqlite", "trace.json"
"""In a run's folder; the second with `--trace`."""
PROMPTS = 32
"""Prompts a step by default."""
DATA_FILES = (".jsonl", ".json", ".csv", ".parquet")


class EnvironmentProcess(Section):
    """Environment."""

    name: str = "arithmetic"
    env: dict[str, Any] = Field(default_factory=dict)
    openai: dict[str, Any] = Field(default_factory=dict)
    data: dict[str, Any] = Field(default_factory=dict)
    rewards: tuple[Any, ...] = ()

    @property
    def reward_sources(self) -> list[str]:
        """The files and modules of its reward functions."""
        return settings_check.reward_sources(self.rewards)


class ApiProcess(Section):
    """Rollout API."""

    port: int = option(8000, ge=0, le=LARGEST_PORT)
    """Port; 0 picks a free one."""
    store: Path | None = option(None)
    """SQLite file that keeps the queue over restarts; none: in memory only (default: queue.sqlite in --run-dir)."""
    extra_args: Arguments = option(())
    """More arguments for `grpo api`, comma-separated."""

    @field_validator("extra_args")
    @classmethod
    def _hold_no_key(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if any(word.partition("=")[0] == "--api-key" for word in value):
            wanted, fix = "other arguments than --api-key", "use --rollout-api-key, or ROLLOUT_API_KEY"
            why = "a list of processes would show the key"
            raise ConfigError(why, got="--api-key", wanted=wanted, fix=fix)  # and not the key
        return value


class RunOptions(Section):
    """Run."""

    run_dir: Path | None = option(None)
    """Folder of the run: logs, metrics, checkpoints (default: the next of runs/001, runs/002, …). runs/latest is a link
    to the newest of these."""
    prompts_per_step: int | None = option(None, ge=1)
    """Prompts in a step, each with --env.group_size answers (default: 32). Microbatches are as large as memory allows.
    --batch-size and --gradient-accumulation-steps say the same by other numbers."""
    trace: bool = option(False)
    """Record a timeline of all processes in trace.json of --run-dir, for https://ui.perfetto.dev."""
    try_environments: bool = option(True, flag="--try")
    """Try the environments before anything starts: import, setup, one item, its prompt, two scores."""
    trainer_gpus: int = option(1, ge=1)
    """GPUs for the trainer: one process on each, which trains its share of every batch. With shared weights each GPU
    also has a server, or a shard of a tensor-parallel server."""
    cluster: str | None = option(None)
    """Run on the machines of a Ray cluster: auto, or the HOST:PORT of its head (default: on this machine). This machine
    must belong to it."""
    cluster_nodes: int = option(1, ge=1)
    """Wait until the cluster has this many machines."""
    allow_changed_data: bool = option(False)
    """Only warn if a resumed run's data set differs from the one that it began with. The fingerprint is in data/ of
    --run-dir."""
    max_restarts: int = option(3, ge=0)
    """How often in a row a process restarts that ends unexpectedly after the first trained step; 0: the run ends. A
    trainer continues from its last checkpoint. Servers restart with broadcast, and with lora_only without
    --share-base."""


class RunSection(TrainConfig, RunOptions):
    """All options of `grpo run`, by the names of its flags. Their values go into the parts of a `RunConfig`."""

    other_names = ("trainer", "environments", "data", "rewards")

    api: ApiProcess = ApiProcess()


class RunConfig(Section):
    """Everything that `grpo run` starts."""

    options: RunOptions
    trainer: TrainConfig
    api: ApiProcess = ApiProcess()
    environments: tuple[EnvironmentProcess, ...] = (EnvironmentProcess(),)
    unset: frozenset[str] = frozenset()
    """Options that nobody gave, and that the start chooses by the model and the machine: `run_dir`, `lr`, `seq_len`,
    `batch_size` and `microbatch` (`--max-tokens-per-microbatch`)."""

    @property
    def server(self) -> Server:
        return self.trainer.server

    @property
    def run_dir(self) -> Path:
        return self.options.run_dir or next_folder()

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


# ---- environments


def environment_command(name: str, said: str = "--env") -> tuple[str, ...]:
    """Return what follows `python -m` to run an environment: a built-in by its short name, or the user's module or
    file, with `:CLASS` where it has several classes.

    Raises:
        ConfigError: there is none of this name; `said` is the flag or command that named it, for the message.
    """
    if name in BUILT_IN:
        return (BUILT_IN[name].module,)
    module = name.partition(":")[0]
    is_file, known = module.endswith(".py") or "/" in module, f"one of {', '.join(BUILT_IN)}, or the module or file"
    if module.endswith(DATA_FILES):
        fix = f"train on the data set by --data {name} --reward FILE.py:FUNCTION"
        wanted, why = "the module or the Python file of an environment", "a data file is not an environment"
        raise ConfigError(why, field=said, got=name, wanted=wanted, fix=fix)
    if not is_file and not re.fullmatch(r"[\w-]+(?:\.[\w-]+)*", module):  # no path, and no flag of `python -m`
        wanted = f"{known} of your own, such as my_envs.task"
        raise ConfigError("no name of a module", field=said, got=repr(name), wanted=wanted)
    path = [str(Path.cwd()), *sys.path]
    if Path(module).is_file() if is_file else "." in module or PathFinder.find_spec(module, path):
        return ("environments", name)
    files = {path.stem: path for pattern in ("*/*.py", "*.py") for path in Path().glob(pattern)}
    stem = nearest(Path(module).stem if is_file else module, files, OF_FILES)
    near = None if stem is None else files[stem]
    if is_file:
        fix = f"did you mean {near}?" if near else "correct the path"
        raise ConfigError("no such file", field=said, got=name, wanted="a Python file", fix=fix)
    fix = f"start in the folder of your own {name}.py, or name it by its package, such as my_envs.{name}"
    if near:
        fix = f"did you mean {'.'.join(near.with_suffix('').parts)} ({near})?"
    searched = f"{Path.cwd()}, nor in PYTHONPATH ({os.environ.get('PYTHONPATH') or 'not set'})"
    wanted = f"{known} of your own"
    raise ConfigError(f"no module of this name in {searched}", field=said, got=name, wanted=wanted, fix=fix)


def problems_of_tables(environments: Sequence[EnvironmentProcess]) -> list[Problem]:
    """Return what is wrong in environments' own tables: an unknown environment or key, a value that is not legal."""
    found: list[Problem] = []
    for environment in environments:
        own: list[Problem] = []
        with collected(found):
            environment_command(environment.name)
        with collected(own):
            settings_check.check(environment.name, environment.env)
        with collected(own):
            settings_check.check_server(environment.openai)
        with collected(own):
            settings_check.check_data(environment.name, environment.data, environment.rewards)
        found += [replace(each, field=f"--env {environment.name}: {each.field}") for each in own]
    return found


# ---- folders


def next_folder(parent: Path = RUNS) -> Path:
    """Return the path of the next numbered run, such as runs/007. Another run may take it first: see `claim_folder`."""
    return parent / f"{max(_numbers(parent), default=0) + 1:03d}"


def claim_folder(parent: Path = RUNS) -> Path:
    """Make the folder of the next numbered run, which no other process gets."""
    parent.mkdir(parents=True, exist_ok=True)
    while True:
        folder = next_folder(parent)
        with suppress(FileExistsError):  # another process was faster
            folder.mkdir()
            return folder


def link_latest(folder: Path) -> None:
    """Point `runs/latest` to a numbered run's folder, which holds something by now: an empty one may be removed."""
    link, new = folder.parent / LATEST, folder.parent / f".{LATEST}.{os.getpid()}"
    if link.is_symlink() or not link.exists():  # a folder is a run of version 0.1
        with suppress(OSError):  # a file system without links
            new.symlink_to(folder.name)
            new.replace(link)


def newest_run(parent: Path = RUNS) -> Path | None:
    """Return the folder of the newest run that was started without `--run-dir`; None: there is none."""
    numbered = [folder for number in sorted(_numbers(parent)) if (folder := parent / f"{number:03d}").is_dir()]
    return numbered[-1] if numbered else parent / LATEST if (parent / LATEST).is_dir() else None


def _numbers(parent: Path) -> Iterator[int]:
    with suppress(FileNotFoundError, NotADirectoryError):
        yield from (int(path.name) for path in parent.iterdir() if re.fullmatch(r"\d{3,}", path.name))
