"""A run's environments: which there are, and what can be known of them before anything is started."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from pydantic import Field

from environments.running import settings_check
from environments.running.settings_check import BUILT_IN
from grpo_common.errors import Problem, collected
from grpo_common.suggest import OF_FILES, nearest
from grpo_trainer.config.options import Section, option
from grpo_trainer.errors import ConfigError


class EnvironmentProcess(Section):
    """Environment."""

    name: str = option(
        "arithmetic",
        help=f"{', '.join(BUILT_IN)}, or the module or file of your own environment.",
        flags=("--env",),
    )
    env: dict[str, Any] = Field(default_factory=dict)
    openai: dict[str, Any] = Field(default_factory=dict)
    data: dict[str, Any] = Field(default_factory=dict)
    rewards: tuple[Any, ...] = ()

    @property
    def reward_sources(self) -> list[str]:
        """The files and modules of its reward functions."""
        return settings_check.reward_sources(self.rewards)


DATA_FILES = (".jsonl", ".json", ".csv", ".parquet")


def environment_command(name: str, said: str = "--env") -> tuple[str, ...]:
    """Return what follows `python -m` to run an environment: a built-in by its short name, or the user's module or
    file, with `:CLASS` where it has several classes.

    Args:
        said: the flag or command that named it, for the message.

    Raises:
        ConfigError: there is none of this name.
    """
    if name in BUILT_IN:
        return (BUILT_IN[name].module,)
    module = name.partition(":")[0]
    if module.endswith(DATA_FILES):
        raise ConfigError(
            "a data file is not an environment",
            field=said,
            got=name,
            wanted="the module or the Python file of an environment",
            fix=f"train on the data set by --data {name} --reward FILE.py:FUNCTION",
        )
    if module.endswith(".py") or "/" in module:
        if Path(module).is_file():
            return ("environments", name)
    elif not re.fullmatch(r"[\w-]+(?:\.[\w-]+)*", module):  # no path, and no flag of `python -m`
        wanted = f"one of {', '.join(BUILT_IN)}, or the module or file of your own, such as my_envs.task"
        raise ConfigError("no name of a module", field=said, got=repr(name), wanted=wanted)
    elif "." in module or PathFinder.find_spec(module, [str(Path.cwd()), *sys.path]):
        return ("environments", name)
    known = ", ".join(BUILT_IN)
    near = _nearest_file(Path(module).stem if "/" in module or module.endswith(".py") else module)
    if module.endswith(".py") or "/" in module:
        raise ConfigError(
            "no such file",
            field=said,
            got=name,
            wanted="a Python file",
            fix=f"did you mean {near}?" if near else "correct the path",
        )
    raise ConfigError(
        f"no module of this name in {Path.cwd()}, nor in PYTHONPATH ({os.environ.get('PYTHONPATH') or 'not set'})",
        field=said,
        got=name,
        wanted=f"one of {known}, or the module or file of your own",
        fix=f"did you mean {'.'.join(near.with_suffix('').parts)} ({near})?"
        if near
        else f"start in the folder of your own {name}.py, or name it by its package, such as my_envs.{name}",
    )


def _nearest_file(name: str) -> Path | None:
    """The Python file most like an environment's name, in the current folder or one below it; None: none is alike."""
    files = {path.stem: path for pattern in ("*/*.py", "*.py") for path in Path().glob(pattern)}
    near = nearest(name, files, OF_FILES)
    return None if near is None else files[near]


def problems_of_tables(environments: Sequence[EnvironmentProcess]) -> list[Problem]:
    """Return what is wrong in environments' own tables: an unknown environment or key, a value that is not legal."""
    found: list[Problem] = []
    for environment in environments:
        with collected(found):
            environment_command(environment.name)
        own: list[Problem] = []
        with collected(own):
            settings_check.check(environment.name, environment.env)
        with collected(own):
            settings_check.check_server(environment.openai)
        with collected(own):
            settings_check.check_data(environment.name, environment.data, environment.rewards)
        found += [replace(each, field=f"--env {environment.name}: {each.field}") for each in own]
    return found
