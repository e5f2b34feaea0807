"""One definition of each option: flags, TOML, messages."""

from __future__ import annotations

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
from grpo_trainer.config.options import build, dump, flat, options_of, with_options
from grpo_trainer.config.rules import SET_BY_THE_RUN
from grpo_trainer.config.run import build_run
from grpo_trainer.config.server import Server
from grpo_trainer.config.train import ADAPTER_LR, ALL_WEIGHTS_LR, TrainConfig
from grpo_trainer.errors import ConfigError


def grpo(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "grpo_trainer", *arguments], capture_output=True, text=True, timeout=60, check=False
    )


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


LORA = {"weight_bridge_mode": "lora_only"}


@pytest.mark.parametrize(
    ("given_values", "field", "got", "helps"),
    [
        ({"model_name": None}, "--model-name", "nothing", "required"),
        ({"lrr": 1}, "lrr", "", "lr?"),
        ({"lr": "fast"}, "--lr", "fast", "number"),
        ({"lr": 0}, "--lr", "0", "greater than 0"),
        ({**LORA, "lora_r": 24}, "--lora-r", "24", "1, 8, 16, 32, 64, 128, 256, 320, 512; use 32"),
        ({**LORA, "lora_target_modules": ","}, "--lora-target-modules", "no names", "q_proj"),
        ({"lora_r": 8}, "--lora-r", "--weight-bridge-mode none", "--weight-bridge-mode lora_only, lora_restart"),
        ({"weight_bridge_mode": "lora"}, "--weight-bridge-mode", "lora", "'none'"),
        ({"optimizer": "adamw_cpu"}, "--optimizer", "adamw_cpu", "use adamw_8bit"),
        ({"checkpoint_interval": "10 minutes"}, "--checkpoint-interval", "10 minutes", "10m"),
        (
            {"single_copy": True, "weight_bridge_mode": "none"},
            *("--single-copy", "--weight-bridge-mode none", "--weight-bridge-mode shared_vllm"),
        ),
        (
            {**LORA, "train_layer_indices": "1"},
            *("--train-layer-indices", "--weight-bridge-mode lora_only", "--weight-bridge-mode none, shared_vllm"),
        ),
        ({"train_layer_indices": "0,3-1"}, "--train-layer-indices", "3-1", "0-3,28-31"),
        ({"rollout_url": "localhost:8000"}, "--rollout-url", "localhost:8000", "http://localhost:8000"),
        ({"lerning_rate": 1}, "lerning_rate", "", "learning_rate?"),
        (
            {"rollout_url": "http://a:1", "atropos-url": "http://a:2"},
            *("--atropos-url", "http://a:2 and --rollout-url http://a:1", "one"),
        ),
    ],
)
def test_errors_name_the_option_what_came_and_what_was_wanted(
    given_values: dict[str, object], field: str, got: str, helps: str
) -> None:
    given = {"model_name": "m", **given_values}
    with pytest.raises(ConfigError) as error:
        build(TrainConfig, {key: value for key, value in given.items() if value is not None})
    assert len(error.value.problems) == 1
    assert (error.value.field, error.value.got) == (field, got)
    assert helps in f"{error.value.wanted}; {error.value.fix}"
    assert error.value.exit_code == 2


def test_the_correction_is_on_where_the_ratio_does_not_contain_it() -> None:
    def correction(**given: object) -> str:
        return build(TrainConfig, {"model_name": "m", **given}).correction

    assert correction() == "none" and correction(ratio_against="trainer") == "truncate"
    assert correction(ratio_against="trainer", is_correction="none") == "none"
    assert correction(ratio_against="trainer", is_correction="mask") == "mask"


def test_single_copy_is_another_name_of_the_mode() -> None:
    config = build(TrainConfig, {"model": "m", "single-copy": True, "train-layer-indices": "21,20"})
    assert config.weight_bridge_mode == "shared_vllm"
    assert config.layer_indices == (20, 21)
    assert build(TrainConfig, dump(config)) == config


