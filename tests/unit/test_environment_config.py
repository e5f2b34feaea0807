"""What the command line and the configuration file of an environment take, and what they say to mistakes."""

from pathlib import Path
from typing import Any

import pytest

from environments.arithmetic_server import ArithmeticConfig
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


def test_process_has_one_more() -> None:
    settings = parse(*TOKENIZER, "--groups", "7", processes=True)
    assert isinstance(settings, ProcessSettings)
    assert settings.groups == 7
    with pytest.raises(ConfigError, match="--groups: no such option"):
        parse(*TOKENIZER, "--groups", "7")


def test_the_shells_variables_are_no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENV", "production")
    monkeypatch.setenv("SLURM", "true")
    assert parse(*TOKENIZER).slurm is False


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "--env.tokenizer_name: required, but not given"),
        ([*TOKENIZER, "--env.group_siz", "4"], "--env.group_siz: no such option; did you mean --env.group_size?"),
        ([*TOKENIZER, "--group_size=4"], "--group_size: no such option; did you mean --env.group_size?"),
        ([*TOKENIZER, "--env.group_size", "0"], "--env.group_size: got '0', wanted greater than or equal to 1"),
        (
            [*TOKENIZER, "--openai.server_type", "tgi"],
            "--openai.server_type: got 'tgi', wanted 'auto', 'vllm', 'openai'",
        ),
        ([*TOKENIZER, "--openai.base_url", "localhost:1"], "--openai.base_url: got 'localhost:1', wanted a URL"),
        ([*TOKENIZER, "--slurm", "True"], "--slurm: got 'True', wanted False; name a server"),
        (["--config", "/no/such.toml"], "--config: cannot read /no/such.toml: No such file or directory"),
    ],
)
def test_a_mistake_is_named_with_the_way_out(arguments: list[str], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(*arguments)
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[env]\ngroup_siz = 4\n", "env.group_siz: no such setting; did you mean env.group_size?"),
        ("[enf]\ngroup_size = 4\n", "enf: no such table; did you mean env?"),
        ('[env]\ngroup_size = "many"\n', "--env.group_size: got 'many', wanted a valid integer"),
        ("[env\n", "is not TOML"),
    ],
)
def test_a_mistake_in_the_file_is_named(tmp_path: Path, text: str, says: str) -> None:
    file = tmp_path / "env.toml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        parse(*TOKENIZER, "--config", str(file))
    assert says in str(caught.value)
