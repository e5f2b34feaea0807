"""The built-in environments, and a check of their settings before anything is started. Loads no model and no data set.

The environment itself would report errors seconds or minutes later. This check needs only the settings classes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import Final, cast

from pydantic import BaseModel

from environments.config import BaseEnvConfig, ServerConfig, check_table, refuse_data, require_data
from environments.data_config import DataConfig, Rewards
from grpo_common.models import find_folder


@dataclass(frozen=True)
class BuiltIn:
    """A built-in environment: the module that runs it, and its settings class."""

    module: str
    settings: str
    settings_module: str = ""
    """Has that class, and imports nothing heavy; empty: it is `module`."""
    is_tried: bool = True
    """A run tries it before it starts: it depends on more than the settings, which are checked without a trial."""

    def config(self) -> type[BaseEnvConfig]:
        return cast("type[BaseEnvConfig]", getattr(import_module(self.settings_module or self.module), self.settings))


AGENT: Final = "agent"
DATASET: Final = "dataset"
"""The environment that reads `[data]` and `[[rewards]]`."""
BUILT_IN: Final = MappingProxyType(
    {
        "agent": BuiltIn("environments.agent", "AgentConfig", "environments.agent.env"),
        "arithmetic": BuiltIn("environments.arithmetic", "ArithmeticConfig", is_tried=False),
        "dataset": BuiltIn("environments.dataset", "DatasetConfig", "environments.dataset.env"),
        "gsm8k": BuiltIn("environments.gsm8k", "Gsm8kConfig"),
        "verifiers": BuiltIn("environments.from_verifiers", "VerifiersConfig", "environments.from_verifiers.config"),
        "word_problems": BuiltIn("environments.word_problems", "WordProblemsConfig", is_tried=False),
    }
)
"""By short name."""


class _RewardTables(BaseModel):
    rewards: Rewards


def check(name: str, values: Mapping[str, object]) -> None:
    """Check the table `[env]` of an environment, which is the same as its flags `--env.KEY VALUE`.

    Values may be text, as typed (`"8"`). Missing required keys are left to the environment, because a run adds some.
    The settings of a user's own environment are unknown before it runs, so they are not checked. Raise as
    `check_table`.
    """
    if name in BUILT_IN:
        check_table("env", BUILT_IN[name].config(), values)


def check_server(values: Mapping[str, object]) -> None:
    """Check the table `[openai]`, which is the same for every environment; raise as `check`."""
    check_table("openai", ServerConfig, values)


def check_data(name: str, data: Mapping[str, object], rewards: Sequence[object]) -> None:
    """Check the tables `[data]` and `[[rewards]]`, and that the environment reads or needs them; raise as `check`.

    The data set and the functions are not looked for yet.
    """
    check_table("data", DataConfig, data)
    check_table("", _RewardTables, {"rewards": rewards})
    if name == DATASET:
        require_data(data.get("path") is not None, bool(rewards))
    elif name == AGENT:
        require_data(data.get("path") is not None, has_rewards=True)  # the agent may return its reward
    elif name in BUILT_IN:
        refuse_data(name, bool(data), bool(rewards))


def reward_sources(rewards: Sequence[object]) -> list[str]:
    """Return the files and modules of rewards: `my.py` of `my.py:f`. Built-in rewards have none."""
    found = _RewardTables.model_validate({"rewards": rewards}).rewards
    return [each.function.rpartition(":")[0] for each in found if ":" in each.function and not each.is_regex]


def tool_parser(model: str) -> str:
    """Return the server's parser (`--tool-call-parser`) for the tool calls that a model's chat template asks for."""
    from environments.tool_calls import tool_format  # imports a client of HTTP, which takes a fifth of `grpo --help`

    folder = find_folder(model) or Path(model)
    for name in ("chat_template.jinja", "tokenizer_config.json"):
        with suppress(OSError, UnicodeDecodeError):
            return tool_format((folder / name).read_text())
    return tool_format("")


def group_size(name: str, values: Mapping[str, object]) -> int | None:
    """Return the completions per item of an environment with this table; None if that is not known before it runs."""
    if "group_size" in values:
        given = str(values["group_size"])
        return int(given) if given.isdecimal() and int(given) else None  # a user's own environment judges the rest
    return cast("int", BUILT_IN[name].config().model_fields["group_size"].default) if name in BUILT_IN else None


def common_option(key: str) -> tuple[str, object] | None:
    """Return the description and the default of an option that every environment has; None: there is no such option."""
    field = BaseEnvConfig.model_fields.get(key)
    return None if field is None else (str(field.description), field.default)
