"""One definition of each option: flags, TOML, messages."""

from __future__ import annotations

import logging
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from environments.running.settings_check import BUILT_IN
from grpo_trainer.cli import app
from grpo_trainer.config.options import build, dump, flat, options_of, override, with_options
from grpo_trainer.config.rules import SET_BY_THE_RUN
from grpo_trainer.config.run import build_run, read_toml
from grpo_trainer.config.server import Server
from grpo_trainer.config.train import ADAPTER_LR, ALL_WEIGHTS_LR, TrainConfig
from grpo_trainer.config.values import format_ranges, parse_ranges
from grpo_trainer.errors import ConfigError
from tests.processes import ROOT


def grpo(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "grpo_trainer", *arguments], capture_output=True, text=True, timeout=60, check=False
    )


LORA = {"weight_bridge_mode": "lora_only"}
PREDECESSOR_DEFAULTS = {
    "weight_bridge_mode": "none",
    "training_steps": 10,
    "batch_size": 2,
    "gradient_accumulation_steps": 32,
    "warmup_steps": 0,
    "optimizer": "adamw",
    "seq_len": 2048,
    "save_path": "trained_model_checkpoints",
    "vllm_restart_interval": 3,
    "clip_eps": 0.2,
    "atropos_url": "http://localhost:8000",
    "use_wandb": False,
    "benchmark": False,
}


def test_names_and_defaults_are_the_predecessors() -> None:
    """All but one: checkpoints by steps cost the more, the shorter a step."""
    values = dump(build(TrainConfig, {"model_name": "m"}))
    assert values["checkpoint_interval"] == "10m"
    assert {key: values[key] for key in PREDECESSOR_DEFAULTS} == PREDECESSOR_DEFAULTS
    assert values["server"]["port"] == 9001
    lora = dump(build(TrainConfig, {"model_name": "m", "weight_bridge_mode": "lora_only"}))
    assert (lora["lora_r"], lora["lora_alpha"]) == (16, 32.0)


def test_dropout_of_an_adapter_is_accepted_and_taken_as_0(caplog: pytest.LogCaptureFixture) -> None:
    config = build(TrainConfig, {"model_name": "m", "weight_bridge_mode": "lora_only", "lora_dropout": "0.05"})
    assert config.weight_bridge_mode == "lora_only" and config.lora_dropout == 0
    assert [each.levelname for each in caplog.records] == ["WARNING"] and "--lora-dropout: got 0.05" in caplog.text


def test_every_predecessor_flag_is_known() -> None:
    flags = {flag for each in options_of(TrainConfig) for flag in (*each.flags, *each.former)}
    wanted = {
        "--model-name", "--model", "--vllm-config-path", "--lora-dropout", "--lora-target-modules", "--dtype",
        "--device", "--max-model-len", "--gpu-memory-utilization", "--atropos-url", "--rollout-url",
        "--wandb-project", "--wandb-group", "--log-dir", "--lora-r", "--lora-alpha", "--weight-bridge-mode",
    }  # fmt: skip
    assert wanted <= flags


