"""The built-in environments, and a check of their settings before anything is started. Loads no model and no data set.

The environment itself would report errors seconds or minutes later. This check needs only the settings classes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from types import MappingProxyType
from typing import Final, cast

from environments.config import BaseEnvConfig, ConfigError, ServerConfig, check_table

__all__ = ["BUILT_IN", "ConfigError", "check", "check_server", "group_size"]


@dataclass(frozen=True)
class BuiltIn:
    """A built-in environment.

    Attributes:
        module: runs it.
        settings: name of its settings class.
        settings_module: has that class, and imports nothing heavy; empty: it is `module`.
    """

    module: str
    settings: str
    settings_module: str = ""


BUILT_IN: Final = MappingProxyType(
    {
        "arithmetic": BuiltIn("environments.arithmetic_server", "ArithmeticConfig"),
        "gsm8k": BuiltIn("environments.gsm8k_server", "Gsm8kConfig"),
        "verifiers": BuiltIn(
            "environments.verifiers_server", "VerifiersConfig", settings_module="environments.from_verifiers.config"
        ),
        "word_problems": BuiltIn("environments.word_problems_server", "WordProblemsConfig"),
    }
)
"""By short name."""


def check(name: str, values: Mapping[str, object]) -> None:
    """Check the table `[env]` of an environment, which is the same as its flags `--env.KEY VALUE`.

    Values may be text, as typed (`"8"`). Missing required keys are left to the environment, because a run adds some.
    The settings of a user's own environment are unknown before it runs, so they are not checked.

    Raises:
        ConfigError: A key is unknown (the nearest is suggested), or a value is not legal.
    """
    if name in BUILT_IN:
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
    return cast("int", _class(name).model_fields["group_size"].default) if name in BUILT_IN else None


def _class(name: str) -> type[BaseEnvConfig]:
    found = BUILT_IN[name]
    return cast("type[BaseEnvConfig]", getattr(import_module(found.settings_module or found.module), found.settings))