def test_dashes_and_aliases_mean_the_same() -> None:
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
    ("file", "flags", "args", "field", "got", "helps"),
    [
        ({"trainr": {}}, {}, [], "trainr", "", "trainer?"),
        ({"server": {"prt": 1}}, {}, [], "server.prt", "", "server.port?"),
        ({}, {"vllm_host": "h"}, [], "--vllm-host", "", "--server.port"),
        ({}, {}, ["--larning-rate", "1"], "--larning-rate", "", "--learning-rate?"),
        ({}, {}, ["--env.group_size"], "--env.group_size", "nothing", "value"),
        ({"environments": [{"nam": "x"}]}, {}, [], "environments.nam", "", "environments.name?"),
        ({"environments": [{}, {}]}, {"env": "arithmetic"}, [], "--env", "2 environments", "file"),
        ({"environments": 3}, {}, [], "environments", "3", "[[environments]]"),
        ({"environments": [{"env": 3}]}, {}, [], "environments.env", "3", "table"),
        ({"trainer": 3}, {}, [], "trainer", "3", "[trainer]"),
        ({}, {"server.gpu_memory_utilization": "7"}, [], "--server.gpu-memory-utilization", "7", "1"),
        *(
            ({}, {"server.extra_args": words}, [], "--server.extra-args", words.partition("=")[0], own)
            for words, own in (
                ("--tensor-parallel-size=2", "--server.tensor-parallel-size"),
                ("-tp=2", "--server.tensor-parallel-size"),
                ("--max-model-len=9", "--server.max-model-len"),
                ("--dtype=float16", "--server.dtype"),
                ("--api-key=k", "--server.api-key"),
            )
        ),
        ({}, {"vllm_extra_args": "--dtype=float16"}, [], "--vllm-extra-args", "--dtype", "--server.dtype"),
        (
            {},
            {"vllm_extra_args": "--logits-dtype,model"},
            [],
            "--vllm-extra-args",
            "--logits-dtype",
            "--logits-dtype",
        ),
        ({}, {"api.extra_args": "--api-key,k"}, [], "--api.extra-args", "--api-key", "--rollout-api-key"),
        (
            {},
            {"vllm_dtype": "float16", "server.dtype": "bfloat16"},
            [],
            *("--server.dtype", "bfloat16 and --vllm-dtype float16", "leave one out"),
        ),
        (
            {"server": {"max_model_len": 9}, "trainer": {"max_model_len": 8}},
            {},
            [],
            *("--max-model-len", "8 and --server.max-model-len 9", "leave one out"),
        ),
        (
            {},
            {"lora_r": "8", "lora_rank": "16", "weight_bridge_mode": "lora_only"},
            [],
            *("--lora-rank", "16 and --lora-r 8", "one"),
        ),
        ({"trainer": {"server": {"port": 9001}}}, {}, [], "trainer.server", "", "[server]"),
        ({}, {"env": "gsm9k"}, [], "--env", "gsm9k", ", ".join(BUILT_IN)),
        ({}, {}, ["--envv.group_size", "8"], "--envv.group_size", "", "--env.group_size?"),
        ({}, {}, ["--server.prt", "8"], "--server.prt", "", "--server.port?"),
        ({}, {}, ["--vllm-prt", "8"], "--vllm-prt", "", "--vllm-port?"),
        ({}, {}, ["--zzzzzz", "8"], "--zzzzzz", "", "--help"),
        ({}, {}, ["sums"], "sums", "a word without a flag", "--NAME VALUE"),
    ],
)
def test_a_runs_errors(
    file: dict[str, object], flags: dict[str, object], args: list[str], field: str, got: str, helps: str
) -> None:
    with pytest.raises(ConfigError) as error:
        build_run(file, {"model_name": "m", **flags}, args)
    assert (error.value.field, error.value.got) == (field, got)
    assert helps in f"{error.value.wanted}; {error.value.fix}"