@pytest.mark.parametrize(
    ("given", "field", "helps"),
    [
        ({"model_name": None}, "--model-name", "required"),
        ({"lrr": 1}, "lrr", "lr?"),
        ({"lr": "fast"}, "--lr", "number"),
        ({"lr": 0}, "--lr", "greater than 0"),
        ({**LORA, "lora_r": 24}, "--lora-r", "1, 8, 16, 32, 64, 128, 256, 320, 512; use 32"),
        ({**LORA, "lora_target_modules": ","}, "--lora-target-modules", "q_proj"),
        ({"lora_r": 8}, "--lora-r", "--weight-bridge-mode lora_only, lora_restart"),
        ({"weight_bridge_mode": "lora"}, "--weight-bridge-mode", "'none'"),
        ({"optimizer": "adamw_cpu"}, "--optimizer", "use adamw_8bit"),
        ({"checkpoint_interval": "10 minutes"}, "--checkpoint-interval", "10m"),
        ({"single_copy": True, "weight_bridge_mode": "none"}, "--single-copy", "--weight-bridge-mode shared_vllm"),
        ({**LORA, "train_layer_indices": "1"}, "--train-layer-indices", "--weight-bridge-mode none, shared_vllm"),
        ({"train_layer_indices": "0,3-1"}, "--train-layer-indices", "0-3,28-31"),
        ({"rollout_url": "localhost:8000"}, "--rollout-url", "http://localhost:8000"),
        ({"lerning_rate": 1}, "lerning_rate", "learning_rate?"),
        ({"rollout_url": "http://a:1", "atropos-url": "http://a:2"}, "--atropos-url", "one"),
        # one problem, even where others would follow from it
        ({"save_path": 5}, "--save-path", "path"),
        ({**LORA, "lora_adapter": 5}, "--lora-adapter", "path"),
        ({"server": 5}, "server", "[server]"),
        ({"vllm_port": 9001, "server": {"port": 9002}}, "--server.port", "one value"),
    ],
)
def test_options_refusal_names_the_option_and_what_helps(given: dict[str, object], field: str, helps: str) -> None:
    with pytest.raises(ConfigError) as error:
        build(TrainConfig, {key: value for key, value in ({"model_name": "m"} | given).items() if value is not None})
    (problem,) = error.value.problems
    assert problem.field == field and helps in f"{problem.wanted}; {problem.fix}"


def test_the_correction_is_on_where_the_ratio_does_not_contain_it() -> None:
    def correction(**given: object) -> str:
        return build(TrainConfig, {"model_name": "m", **given}).correction

    assert correction() == "none" and correction(ratio_against="trainer") == "truncate"
    assert correction(ratio_against="trainer", is_correction="none") == "none"
    assert correction(ratio_against="trainer", is_correction="mask") == "mask"


def test_dashes_and_aliases_mean_the_same() -> None:
    single = build(TrainConfig, {"model": "m", "single-copy": True, "train-layer-indices": "21,20"})
    assert single.weight_bridge_mode == "shared_vllm" and single.layer_indices == (20, 21)
    assert build(TrainConfig, dump(single)) == single
    one = build(TrainConfig, {"model": "m", "training-steps": 5, "rollout-url": "http://a:1/"})
    two = build(TrainConfig, {"model_name": "m", "training_steps": "5", "atropos_url": "http://a:1"})
    assert one == two


@given(
    st.fixed_dictionaries(
        {"model_name": st.text("abc/", min_size=1)},
        optional={
            "lr": st.floats(1e-7, 1),
            "weight_bridge_mode": st.sampled_from(["none", "shared_vllm", "lora_only", "lora_restart"]),
            "training_steps": st.integers(1, 1000),
            "clip_eps_high": st.floats(0.1, 1),
            "use_wandb": st.booleans(),
            "max_staleness": st.integers(2, 5),
        },
    )
)
def test_a_configuration_survives_being_written_and_read(values: dict[str, object]) -> None:
    config = build(TrainConfig, values)
    assert build(TrainConfig, dump(config)) == config
    assert build(TrainConfig, dump(config, only_set=True)) == config


def test_flags_win_over_the_file(tmp_path: Path) -> None:
    config = build_run(
        {"trainer": {"model_name": "m", "lr": 1e-3, "weight-bridge-mode": "lora_only"}, "server": {"port": 1}},
        {"lr": "1e-4", "server.port": "0", "run_dir": str(tmp_path), "env": "arithmetic"},
        ["--env.group_size", "4", "--openai.api_key=k"],
    )
    assert config.trainer.lr == 1e-4
    assert config.trainer.weight_bridge_mode == "lora_only"
    assert config.server.port == 0 and config.run_dir == tmp_path
    (environment,) = config.environments
    assert environment.env == {"group_size": "4"} and environment.openai == {"api_key": "k"}


