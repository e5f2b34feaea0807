"""Are the settings of a built-in environment sound? Asked before anything is started: loads no model, no data set.

What the environment itself would say, seconds or minutes later, is said here from the classes of its settings alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from types import MappingProxyType
from typing import Final, cast

from environments.config import BaseEnvConfig, ConfigError, ServerConfig, check_table

__all__ = ["ConfigError", "check", "check_server", "group_size"]

_SETTINGS: Final = MappingProxyType(
    {
        "arithmetic": ("environments.arithmetic_server", "ArithmeticConfig"),
        "gsm8k": ("environments.gsm8k_server", "Gsm8kConfig"),
        "verifiers": ("environments.from_verifiers.config", "VerifiersConfig"),
        "word_problems": ("environments.word_problems_server", "WordProblemsConfig"),
    }
)
"""By short name: where the class of an environment's settings stands, in modules that import nothing heavy."""


def check(name: str, values: Mapping[str, object]) -> None:
    """Check the table `[env]` of an environment: what `--env.KEY VALUE` gives it.

    Values may be as they were typed (`"8"`). Keys that are required and not there are left to the environment, since a
    run adds some. Of an environment of the user's own nothing is known before it runs: it is not checked.

    Raises:
        ConfigError: A key is unknown (the nearest is suggested), or a value is not legal.
    """
    if name in _SETTINGS:
        check_table("env", _class(name), values)


def check_server(values: Mapping[str, object]) -> None:
    """Check the table `[openai]`, which is the same for every environment.

    Raises:
        ConfigError: As for `check`.
    """
    check_table("openai", ServerConfig, values)


def group_size(name: str, values: Mapping[str, object]) -> int | None:
    """Completions per item that an environment with this table makes; None where that is not known before it runs."""
    if "group_size" in values:
        return int(str(values["group_size"]))
    return cast("int", _class(name).model_fields["group_size"].default) if name in _SETTINGS else None


def _class(name: str) -> type[BaseEnvConfig]:
    module, settings = _SETTINGS[name]
    return cast("type[BaseEnvConfig]", getattr(import_module(module), settings))
