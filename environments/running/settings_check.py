"""Check the settings of a built-in environment before anything is started. Loads no model and no data set.

The environment itself would report errors seconds or minutes later. This check needs only the settings classes.
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
"""Maps an environment's short name to module and name of its settings class. These modules import nothing heavy."""


def check(name: str, values: Mapping[str, object]) -> None:
    """Check the table `[env]` of an environment, which is the same as its flags `--env.KEY VALUE`.

    Values may be text, as typed (`"8"`). Missing required keys are left to the environment, because a run adds some.
    The settings of a user's own environment are unknown before it runs, so they are not checked.

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
    """Return the completions per item of an environment with this table; None if that is not known before it runs."""
    if "group_size" in values:
        given = str(values["group_size"])
        return int(given) if given.isdecimal() and int(given) else None  # a user's own environment judges the rest
    return cast("int", _class(name).model_fields["group_size"].default) if name in _SETTINGS else None


def _class(name: str) -> type[BaseEnvConfig]:
    module, settings = _SETTINGS[name]
    return cast("type[BaseEnvConfig]", getattr(import_module(module), settings))