@pytest.mark.parametrize(
    ("file", "field", "helps"),
    [
        ({"trainr": {}}, "trainr", "trainer?"),
        ({"server": {"prt": 1}}, "server.prt", "server.port?"),
        ({"environments": [{"nam": "x"}]}, "environments.nam", "environments.name?"),
        ({"environments": 3}, "environments", "[[environments]]"),
        ({"data": 5, "rewards": ["a.py:f"]}, "environments.data", ""),
        ({"data": "a.jsonl", "rewards": "a.py:f"}, "rewards", ""),
        ({"environments": [{}, {}], "data": "a.jsonl"}, "--env", ""),
        ({"environments": [{"env": 3}]}, "environments.env", "table"),
        ({"trainer": 3}, "trainer", "[trainer]"),
        ({"trainer": {"server": {"port": 9001}}}, "trainer.server", "[server]"),
        ({"server": {"max_model_len": 9}, "trainer": {"max_model_len": 8}}, "--max-model-len", "leave one out"),
    ],
)
def test_options_of_a_runs_file_that_are_refused(file: dict[str, object], field: str, helps: str) -> None:
    with pytest.raises(ConfigError) as error:
        build_run(file, {"model_name": "m"})
    assert error.value.field == field and helps in f"{error.value.wanted}; {error.value.fix}"


@pytest.mark.parametrize(
    ("flags", "field", "helps"),
    [
        ({"vllm_host": "h"}, "--vllm-host", "--server.port"),
        ({"server.gpu_memory_utilization": "7"}, "--server.gpu-memory-utilization", "1"),
        ({"server.extra_args": "--tensor-parallel-size=2"}, "--server.extra-args", "--server.tensor-parallel-size"),
        ({"server.extra_args": "-tp=2"}, "--server.extra-args", "--server.tensor-parallel-size"),
        ({"server.extra_args": "--max-model-len=9"}, "--server.extra-args", "--server.max-model-len"),
        ({"server.extra_args": "--dtype=float16"}, "--server.extra-args", "--server.dtype"),
        ({"server.extra_args": "--api-key=k"}, "--server.extra-args", "--server.api-key"),
        ({"vllm_extra_args": "--dtype=float16"}, "--vllm-extra-args", "--server.dtype"),
        ({"vllm_extra_args": "--logits-dtype,model"}, "--vllm-extra-args", "--logits-dtype"),
        ({"api.extra_args": "--api-key,k"}, "--api.extra-args", "--rollout-api-key"),
        ({"vllm_dtype": "float16", "server.dtype": "bfloat16"}, "--server.dtype", "leave one out"),
        ({**LORA, "lora_r": "8", "lora_rank": "16"}, "--lora-rank", "one"),
        ({"env": "gsm9k"}, "--env", ", ".join(BUILT_IN)),
    ],
)
def test_options_of_a_run_that_are_refused(flags: dict[str, object], field: str, helps: str) -> None:
    with pytest.raises(ConfigError) as error:
        build_run({}, {"model_name": "m", **flags})
    assert error.value.field == field and helps in f"{error.value.wanted}; {error.value.fix}"


@pytest.mark.parametrize(
    ("words", "field", "helps"),
    [
        ("--larning-rate 1", "--larning-rate", "--learning-rate?"),
        ("--env.group_size", "--env.group_size", "value"),
        ("--envv.group_size 8", "--envv.group_size", "--env.group_size?"),
        ("--server.prt 8", "--server.prt", "--server.port?"),
        ("--vllm-prt 8", "--vllm-prt", "--vllm-port?"),
        ("--zzzzzz 8", "--zzzzzz", "--help"),
        ("sums", "sums", "--NAME VALUE"),
        # an environment's settings are checked before it runs
        ("--env.group_sise 8", "--env arithmetic: env.group_sise", "env.group_size?"),
        ("--openai.modl_name 8", "--env arithmetic: openai.modl_name", "openai.model_name?"),
    ],
)
def test_words_of_a_run_that_are_refused(words: str, field: str, helps: str) -> None:
    with pytest.raises(ConfigError) as error:
        build_run({}, {"model_name": "m"}, words.split())
    assert error.value.field == field and helps in f"{error.value.wanted}; {error.value.fix}"