@pytest.mark.parametrize(
    ("args", "written", "meant"),
    [
        (["--env.group_sise", "8"], "env.group_sise", "env.group_size?"),
        (["--openai.modl_name", "8"], "openai.modl_name", "openai.model_name?"),
    ],
)
def test_an_environments_settings_are_checked_before_it_runs(args: list[str], written: str, meant: str) -> None:
    with pytest.raises(ConfigError) as error:
        build_run({}, {"model_name": "m"}, args)
    assert error.value.field.startswith("--env arithmetic")
    assert written in str(error.value) and meant in str(error.value)


@pytest.mark.parametrize(
    ("given", "field", "got", "wanted"),
    [
        ({"save_path": 5}, "--save-path", "5", "path"),
        ({**LORA, "lora_adapter": 5}, "--lora-adapter", "5", "path"),
        ({"server": 5}, "server", "5", "[server]"),
        ({"vllm_port": 9001, "server": {"port": 9002}}, "--server.port", "9002 and --vllm-port 9001", "one value"),
    ],
)
def test_a_wrong_value_is_one_problem_even_where_others_follow_from_it(
    given: dict[str, object], field: str, got: str, wanted: str
) -> None:
    with pytest.raises(ConfigError) as error:
        build(TrainConfig, {"model_name": "m", **given})
    (problem,) = error.value.problems
    assert (problem.field, problem.got) == (field, got) and wanted in problem.wanted


def test_every_wrong_value_is_a_problem_of_its_own() -> None:
    with pytest.raises(ConfigError) as error:
        build(TrainConfig, {"model_name": "m", "lr": 0, "seq_len": 1})
    assert {(problem.field, problem.got) for problem in error.value.problems} == {("--lr", "0"), ("--seq-len", "1")}


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


def test_help_says_defaults_and_what_is_required() -> None:
    """In square brackets they would be markup, and not be seen."""
    command = typer.Typer()

    @command.command()
    @with_options(TrainConfig)
    def train(options: dict[str, object]) -> None: ...

    said = " ".join(CliRunner().invoke(command, ["--help"], env={"COLUMNS": "300"}).output.split())
    assert "(default: 0.999)" in said and "(required)" in said
    (rate,) = re.findall(r"--lr FLOAT (.*?) │", said)
    assert rate.count("default") == 1 and f"{ADAPTER_LR:g}" in rate and f"{ALL_WEIGHTS_LR:g}" in rate


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
    for mine, its in (("server.dtype", "vllm_dtype"), ("vllm_dtype", "server.dtype")):
        table, _, key = its.rpartition(".")
        file = {table or "trainer": {key: "bfloat16"}}
        config = build_run(file, {"model_name": "m", mine: "float16"})
        assert config.server.dtype == config.trainer.server.dtype == "float16", "a flag wins over the file"


def test_a_flag_wins_over_another_name_of_it_in_the_file() -> None:
    config = build_run({"trainer": {"model": "a", "lora_rank": 8}}, {"model_name": "b", **LORA, "lora_r": "16"})
    assert config.trainer.model_name == "b" and dump(config.trainer)["lora_r"] == 16
    dashes = {"server": {"max-model-len": 9}, "api": {"extra-args": ["--fsync"]}, "run-dir": "a"}
    flags = {"server.max_model_len": "8", "api.extra_args": "--memory-mb,9", "run_dir": "b"}
    config = build_run(dashes, {"model_name": "m", **flags})
    assert config.server.max_model_len == 8 and config.api.extra_args == ("--memory-mb", "9")
    assert config.run_dir == Path("b")


LORA = {"weight_bridge_mode": "lora_only"}


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


