"""A run's environments: which there are, and what can be known of them before anything is started."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from importlib.machinery import PathFinder
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pydantic import Field

from environments.running import settings_check
from grpo_trainer.config.options import Section, option
from grpo_trainer.errors import ConfigError

BUILT_IN_ENVIRONMENTS = MappingProxyType(
    {
        "arithmetic": "environments.arithmetic_server",
        "gsm8k": "environments.gsm8k_server",
        "verifiers": "environments.verifiers_server",
        "word_problems": "environments.word_problems_server",
    }
)


class EnvironmentProcess(Section):
    """Environment."""

    name: str = option(
        "arithmetic",
        help=f"{', '.join(BUILT_IN_ENVIRONMENTS)}, or the module of your own environment.",
        flags=("--env",),
    )
    env: dict[str, Any] = Field(default_factory=dict)
    openai: dict[str, Any] = Field(default_factory=dict)


def environment_module(name: str, said: str = "--env") -> str:
    """The module that runs an environment: a built-in by its short name, or the user's, dotted or in plain sight.

    Args:
        said: the flag or command that named it, for the message.
    """
    if name in BUILT_IN_ENVIRONMENTS:
        return BUILT_IN_ENVIRONMENTS[name]
    if "." in name or PathFinder.find_spec(name, [str(Path.cwd()), *sys.path]):
        return name
    known = ", ".join(BUILT_IN_ENVIRONMENTS)
    raise ConfigError(
        "unknown environment",
        field=said,
        got=name,
        wanted=f"one of {known}, or the module of your own",
        fix=f"name your own by its module, such as my_envs.{name}",
    )


def check_environments(environments: Sequence[EnvironmentProcess], sequences: int) -> None:
    """Are their tables sound, and do groups of theirs make up a batch?

    Args:
        sequences: of a step.

    Raises:
        ConfigError: an environment is unknown, a key of a built-in one's is, or a value is not legal; or no number of
            groups has as many sequences as a step.
    """
    for environment in environments:
        environment_module(environment.name)
        try:
            settings_check.check(environment.name, environment.env)
            settings_check.check_server(environment.openai)
        except settings_check.ConfigError as error:
            named = [replace(each, field=f"--env {environment.name}: {each.field}") for each in error.problems]
            raise ConfigError.of(named) from None
    sizes = [settings_check.group_size(environment.name, environment.env) for environment in environments]
    known = [size for size in sizes if size is not None]
    if len(known) == len(sizes) and not _sums_to(sequences, known):
        groups = " and ".join(map(str, dict.fromkeys(known)))
        wanted = f"a multiple of {groups}" if len(known) == 1 else f"a sum of groups of {groups}"
        raise ConfigError(
            "no number of groups fills a batch",
            field="--batch-size x --gradient-accumulation-steps",
            got=f"{sequences} sequences a step",
            wanted=f"{wanted} (--env.group_size)",
            fix=f"for example --batch-size {known[0]}",
        )


def _sums_to(whole: int, parts: Sequence[int]) -> bool:
    """Whether some number of each part, none of some, adds up to the whole."""
    reached = [True] + [False] * whole
    for total in range(1, whole + 1):
        reached[total] = any(part <= total and reached[total - part] for part in parts)
    return reached[whole]