def test_one_environment_by_flag_beside_several_of_a_file_is_refused() -> None:
    with pytest.raises(ConfigError) as error:
        build_run({"environments": [{}, {}]}, {"model_name": "m", "env": "arithmetic"})
    assert error.value.field == "--env"


def test_a_tilde_is_the_home_folder_in_a_file_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    config = build_run({"run_dir": "~/runs/a", "trainer": {"model_name": "~/m"}}, {"api.store": "~/queue"})
    assert [str(config.run_dir), config.trainer.model_name, str(config.store)] == [
        "/home/me/runs/a",
        "/home/me/m",
        "/home/me/queue",
    ]


def test_a_toml_file_with_an_error_names_the_place(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text("model_name = \n")
    done = grpo("train", "--config", str(path))
    assert done.returncode == 2 and f"--config {path}: " in done.stderr
    assert "line 1" in done.stderr
    missing = grpo("train", "--config", str(tmp_path / "none.toml"))
    assert missing.returncode == 2 and str(tmp_path / "none.toml") in missing.stderr
    assert "Traceback" not in missing.stderr


def test_train_alone_is_answered_with_an_example_and_the_command_that_starts_everything() -> None:
    error = CliRunner().invoke(app, ["train"]).exception
    assert isinstance(error, ConfigError) and error.field == "--model-name"
    assert "grpo train --model-name " in error.fix and "`grpo run`" in error.fix
    some = CliRunner().invoke(app, ["train", "--lr", "1e-5"]).exception
    assert isinstance(some, ConfigError) and not some.fix


def test_groups_of_several_sizes_need_only_add_up_to_a_step() -> None:
    file = {"environments": [{"env": {"group_size": 6}}, {"env": {"group_size": "10"}}]}
    build_run(file, {"model_name": "m", "batch_size": 16, "gradient_accumulation_steps": 1})  # 6 + 10
    own = {"environments": [{"name": "my.envs.maze"}]}  # whose groups nobody knows before it runs
    build_run(own, {"model_name": "m", "batch_size": 3, "gradient_accumulation_steps": 1})


def test_a_servers_option_has_one_value_under_both_of_its_names() -> None:
    for flags in ({"server.max_model_len": "512"}, {"max_model_len": "512"}):
        config = build_run({}, {"model_name": "m", **flags})
        assert config.server.max_model_len == config.trainer.server.max_model_len == config.trainer.served_len == 512
    same = build_run({}, {"model_name": "m", "server.dtype": "float16", "vllm_dtype": "float16"})
    assert same.server.dtype == "float16"
    for flag, file in (
        ("server.dtype", {"trainer": {"vllm_dtype": "bfloat16"}}),
        ("vllm_dtype", {"server": {"dtype": "bfloat16"}}),
    ):
        config = build_run(file, {"model_name": "m", flag: "float16"})
        assert config.server.dtype == config.trainer.server.dtype == "float16", "a flag wins over the file"


def test_a_flag_wins_over_another_name_of_it_in_the_file() -> None:
    config = build_run({"trainer": {"model": "a", "lora_rank": 8}}, {"model_name": "b", **LORA, "lora_r": "16"})
    assert config.trainer.model_name == "b" and dump(config.trainer)["lora_r"] == 16
    dashes = {"server": {"max-model-len": 9}, "api": {"extra-args": ["--fsync"]}, "run-dir": "a"}
    flags = {"server.max_model_len": "8", "api.extra_args": "--memory-mb,9", "run_dir": "b"}
    config = build_run(dashes, {"model_name": "m", **flags})
    assert config.server.max_model_len == 8 and config.api.extra_args == ("--memory-mb", "9")
    assert config.run_dir == Path("b")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("--seed,7", ("--seed", "7")),
        (
            '--compilation-config={"level":3,"x":[1,2]},--seed,7',
            ('--compilation-config={"level":3,"x":[1,2]}', "--seed", "7"),
        ),
        ('--a={"b":"}, \\","c":1}', ('--a={"b":"}, \\","c":1}',)),
        ("", ()),
    ],
)
def test_arguments_are_cut_at_commas_but_json_is_not(text: str, words: tuple[str, ...]) -> None:
    assert build(Server, {"extra_args": text}).extra_args == words