def test_a_flag_that_is_on_has_one_that_turns_it_off() -> None:
    command, got = typer.Typer(), {}

    @command.command()
    @with_options(TrainConfig)
    def train(options: dict[str, object]) -> None:
        got.update(options)

    CliRunner().invoke(command, ["--no-proof", "--benchmark", "--no-gradient-checkpointing", "--model", "m"])
    assert got == {"proof": False, "benchmark": True, "gradient_checkpointing": False, "model": "m"}
    said = CliRunner().invoke(command, ["--help"], env={"COLUMNS": "80"}).output
    assert "--no-proof)" in said and "--no-gradient-checkpointing)" in said


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


def test_every_bridge_is_explained_in_a_line_and_no_choice_is_cut() -> None:
    said = CliRunner().invoke(app, ["run", "--help-all"], env={"COLUMNS": "100"}).output
    for mode in ("none", "shared_vllm", "lora_only", "lora_restart"):
        assert re.search(rf"(?m)\b{mode}: \w", said), mode
    for choice in ("flash_attention_2", "adamw_8bit", "lora_restart", "tensorboard"):
        assert choice in said


@pytest.mark.parametrize(
    ("arguments", "field", "helps"),
    [
        (["--lerning-rate", "1"], "--lerning-rate", "--learning-rate?"),
        (["--lerning-rate=1"], "--lerning-rate", "--learning-rate?"),
        (["sums"], "sums", "--NAME VALUE"),
    ],
)
@pytest.mark.parametrize("command", ["train", "run"])
def test_every_command_suggests_what_was_meant(command: str, arguments: list[str], field: str, helps: str) -> None:
    done = grpo(command, "--model", "m", *arguments)
    assert done.returncode == 2 and done.stderr.startswith(f"grpo: {field}: ") and helps in done.stderr


def test_help_begins_with_what_most_people_want() -> None:
    said = CliRunner().invoke(app, ["--help"], env={"COLUMNS": "100"}).output
    assert re.search(r"│ run ", said).start() < re.search(r"│ train ", said).start()  # type: ignore[union-attr]


def test_an_unknown_environment_is_named_as_it_was_written() -> None:
    done = grpo("env", "nosuch")
    assert done.returncode == 2 and done.stderr.startswith("grpo: grpo env: ")
    assert "nosuch" in done.stderr and ", ".join(BUILT_IN) in done.stderr


def test_an_environment_is_called_as_it_was_asked_for() -> None:
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
    ("file", "flags", "args", "field"),
    [
        ({}, {"data": "a.jsonl"}, [], "--env dataset: --reward"),
        ({}, {"env": "dataset", "reward": ["my.py:f"]}, [], "--env dataset: --data"),
        ({}, {"env": "arithmetic", "data": "a.jsonl"}, [], "--env arithmetic: --data"),
        ({}, {"reward": ["my.py:f"]}, [], "--env dataset: --data"),
        ({}, {"env": "arithmetic", "reward": ["my.py:f"]}, [], "--env arithmetic: --reward"),
        ({}, {"data": "a.jsonl", "reward": ["my.py"]}, [], "--env dataset: --reward my.py"),
        ({}, {"data": "a.jsonl", "reward": ["a.py:f", "b.py:f"]}, [], "--env dataset: --reward"),
        ({}, {"data": "a.jsonl", "reward": ["a.py:f"]}, ["--data.splt", "x"], "--env dataset: data.splt"),
        ({}, {"data": "a.jsonl", "reward": ["a.py:f"]}, ["--data.held_out", "x"], "--env dataset: --data.held_out"),
        ({"data": 5, "rewards": ["a.py:f"]}, {}, [], "environments.data"),
        ({"data": "a.jsonl", "rewards": "a.py:f"}, {}, [], "rewards"),
        ({"environments": [{}, {}], "data": "a.jsonl"}, {}, [], "--env"),
    ],
)
def test_data_and_rewards_that_do_not_fit_are_named(
    file: dict[str, Any], flags: dict[str, Any], args: list[str], field: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        environment_of(file, flags, args)
    assert field in [problem.field for problem in caught.value.problems]
