"""What the command line and the configuration file of an environment take, and what they say to mistakes."""

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from environments.arithmetic import ArithmeticConfig
from environments.config import ConfigError, ProcessSettings, Settings, parse_settings, settings_class

TOKENIZER = ["--env.tokenizer_name", "model"]


def parse(*arguments: str, processes: bool = False) -> Settings[Any]:
    return parse_settings(settings_class(ArithmeticConfig, processes=processes), "prog", arguments)


def test_the_predecessors_command_line() -> None:
    settings = parse(
        *TOKENIZER,
        *("--env.group_size", "16", "--env.rollout_server_url", "http://127.0.0.1:8123/"),
        *("--env.use_wandb", "False", "--openai.base_url", "http://127.0.0.1:9123/v1", "--openai.model_name", "X"),
        *("--openai.server_type", "vllm", "--openai.api_key", "x", "--slurm", "False"),
    )
    assert (settings.env.group_size, settings.env.rollout_server_url) == (16, "http://127.0.0.1:8123")
    assert (settings.openai.base_url, settings.openai.model_name) == ("http://127.0.0.1:9123/v1", "X")
    assert (settings.openai.api_key, settings.env.use_wandb, settings.slurm) == ("x", False, False)


def test_flags_win_over_the_file_and_the_file_over_defaults(tmp_path: Path) -> None:
    file = tmp_path / "env.toml"
    file.write_text('[env]\ntokenizer_name = "from-file"\ngroup_size = 4\nhigh = 19\n[openai]\nmodel_name = "M"\n')
    settings = parse("--config", str(file), "--env.group_size=32")
    assert isinstance(settings.env, ArithmeticConfig)
    assert (settings.env.tokenizer_name, settings.env.group_size, settings.env.high) == ("from-file", 32, 19)
    assert (settings.env.low, settings.openai.model_name, settings.openai.timeout) == (10, "M", 1200.0)


def test_the_environments_own_settings_and_older_names_are_flags() -> None:
    settings = parse(*TOKENIZER, "--env.operation", "-", "--env.max_num_workers", "3")
    assert isinstance(settings.env, ArithmeticConfig)
    assert (settings.env.operation, settings.env.max_concurrent_groups) == ("-", 3)
    assert parse(*TOKENIZER, "--env.max_num_workers", "-1").env.max_concurrent_groups is None  # as in Atropos
    with pytest.raises(ConfigError):
        parse(*TOKENIZER, "--env.max_num_workers", "0")


def test_process_has_one_more() -> None:
    settings = parse(*TOKENIZER, "--groups", "7", processes=True)
    assert isinstance(settings, ProcessSettings)
    assert settings.groups == 7
    with pytest.raises(ConfigError) as unknown:
        parse(*TOKENIZER, "--groups", "7")
    assert unknown.value.field == "--groups"


def test_the_shells_variables_are_no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENV", "production")
    monkeypatch.setenv("SLURM", "true")
    assert parse(*TOKENIZER).slurm is False


@pytest.mark.parametrize(
    ("arguments", "field", "parts"),
    [
        ([], "--env.tokenizer_name", {}),
        ([*TOKENIZER, "--env.group_siz", "4"], "--env.group_siz", {"fix": "--env.group_size"}),
        ([*TOKENIZER, "--group_size=4"], "--group_size", {"fix": "--env.group_size"}),
        ([*TOKENIZER, "--env.group_size", "0"], "--env.group_size", {"got": "'0'", "wanted": "1"}),
        ([*TOKENIZER, "--openai.server_type", "tgi"], "--openai.server_type", {"got": "'tgi'", "wanted": "'vllm'"}),
        (
            [*TOKENIZER, "--openai.base_url", "localhost:1"],
            "--openai.base_url",
            {"got": "'localhost:1'", "wanted": "http://"},
        ),
        ([*TOKENIZER, "--slurm", "True"], "--slurm", {"got": "'True'", "wanted": "False", "fix": "--openai.base_url"}),
        (["--config", "/no/such.toml"], "--config /no/such.toml", {"got": os.strerror(errno.ENOENT)}),
    ],
)
def test_a_mistake_is_named_with_the_way_out(arguments: list[str], field: str, parts: dict[str, str]) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(*arguments)
    assert caught.value.field == field
    assert all(part in getattr(caught.value, name) for name, part in parts.items())


def test_all_mistakes_are_named_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        parse("--env.group_size", "0", "--openai.timeout", "-1")
    fields = {problem.field for problem in caught.value.problems}
    assert fields == {"--env.tokenizer_name", "--env.group_size", "--openai.timeout"}


@pytest.mark.parametrize(
    ("text", "field", "parts"),
    [
        ("[env]\ngroup_siz = 4\n", "env.group_siz", {"fix": "env.group_size"}),
        ("[enf]\ngroup_size = 4\n", "enf", {"fix": "env"}),
        ('[env]\ngroup_size = "many"\n', "--env.group_size", {"got": "'many'", "wanted": "integer"}),
        ("[env\n", "--config FILE", {"summary": "line 1, column 5"}),
    ],
)
def test_a_mistake_in_the_file_is_named(tmp_path: Path, text: str, field: str, parts: dict[str, str]) -> None:
    file = tmp_path / "env.toml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        parse(*TOKENIZER, "--config", str(file))
    assert caught.value.field == field.replace("FILE", str(file))
    assert all(part in getattr(caught.value, name) for name, part in parts.items())