@pytest.mark.parametrize(
    ("variable", "key"), [("VLLM_API_KEY", "server.api_key"), ("ROLLOUT_API_KEY", "rollout_api_key")]
)
def test_keys_come_from_the_environment_where_no_flag_gives_them(
    monkeypatch: pytest.MonkeyPatch, variable: str, key: str
) -> None:
    monkeypatch.setenv(variable, "secret")

    def dumped(given: dict[str, str], *, only_set: bool = False) -> dict[str, Any]:
        return flat(TrainConfig, dump(build(TrainConfig, {"model_name": "m", **given}), only_set=only_set))

    assert dumped({})[key] == "secret"
    assert key not in dumped({}, only_set=True), "what inherits it needs no file"
    assert dumped({key: "given"})[key] == "given"


def test_flags_of_a_command_and_its_help() -> None:
    """In square brackets, defaults would be markup and not be seen."""
    command, got = typer.Typer(), {}

    @command.command()
    @with_options(TrainConfig)
    def train(options: dict[str, object]) -> None:
        got.update(options)

    CliRunner().invoke(command, ["--no-proof", "--benchmark", "--no-gradient-checkpointing", "--model", "m"])
    assert got == {"proof": False, "benchmark": True, "gradient_checkpointing": False, "model": "m"}
    said = " ".join(CliRunner().invoke(command, ["--help"], env={"COLUMNS": "300"}).output.split())
    assert "--no-proof)" in said and "--no-gradient-checkpointing)" in said
    assert "(default: 0.999)" in said and "(required)" in said
    (rate,) = re.findall(r"--lr FLOAT (.*?) │", said)
    assert rate.count("default") == 1 and f"{ADAPTER_LR:g}" in rate and f"{ALL_WEIGHTS_LR:g}" in rate


@pytest.mark.parametrize("command", ["run", "doctor"])
def test_a_runs_help_offers_nothing_that_it_refuses(command: str) -> None:
    said = CliRunner().invoke(app, [command, "--help-all"], env={"COLUMNS": "200"}).output
    flags = set(re.findall(r"--[a-z.0-9-]+", said))
    refused = {f"--{key.replace('_', '-')}" for key in SET_BY_THE_RUN}
    # Where help has to speak of them, it is as of what they say; none has a separate row.
    assert not {flag for flag in refused if re.search(rf"(?m)^\W*{flag}\b", said)}
    assert {"--server.tensor-parallel-size", "--server.port", "--lora-r", "--lora-rank"} <= flags
    assert "gsm8k" in said and "verifiers" in said
    bridge = [line for line in said.splitlines() if "--weight-bridge-mode" in line or "--proof" in line]
    assert "--weight-bridge-mode" in bridge[0], "it comes first in its group"


def test_help_begins_with_what_most_people_want() -> None:
    said = CliRunner().invoke(app, ["--help"], env={"COLUMNS": "100"}).output
    assert re.search(r"│ run ", said).start() < re.search(r"│ train ", said).start()  # type: ignore[union-attr]


def test_an_unknown_environment_or_command_of_one_is_named_as_it_was_written() -> None:
    done = grpo("env", "nosuch")
    assert done.returncode == 2 and done.stderr.startswith("grpo: grpo env: ")
    assert "nosuch" in done.stderr and ", ".join(BUILT_IN) in done.stderr
    called = ("env", "arithmetic")
    done = grpo(*called, "nothing")
    assert done.returncode == 2 and done.stderr.startswith(f"grpo {' '.join(called)}: COMMAND: ")
    assert "'nothing'" in done.stderr


