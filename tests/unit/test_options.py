"""One definition of each option: flags, TOML, messages, help."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from environments.running.settings_check import BUILT_IN
from grpo_trainer.cli import app
from grpo_trainer.config.options import build, dump, make, merged, options_of, read
from grpo_trainer.config.processes import RunSection
from grpo_trainer.config.rules import SET_BY_THE_RUN
from grpo_trainer.config.run import build_run, read_toml
from grpo_trainer.config.server import Server
from grpo_trainer.config.train import TrainConfig
from grpo_trainer.errors import ConfigError
from tests.processes import ROOT
from tests.unit.factories import refusing

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
    "checkpoint_interval": "10m",  # the only new one: checkpoints by steps cost the more, the shorter a step
}


def of_train(given: Mapping[str, Any]) -> TrainConfig:
    return build(TrainConfig, {key: value for key, value in {"model_name": "m", **given}.items() if value is not None})


def of_file(file: Mapping[str, Any]) -> object:
    return build_run(file, {"model_name": "m"})


def of_flags(flags: Mapping[str, Any]) -> object:
    return build_run({}, {"model_name": "m", **flags})


def of_words(words: str) -> object:
    return CliRunner().invoke(app, words.split(), catch_exceptions=False)


WRONG: list[tuple[Callable[[Any], object], Any, str, str]] = [
    # a value, or a name
    (of_train, {"model_name": None}, "--model-name", "required"),
    (of_train, {"lerning_rate": 1}, "lerning_rate", "learning_rate?"),
    (of_train, {"lr": "fast"}, "--lr", "number"),
    (of_train, {"lr": 0}, "--lr", "greater than 0"),
    (of_train, {**LORA, "lora_r": 24}, "--lora-r", "1, 8, 16, 32, 64, 128, 256, 320, 512; use 32"),
    (of_train, {**LORA, "lora_target_modules": ","}, "--lora-target-modules", "q_proj"),
    (of_train, {"weight_bridge_mode": "lora"}, "--weight-bridge-mode", "'none'"),
    (of_train, {"optimizer": "adamw_cpu"}, "--optimizer", "use adamw_8bit"),
    (of_train, {"checkpoint_interval": "10 minutes"}, "--checkpoint-interval", "10m"),
    (of_train, {"train_layer_indices": "0,3-1"}, "--train-layer-indices", "0-3,28-31"),
    (of_train, {"rollout_url": "localhost:8000"}, "--rollout-url", "http://localhost:8000"),
    (of_train, {"vllm_also": "10.0.0.2"}, "--vllm-also", "HOST:PORT"),
    (of_train, {"vllm_also": "http://10.0.0.2:9001"}, "--vllm-also", "HOST:PORT"),
    (of_train, {"server": 5}, "server", "[server]"),
    # one problem, even where others would follow from it
    (of_train, {"save_path": 5}, "--save-path", "path"),
    (of_train, {**LORA, "lora_adapter": 5}, "--lora-adapter", "path"),
    # two names of one option
    (of_train, {"rollout_url": "http://a:1", "atropos-url": "http://a:2"}, "--atropos-url", "one"),
    (of_train, {"vllm_port": 9001, "server": {"port": 9002}}, "--server.port", "one value"),
    (of_train, {"single_copy": True, "weight_bridge_mode": "none"}, "--weight-bridge-mode", "one value"),
    (of_file, {"server": {"max_model_len": 9}, "trainer": {"max_model_len": 8}}, "--max-model-len", "leave one out"),
    (of_file, {"server": {"port": 9}, "trainer": {"server": {"port": 8}}}, "--server.port", "leave one out"),
    (of_flags, {"vllm_dtype": "float16", "server.dtype": "bfloat16"}, "--server.dtype", "leave one out"),
    (of_flags, {**LORA, "lora_r": "8", "lora_rank": "16"}, "--lora-rank", "one"),
    # what other programs call ours, or what is like nothing
    *(
        (of_words, f"run --model m {word} 1", word, helps)
        for word, helps in {
            **{"--port": "did you mean --api.port or --server.port?", "--max-steps": "--training-steps?"},
            **{
                "--output-dir": "--run-dir?",
                "--sever.port": "--server.port?",
                "--num-iterations": "--updates-per-batch?",
            },
            **dict.fromkeys(("--iterations-per-step", "--sync-ref-model", "--bf16", "--length"), "--help lists them"),
        }.items()
    ),
    *((of_file, {"trainer": {name: 8}}, name, "--env.") for name in ("group_size", "num_generation", "temprature")),
    # an option of another mode
    (of_train, {"lora_r": 8}, "--lora-r", "--weight-bridge-mode lora_only, lora_restart"),
    (of_train, {**LORA, "train_layer_indices": "1"}, "--train-layer-indices", "--weight-bridge-mode none, shared_vllm"),
    # tables of a file
    (of_file, {"trainr": {}}, "trainr", "trainer?"),
    (of_file, {"server": {"prt": 1}}, "server.prt", "server.port?"),
    (of_file, {"trainer": 3}, "trainer", "[trainer]"),
    (of_file, {"environments": [{"nam": "x"}]}, "environments.nam", "environments.name?"),
    (of_file, {"environments": 3}, "environments", "[[environments]]"),
    (of_file, {"environments": [{}, {}], "data": "a.jsonl"}, "--env", ""),
    (of_file, {"environments": [{"env": 3}]}, "environments.env", "table"),
    (of_file, {"environments": [{"name": 3}]}, "environments.name", "text"),
    (of_file, {"data": 5, "rewards": ["a.py:f"]}, "environments.data", ""),
    (of_file, {"data": "a.jsonl", "rewards": "a.py:f"}, "rewards", ""),
    # what the run says of its server, and environments
    (of_flags, {"vllm_host": "h"}, "--vllm-host", "--server.port"),
    (of_flags, {"trainer_rank": "1"}, "--trainer-rank", "--trainer-gpus"),
    (of_flags, {"world_size": "1"}, "--world-size", "--trainer-gpus"),
    (of_flags, {"init_method": "1"}, "--init-method", "--trainer-gpus"),
    (of_flags, {"vllm_also": "h:1"}, "--vllm-also", "--server.replicas"),
    (of_flags, {"server.roster": "/r"}, "--server.roster", "--run-dir"),
    (of_flags, {"server.gpu_memory_utilization": "7"}, "--server.gpu-memory-utilization", "1"),
    (of_flags, {"server.extra_args": "--tensor-parallel-size=2"}, "--server.extra-args", "tensor-parallel-size"),
    (of_flags, {"server.extra_args": "-tp=2"}, "--server.extra-args", "--server.tensor-parallel-size"),
    (of_flags, {"server.extra_args": "--api-key=k"}, "--server.extra-args", "--server.api-key"),
    (of_flags, {"vllm_extra_args": "--dtype=float16"}, "--vllm-extra-args", "--server.dtype"),
    (of_flags, {"vllm_extra_args": "--logits-dtype,model"}, "--vllm-extra-args", "--logits-dtype"),
    (of_flags, {"api.extra_args": "--api-key,k"}, "--api.extra-args", "--rollout-api-key"),
    # data and rewards that do not fit
    (of_flags, {"data": "a.jsonl"}, "--env dataset: --reward", ""),
    (of_flags, {"env": "dataset", "reward": ["my.py:f"]}, "--env dataset: --data", ""),
    (of_flags, {"env": "arithmetic", "data": "a.jsonl"}, "--env arithmetic: --data", ""),
    (of_flags, {"reward": ["my.py:f"]}, "--env dataset: --data", ""),
    (of_flags, {"env": "arithmetic", "reward": ["my.py:f"]}, "--env arithmetic: --reward", ""),
    (of_flags, {"data": "a.jsonl", "reward": ["a.py:f", "b.py:f"]}, "--env dataset: --reward", ""),
    (of_file, {"data": "a", "rewards": [{"functoin": "math"}]}, "--env dataset: rewards.0.functoin", " function?"),
    # words of a command line
    (of_words, "run --model m --larning-rate 1", "--larning-rate", "--learning-rate?"),
    (of_words, "run --model m --vllm-prt 8", "--vllm-prt", "--vllm-port?"),
    (of_words, "run --model m sums", "sums", "--NAME VALUE"),
    (of_words, "run --model m --lr", "--lr", "value"),
    (of_words, "run --model m --env.group_size", "--env.group_size", "value"),
    (of_words, "run --model m --envv.group_size 8", "--envv.group_size", "--env.group_size?"),
    (of_words, "run --model m --openai.modl_name 8", "--env arithmetic: openai.modl_name", "openai.model_name?"),
    (of_words, "run --model m --data a --reward math --data.splt x", "--env dataset: data.splt", ""),
    (of_words, "run --model m --data a --reward math --data.held_out x", "--env dataset: --data.held_out", ""),
    (of_words, "run --model m --config none.toml", "--config", "TOML file"),
    (of_words, "env nosuch", "grpo env", ", ".join(BUILT_IN)),
    (of_words, "train", "--model-name", "`grpo run`"),
    (of_words, "train --model m --temperatur 1", "--temperatur", "--env.temperature"),
]


@pytest.mark.parametrize(("kind", "wrong", "field", "helps"), WRONG)
def test_options_refusal_names_the_option_and_what_helps(
    kind: Callable[[Any], object], wrong: Any, field: str, helps: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as error:
        kind(wrong)
    (problem,) = error.value.problems
    assert problem.field == field and helps in f"{problem.wanted}; {problem.fix}"


def test_a_toml_file_with_an_error_names_the_place(tmp_path: Path) -> None:
    (path := tmp_path / "run.toml").write_text("model_name = \n")
    with pytest.raises(ConfigError, match="line 1") as error:
        read_toml(path)
    assert error.value.field == f"--config {path}"


# names and values -------------------------------------------------------------------------------------------


def test_names_and_defaults_are_the_predecessors() -> None:
    values = dump(of_train({}))
    assert {key: values[key] for key in PREDECESSOR_DEFAULTS} == PREDECESSOR_DEFAULTS
    assert values["server"]["port"] == 9001
    lora = dump(of_train(LORA))
    assert (lora["lora_r"], lora["lora_alpha"]) == (16, 32.0)
    flags = {flag for each in options_of(TrainConfig) for flag in (*each.flags, *each.former)}
    assert flags >= {
        *("--model-name", "--model", "--vllm-config-path", "--lora-dropout", "--lora-target-modules", "--dtype"),
        *("--device", "--max-model-len", "--gpu-memory-utilization", "--atropos-url", "--rollout-url", "--log-dir"),
        *("--wandb-project", "--wandb-group", "--lora-r", "--lora-alpha", "--weight-bridge-mode", "--vllm-port"),
    }


def test_options_of_adapters(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    for rank in "012":
        monkeypatch.setenv("RANK", rank)
        assert of_train({**LORA, "lora_dropout": "0.05"}).lora_dropout == 0
    assert [each.levelname for each in caplog.records] == ["WARNING"] and "--lora-dropout: got 0.05" in caplog.text
    monkeypatch.delenv("RANK")

    by_trainer = {"ratio_against": "trainer"}
    cases = {"none": {}, "truncate": by_trainer, "mask": by_trainer | {"is_correction": "mask"}}
    assert {name: of_train(given).correction for name, given in cases.items()} == {name: name for name in cases}


def test_options_names_and_forms(monkeypatch: pytest.MonkeyPatch) -> None:
    single = of_train({"single-copy": True, "train-layer-indices": "21,20"})
    assert single.weight_bridge_mode == "shared_vllm" and single.layer_indices == (20, 21)
    assert build(TrainConfig, dump(single)) == single
    one = build(TrainConfig, {"model": "m", "training-steps": 5, "rollout-url": "http://a:1/"})
    two = build(TrainConfig, {"model_name": "m", "training_steps": "5", "atropos_url": "http://a:1"})
    assert one == two

    table = {"model_name": "m", **LORA, "lora_r": 8, "server": {"port": 9123}}
    assert build_run(table, {}).trainer == build_run({"trainer": table}, {}).trainer

    monkeypatch.setenv("HOME", "/home/me")
    config = build_run({"run_dir": "~/runs/a", "trainer": {"model_name": "~/m"}}, {"api.store": "~/queue"})
    found = [str(config.run_dir), config.trainer.model_name, str(config.store)]
    assert found == ["/home/me/runs/a", "/home/me/m", "/home/me/queue"]


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


@pytest.mark.parametrize(
    ("variable", "table", "key"), [("VLLM_API_KEY", "server", "api_key"), ("ROLLOUT_API_KEY", "", "rollout_api_key")]
)
def test_keys_of_the_environment(monkeypatch: pytest.MonkeyPatch, variable: str, table: str, key: str) -> None:
    monkeypatch.setenv(variable, "secret")

    def dumped(given: dict[str, Any], *, only_set: bool = False) -> dict[str, Any]:
        values = dump(of_train(given), only_set=only_set)
        return values.get(table, {}) if table else values

    assert dumped({})[key] == "secret"
    assert key not in dumped({}, only_set=True), "what inherits it needs no file"
    assert dumped({table: {key: "given"}} if table else {key: "given"})[key] == "given"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("--seed,7", ("--seed", "7")),
        ('--x={"level":3,"y":[1,2]},--seed,7', ('--x={"level":3,"y":[1,2]}', "--seed", "7")),
        ('--a={"b":"}, \\","c":1}', ('--a={"b":"}, \\","c":1}',)),
        ("", ()),
    ],
)
def test_arguments_are_cut_at_commas_but_json_is_not(text: str, words: tuple[str, ...]) -> None:
    assert build(Server, {"extra_args": text}).extra_args == words


@pytest.mark.parametrize(
    ("value", "numbers", "wrong"),
    [
        *(("0-3,28-31", (0, 1, 2, 3, 28, 29, 30, 31), ""), ("5", (5,), ""), (" 7, 1-2 ,2", (1, 2, 7), "")),
        *(("3-3", (3,), ""), ("", (), "nothing"), ("1,,2", (), "nothing"), ("0,a", (), "a"), ("3-", (), "3-")),
        *(("-3", (), "-3"), ("4-2", (), "4-2"), ("1.5", (), "1.5"), ("0-99999", (), "0-99999")),
        # in a list, as in a text
        *(([3, 1, 1], (1, 3), ""), (["0-2", 5], (0, 1, 2, 5), ""), ([], (), "nothing")),
        *(([-1], (), "-1"), ([True], (), "True"), ([1.0], (), "1.0"), ([10_000], (), "10000")),
    ],
)
def test_numbers_and_ranges(value: str | list[Any], numbers: tuple[int, ...], wrong: str) -> None:
    given = {**LORA, "lora_layer_indices": value}
    if not wrong:
        assert of_train(given).lora_layer_indices == numbers
        return
    with refusing(ConfigError, "--lora-layer-indices", got=wrong, words=["0-3,28-31"]):
        of_train(given)


# flags together with a file ---------------------------------------------------------------------------------


def test_flags_win_over_the_file_under_any_name(tmp_path: Path) -> None:
    config = build_run(
        {
            "trainer": {"model": "a", "lr": 1e-3, "weight-bridge-mode": "lora_only", "lora_rank": 8},
            "server": {"port": 1, "max-model-len": 9, "dtype": "bfloat16"},
            "api": {"extra-args": ["--fsync"]},
            "run-dir": "a",
        },
        {
            **{"lr": "1e-4", "model_name": "m", "lora_r": "16", "server.port": "0", "max_model_len": "8"},
            **{"vllm_dtype": "float16", "api.extra_args": "--max-body-mb,9", "run_dir": str(tmp_path)},
        },
        ["--env.group_size", "4", "--openai.api_key=k"],
    )
    trainer, server = config.trainer, config.server
    assert (trainer.lr, trainer.model_name, trainer.weight_bridge_mode) == (1e-4, "m", "lora_only")
    assert (trainer.lora_r, trainer.served_len) == (16, 8) and trainer.server == server
    assert (server.port, server.max_model_len, server.dtype) == (0, 8, "float16")
    assert config.run_dir == tmp_path and config.api.extra_args == ("--max-body-mb", "9")
    (environment,) = config.environments
    assert environment.env == {"group_size": "4"} and environment.openai == {"api_key": "k"}


OF_A_MODE = {"model-name": "m", "weight_bridge_mode": "lora_only", "lora-rank": 8, "lora_alpha": 32.0, "lr": 1e-3}
SHARED = {"weight-bridge-mode": "shared_vllm", "in_flight": "abort"}


def over(file: Mapping[str, Any], by: Mapping[str, Any]) -> TrainConfig:
    """What `grpo train` makes of a file and flags."""
    layers = [read(TrainConfig, [], table) for table in ({"model": "m", **file}, by)]
    return make(TrainConfig, merged(TrainConfig, *layers))


@pytest.mark.parametrize(
    ("file", "by", "mode", "left_out"),
    [
        (OF_A_MODE, {"weight_bridge_mode": "none"}, "none", "--lora-rank, --lora-alpha"),
        (OF_A_MODE, {"single_copy": True}, "shared_vllm", "--lora-rank, --lora-alpha"),
        (OF_A_MODE | {"lora_keep_versions": 4}, {"weight_bridge_mode": "lora_restart"}, "", "--lora-keep-versions"),
        (OF_A_MODE, LORA, "lora_only", ""),
        (OF_A_MODE, {"single_copy": False}, "lora_only", ""),
        ({"single_copy": True}, {}, "shared_vllm", ""),
        ({"single_copy": True}, LORA, "lora_only", ""),
        (SHARED, LORA, "lora_only", "--in-flight"),
    ],
)
def test_another_mode_takes_the_files_options_of_its_own_along(
    file: dict[str, Any], by: dict[str, Any], mode: str, left_out: str, caplog: pytest.LogCaptureFixture
) -> None:
    file = {key: value for key, value in file.items() if key != "model-name"}
    config = over(file, by)
    assert config.weight_bridge_mode == (mode or "lora_restart") and config.lr == file.get("lr", config.lr)
    said = [record.args[2] for record in caplog.records if isinstance(record.args, tuple)]
    assert said == ([left_out] if left_out else [])


@pytest.mark.parametrize(
    ("file", "by", "field"),
    [
        ({"weight_bridge_mode": "none", "lora_r": 8}, {}, "--lora-r"),
        (LORA, {"weight_bridge_mode": "none", "lora_r": 4}, "--lora-r"),  # given for this very mode
        ({**LORA, "vllm_restart_interval": 5}, LORA, "--vllm-restart-interval"),
        ({**LORA, "vllm_restart_interval": 5}, {"weight_bridge_mode": "shared_vllm"}, "--vllm-restart-interval"),
        (LORA, {"weight_bridge_mode": "nine"}, "--weight-bridge-mode"),
    ],
)
def test_what_is_wrong_by_itself_stays_an_error(file: dict[str, Any], by: dict[str, Any], field: str) -> None:
    with refusing(ConfigError, field):
        over(file, by)


@pytest.mark.parametrize("mode", ["none", "shared_vllm", "lora_restart", "lora_only"])
def test_the_quickstarts_file_serves_every_mode(mode: str) -> None:
    file = read_toml(ROOT / "configs" / "quickstart.toml")
    assert build_run(file, {"model_name": "m", "weight_bridge_mode": mode}, []).trainer.weight_bridge_mode == mode


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
    over = environment_of(file, {"data": "b.jsonl", "reward": ["my.py:g"]})  # flags win
    assert over["data"] == {**file["data"], "path": "b.jsonl"} and over["rewards"] == ("my.py:g",)
    own = {"env": "tests.integration.odd_environment", "data": "rows.jsonl"}
    assert environment_of({}, own)["data"] == {"path": "rows.jsonl"}


# the command line and its help ------------------------------------------------------------------------------


def said(*words: str, program: typer.Typer = app, columns: int = 80) -> list[str]:
    done = CliRunner().invoke(program, list(words), env={"COLUMNS": str(columns)})
    assert done.exit_code == 0
    return done.output.splitlines()


def rows_of(lines: Sequence[str]) -> set[str]:
    """The flags that have a row, or stand in one as a second name."""
    rows = [re.match(r"  (--[\w.-]+(?:, --[\w.-]+)*)", line) for line in lines]
    return {flag for row in rows if row for flag in row[1].split(", ")}


def test_flags_of_every_kind_and_of_other_programs_reach_the_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    configs: list[Any] = []
    monkeypatch.setattr("grpo_trainer.run.run", lambda config, _: configs.append(config))
    of_words(
        "run --model m --no-proof --use-wandb --no-gradient-checkpointing --lora_rank=8 --server.extra-args --seed,7 "
        "--api.port 0 --no-try --learning_rate=3e-4 --beta 0.04 --eval_steps 5 --prompts_per_step 5 --log_kl "
        "--server.max_model_len 99 --num-generations 4 --temperature=0.7 --max-completion-length 64 "
        "--mask_truncated_completions=true --env.seed=2 --reward_funcs math --dataset_name=rows.jsonl"
    )
    (config,) = configs
    trainer, (environment,) = config.trainer, config.environments
    assert (trainer.proof, trainer.use_wandb, trainer.gradient_checkpointing) == (False, True, False)
    assert (trainer.lora_r, trainer.lr, trainer.kl_beta, trainer.eval_every, trainer.log_kl) == (8, 3e-4, 0.04, 5, True)
    assert (config.server.extra_args, config.server.max_model_len) == (("--seed", "7"), 99) and config.api.port == 0
    assert not config.options.try_environments and config.options.prompts_per_step == 5
    answers = {"group_size": "4", "temperature": "0.7", "max_tokens": "64", "mask_truncated": "true"}
    assert environment.env == {**answers, "seed": "2"}
    assert (environment.rewards, environment.data) == (("math",), {"path": "rows.jsonl"})


@pytest.mark.parametrize("command", ["run", "train", "doctor"])
def test_help_is_one_screen_with_what_matters_first(command: str) -> None:
    lines = said(command, "--help")
    assert len(lines) <= 60 and max(map(len, lines)) <= 80
    rows = [line.split()[0].rstrip(",") for line in lines if line.startswith("  --")]
    assert 15 <= len(rows) <= 23 and {"--model-name", "--lr", "--weight-bridge-mode"} <= set(rows)
    assert "--lora-alpha" not in rows and "--help-all" in " ".join(lines)
    assert any(line.startswith("  --model-name, --model TEXT ") for line in lines)
    if command != "train":
        of_answers = {"--env.group_size", "--env.max_tokens", "--env.temperature", "--prompts-per-step"}
        assert of_answers | {"--kl-beta", "--eval-every", "--log-samples", "--resume"} <= set(rows)
    meanings = {line.split()[0] for line in lines if line.startswith(" " * 36)}
    assert {"none:", "shared_vllm:", "lora_only:", "lora_restart:"} <= meanings


def test_all_of_them_have_a_row_with_their_whole_name() -> None:
    assert {flag for option in options_of(TrainConfig) for flag in option.flags} <= rows_of(said("train", "--help-all"))
    for command in ("run", "doctor"):  # but for what a run refuses
        lines = said(command, "--help-all", columns=200)
        taken = {flag for each in options_of(RunSection) if each.key not in SET_BY_THE_RUN for flag in each.flags}
        assert taken | {"--env", "--config", "--data"} <= rows_of(lines)
        assert not rows_of(lines) & {f"--{key.replace('_', '-')}" for key in SET_BY_THE_RUN}
        bridge = [line for line in lines if "--weight-bridge-mode" in line or "--proof" in line]
        assert "--weight-bridge-mode" in bridge[0], "it comes first in its group"


def test_a_shell_completes_the_flags() -> None:
    environment = {"_GRPO_COMPLETE": "complete_bash", "COMP_WORDS": "grpo run --lora-k", "COMP_CWORD": "2"}
    done = CliRunner().invoke(app, [], prog_name="grpo", env=environment)
    assert done.output.split() == ["--lora-keep-versions"]


def test_version_is_that_of_the_package_and_of_the_changelog() -> None:
    assert said("--version") == ["grpo 0.1.0"]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    released = re.findall(r"^## v(\S+) \(\d{4}-\d\d-\d\d\)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert project["version"] == released[0] == "0.1.0"


def test_an_unknown_command_of_an_environment_is_named_as_it_was_written() -> None:
    words = ("env", "arithmetic", "nothing")
    command = [sys.executable, "-m", "grpo_trainer", *words]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False, timeout=250)
    assert done.returncode == 2 and done.stderr.startswith(f"grpo {' '.join(words[:2])}: COMMAND: ")
    (line,) = done.stderr.splitlines()
    assert all(part in line for part in (repr(words[2]), "serve", "process", "evaluate"))