# data and rewards -------------------------------------------------------------------------------------------


def environment_of(file: dict[str, Any], flags: dict[str, Any], args: Sequence[str] = ()) -> dict[str, Any]:
    """The one environment of a run."""
    (found,) = build_run(file, {"model_name": "m", **flags}, args).environments
    return found.model_dump()


def test_data_without_an_environment_mean_the_one_that_reads_them() -> None:
    flags = {"data": "rows.jsonl", "reward": ["my.py:f", "math=0.5"]}
    typed = environment_of({}, flags, ["--data.held_out", "5", "--data.prompt-column", "question"])
    assert typed["name"] == "dataset" and typed["rewards"] == ("my.py:f", "math=0.5")
    assert typed["data"] == {"path": "rows.jsonl", "held_out": "5", "prompt_column": "question"}
    file = {"data": {"path": "rows.jsonl", "held_out": "5", "prompt_column": "question"}, "rewards": flags["reward"]}
    assert environment_of(file, {}) == typed
    short = environment_of({"data": "rows.jsonl", "rewards": flags["reward"]}, {})
    assert short["data"] == {"path": "rows.jsonl"} and short["name"] == "dataset"


def test_flags_stand_over_the_files_data_and_rewards() -> None:
    file = {"data": {"path": "a.jsonl", "held_out": 5}, "rewards": [{"function": "my.py:f"}]}
    found = environment_of(file, {"data": "b.jsonl", "reward": ["my.py:g"]})
    assert found["data"] == {"path": "b.jsonl", "held_out": 5} and found["rewards"] == ("my.py:g",)


def test_an_environment_of_ones_own_may_have_data() -> None:
    flags = {"env": "tests.integration.odd_environment", "data": "rows.jsonl"}
    assert environment_of({}, flags)["data"] == {"path": "rows.jsonl"}


@pytest.mark.parametrize(
    ("flags", "args", "field"),
    [
        ({"data": "a.jsonl"}, [], "--env dataset: --reward"),
        ({"env": "dataset", "reward": ["my.py:f"]}, [], "--env dataset: --data"),
        ({"env": "arithmetic", "data": "a.jsonl"}, [], "--env arithmetic: --data"),
        ({"reward": ["my.py:f"]}, [], "--env dataset: --data"),
        ({"env": "arithmetic", "reward": ["my.py:f"]}, [], "--env arithmetic: --reward"),
        ({"data": "a.jsonl", "reward": ["my.py"]}, [], "--env dataset: --reward my.py"),
        ({"data": "a.jsonl", "reward": ["a.py:f", "b.py:f"]}, [], "--env dataset: --reward"),
        ({"data": "a.jsonl", "reward": ["a.py:f"]}, ["--data.splt", "x"], "--env dataset: data.splt"),
        ({"data": "a.jsonl", "reward": ["a.py:f"]}, ["--data.held_out", "x"], "--env dataset: --data.held_out"),
    ],
)
def test_data_and_rewards_that_do_not_fit_are_named(flags: dict[str, Any], args: list[str], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        environment_of({}, flags, args)
    assert field in [problem.field for problem in caught.value.problems]


# flags together with a file ---------------------------------------------------------------------------------


OF_A_MODE = {"model-name": "m", "weight_bridge_mode": "lora_only", "lora-rank": 8, "lora_alpha": 32.0, "lr": 1e-3}


def made(by: dict[str, Any], file: dict[str, Any] = OF_A_MODE) -> TrainConfig:
    return build(TrainConfig, override(TrainConfig, file, by))


@pytest.mark.parametrize(
    ("by", "mode"),
    [
        ({"weight_bridge_mode": "none"}, "none"),
        ({"weight_bridge_mode": "shared_vllm"}, "shared_vllm"),
        ({"single_copy": True}, "shared_vllm"),
    ],
)
def test_another_mode_takes_the_files_options_of_its_own_along(
    by: dict[str, Any], mode: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        config = made(by)
    assert config.weight_bridge_mode == mode and config.lr == 1e-3
    assert [record.args for record in caplog.records] == [("--weight-bridge-mode", mode, "lora-rank, lora_alpha")]


def test_the_same_mode_keeps_them_and_what_modes_share_stays(caplog: pytest.LogCaptureFixture) -> None:
    assert made({"weight_bridge_mode": "lora_only"}) == made({})
    restart = made({"weight_bridge_mode": "lora_restart", "lora_r": 16}, {**OF_A_MODE, "lora_keep_versions": 4})
    assert (restart.weight_bridge_mode, restart.lora_r, restart.lora_alpha) == ("lora_restart", 16, 32.0)
    (warning,) = caplog.records
    assert warning.args == ("--weight-bridge-mode", "lora_restart", "lora_keep_versions")


@pytest.mark.parametrize("file", [{"single_copy": True}, {"weight-bridge-mode": "shared_vllm", "in_flight": "abort"}])
def test_single_copy_is_a_mode_in_a_file_too_and_can_be_undone(file: dict[str, Any]) -> None:
    file = {"model": "m", **file}
    assert made({"weight_bridge_mode": "lora_only"}, file).weight_bridge_mode == "lora_only"
    assert made({"single_copy": False, "weight_bridge_mode": "none"}, file).weight_bridge_mode == "none"
    assert made({}, file).weight_bridge_mode == "shared_vllm"
    assert made({"single_copy": False}).weight_bridge_mode == "lora_only"


@pytest.mark.parametrize(
    ("file", "by", "field"),
    [
        ({"weight_bridge_mode": "none"}, {}, "--lora-r"),
        ({}, {"weight_bridge_mode": "none", "lora_r": 4}, "--lora-r"),  # given for this very mode
        ({"vllm_restart_interval": 5}, {"weight_bridge_mode": "lora_only"}, "--vllm-restart-interval"),
        ({"vllm_restart_interval": 5}, {"weight_bridge_mode": "shared_vllm"}, "--vllm-restart-interval"),
        ({"lora_rnak": 4}, {"weight_bridge_mode": "none"}, "lora_rnak"),
        ({}, {"weight_bridge_mode": "nine"}, "--weight-bridge-mode"),
    ],
)
def test_what_is_wrong_by_itself_stays_an_error(file: dict[str, Any], by: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError) as error:
        made(by, OF_A_MODE | file)
    assert error.value.field == field


@pytest.mark.parametrize("mode", ["none", "shared_vllm", "lora_restart", "lora_only"])
def test_the_quickstarts_file_serves_every_mode(mode: str) -> None:
    file = read_toml(ROOT / "configs" / "quickstart.toml")
    assert build_run(file, {"model_name": "m", "weight_bridge_mode": mode}, []).trainer.weight_bridge_mode == mode


# numbers and ranges as flags --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "numbers"),
    [("0-3,28-31", (0, 1, 2, 3, 28, 29, 30, 31)), ("5", (5,)), (" 7, 1-2 ,2", (1, 2, 7)), ("3-3", (3,))],
)
def test_numbers_and_ranges(text: str, numbers: tuple[int, ...]) -> None:
    assert parse_ranges(text) == numbers


@given(st.sets(st.integers(0, 200), min_size=1))
def test_what_is_written_is_read_back(numbers: set[int]) -> None:
    text = format_ranges(numbers)
    assert parse_ranges(text) == tuple(sorted(numbers))
    assert format_ranges(parse_ranges(text)) == text


@pytest.mark.parametrize(
    ("text", "got"),
    [
        *(("", "nothing"), ("1,,2", "nothing"), ("0,a", "a"), ("3-", "3-"), ("-3", "-3"), ("4-2", "4-2")),
        *(("1.5", "1.5"), ("0-99999", "0-99999")),
    ],
)
def test_anything_else_is_refused(text: str, got: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse_ranges(text)
    assert error.value.got == got and "0-3,28-31" in error.value.wanted
