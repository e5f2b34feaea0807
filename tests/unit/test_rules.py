"""Combinations of options that are refused: for each rule what triggers it, and what its problem names."""

from __future__ import annotations

import ast
import importlib.util
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from grpo_common.errors import Problem
from grpo_common.sampling import bends, cuts
from grpo_trainer.cli import main
from grpo_trainer.config import rules
from grpo_trainer.config.options import build
from grpo_trainer.config.rules import Case, Hardware, Rule, check
from grpo_trainer.config.run import build_run
from grpo_trainer.config.train import TrainConfig
from grpo_trainer.errors import ConfigError
from tests.unit.test_lora import saved

CPU, ONE_GPU = Hardware(on_gpu=False, gpus=0), Hardware(on_gpu=True, gpus=1)
SHARED = {"weight_bridge_mode": "shared_vllm"}
LORA = {"weight_bridge_mode": "lora_only"}
SENT = {"weight_bridge_mode": "broadcast"}
RESTART = {"weight_bridge_mode": "lora_restart"}
REPLAY = {"routing_replay": "server"}
SHARE_BASE = {**LORA, "share_base": True}
TWO = {"trainer_rank": 0, "world_size": 2, "init_method": "tcp://127.0.0.1:1"}
PAIRS = {**SHARED, **TWO, "vllm_also": "h:9001"}
NONE = {"weight_bridge_mode": "none"}
CLUSTER = {**LORA, "cluster": "auto"}
SHARDS: dict[str, object] = {**SHARED, "server.tensor_parallel_size": 2, "trainer_gpus": 2}
TP = "--server.tensor-parallel-size"
REPLICAS = {**LORA, "server.replicas": "3", "server.gpus": "0;1,2;3"}


@dataclass(frozen=True)
class Row:
    """A rule and a configuration that it refuses for one reason.

    Attributes:
        given: the options of `grpo train`, or of `grpo run` where `run` is set.
        field: of the problem.
        file: tables of the run's file.
    """

    rule: Rule
    given: Mapping[str, Any]
    field: str
    hardware: Hardware | None = None
    run: bool = False
    file: Mapping[str, Any] | None = None


in_train, in_run = Row, partial(Row, run=True)


def groups_of(*sizes: int) -> dict[str, Any]:
    """A file with an environment for each size of groups."""
    named = zip(("arithmetic", "gsm8k"), sizes, strict=False)
    return {"environments": [{"name": name, "env": {"group_size": size}} for name, size in named]}


BATCH = "--batch-size x --gradient-accumulation-steps"
ROWS = [
    in_train(rules.steps, {"warmup_steps": 10}, "--warmup-steps"),
    in_train(rules.steps, {"seq_len": 512, "max_tokens_per_microbatch": 511}, "--max-tokens-per-microbatch"),
    in_train(rules.steps, {**RESTART, "max_staleness": 1, "vllm_restart_interval": 4}, "--max-staleness"),
    in_run(rules.groups, {"batch_size": "3", "gradient_accumulation_steps": "1"}, BATCH),
    in_run(rules.groups, {"batch_size": 14, "gradient_accumulation_steps": 1}, BATCH, file=groups_of(6, 10)),
    # 4 + 4 = 8, but 6 and any number of 4 or 6 is never 8
    in_run(
        *(rules.groups, {"batch_size": 8, "gradient_accumulation_steps": 1}, "--env gsm8k: env.group_size"),
        file=groups_of(4, 6),
    ),
    in_run(rules.groups, {}, "--env.group_size", file=groups_of(1)),
    in_run(rules.servers, {**LORA, "server.port": 65535, "server.replicas": 2}, "--server.port"),
    in_train(rules.loss, {"loss": "sapo", "dual_clip": 3}, "--dual-clip"),
    in_train(rules.loss, {"is_correction": "mask"}, "--is-correction"),
    in_train(rules.loss, {"ref_offload": True}, "--ref-offload"),
    in_train(rules.loss, {**LORA, "kl_beta": 0.1, "ref_offload": True}, "--ref-offload"),
    in_train(rules.loss, {**LORA, "kl_beta": 0.1, "kl_reference": "base"}, "--kl-reference"),
    in_train(rules.loss, {**LORA, "kl_reference": "base"}, "--kl-reference"),
    in_train(rules.routing, {**REPLAY, "compile": "on"}, "--compile"),
    in_train(rules.routing, {**REPLAY, "pipeline_parallel_size": 2}, "--server.pipeline-parallel-size"),
    in_run(rules.quantised_server, {**LORA, "server.quantization": "fp8"}, "--server.quantization", CPU),
    in_train(rules.steps, {"share_prompts": "on", "packing": "off"}, "--share-prompts"),
    in_train(rules.four_bits, {**SHARE_BASE, "load_in_4bit": True}, "--load-in-4bit"),
    in_train(rules.four_bits, {**SHARED, "load_in_4bit": True}, "--load-in-4bit"),
    in_train(rules.four_bits, {"load_in_4bit": True}, "--load-in-4bit"),
    in_train(rules.four_bits, {**LORA, "load_in_4bit": True, "dtype": "float16"}, "--dtype"),
    in_train(rules.shared_weights, {**LORA, "vllm_config_path": "x.json"}, "--vllm-config-path"),
    in_train(rules.shared_weights, {**SHARED, "dtype": "bfloat16", "vllm_dtype": "float32"}, "--server.dtype"),
    in_run(rules.shared_weights, {**SHARED, "server.dtype": "float32"}, "--server.dtype"),
    in_train(rules.shared_weights, {**SHARED, "dtype": "float16"}, "--dtype"),
    in_train(rules.pairs, {**SHARED, "vllm_also": "h:9001"}, "--server.also"),
    in_run(rules.pairs, {**SHARED, "server.replicas": "3", "server.gpus": "0;1;2"}, "--server.replicas"),
    in_train(rules.pairs, {**SHARED, **TWO}, "--server.also"),
    in_run(rules.pairs, {**SHARE_BASE, "trainer_gpus": 2, "server.replicas": 1}, "--server.replicas"),
    in_run(rules.pairs, {**SHARE_BASE, "trainer_gpus": 2, "cluster": "auto"}, "--cluster"),
    in_train(rules.pairs, {**PAIRS, "vllm_config_path": "x.json"}, "--vllm-config-path"),
    in_run(rules.written_server, {**SHARED, "server.pipeline_parallel_size": "2"}, "--server.pipeline-parallel-size"),
    in_run(rules.shards, SHARDS | {"trainer_gpus": 1}, "--trainer-gpus"),
    in_run(rules.shards, SHARDS | {"server.replicas": 2}, "--server.replicas"),
    in_run(rules.shards, {**SHARE_BASE, "server.tensor_parallel_size": 2}, TP),
    in_run(rules.shards, SHARDS | {"cluster": "auto"}, "--cluster"),
    in_run(rules.shards, SHARDS | {"kl_beta": 0.1}, "--kl-beta, --log-kl"),
    in_run(rules.shards, SHARDS | {"distill_coef": 0.1}, "--distill-coef"),
    in_run(rules.shards, SHARDS | {"compile": "on"}, "--compile"),
    in_run(rules.written_server, {**SENT, "data_parallel_size": "2"}, "--server.data-parallel-size"),
    in_run(rules.written_server, {**SENT, "server.quantization": "fp8"}, "--server.quantization"),
    in_run(rules.written_server, {**SHARE_BASE, "server.extra_args": "--enable-sleep-mode"}, "--server.extra-args"),
    in_run(rules.written_server, {**SHARE_BASE, "server.extra_args": "--cpu-offload-gb,4"}, "--server.extra-args"),
    in_run(rules.shared_weights, {**SHARED, "device": "cpu"}, "--device", ONE_GPU),
    in_train(rules.shared_weights, {**SHARED, "device": "cuda:0"}, "--device", CPU),
    in_train(rules.loss, {**SHARED, "updates_per_batch": 2}, "--updates-per-batch"),
    in_train(rules.servers, {**LORA, "vllm_also": "h:9001,h:9001"}, "--server.also"),
    in_train(rules.servers, {**LORA, "vllm_also": "h:9001", "vllm_gpus": "0"}, "--server.gpus"),
    in_train(rules.servers, {**LORA, "vllm_port": 0}, "--server.port"),
    in_train(rules.servers, {**LORA, "server.replicas": 2}, "--server.replicas"),
    in_run(rules.servers, REPLICAS | {"server.gpus": "0;1"}, "--server.gpus"),
    in_run(rules.servers, {**LORA, "server.tensor_parallel_size": 2, "server.gpus": "1,1"}, "--server.gpus", ONE_GPU),
    in_run(rules.servers, {**LORA, "server.replicas": "3"}, "--server.replicas", ONE_GPU),
    in_run(rules.cluster, {**LORA, "cluster_nodes": "2"}, "--cluster-nodes"),
    in_run(rules.cluster, CLUSTER | {"server.gpus": "0"}, "--server.gpus"),
    in_run(rules.cluster, CLUSTER | {"device": "cuda:1"}, "--device"),
    in_run(rules.cluster, {**RESTART, "cluster": "auto"}, "--cluster"),
    in_train(rules.processes, TWO | {"trainer_rank": 2}, "--trainer-rank"),
    in_train(rules.processes, TWO | {"init_method": None}, "--init-method"),
    in_train(rules.processes, {**TWO, **LORA, "sharding": "full"}, "--sharding"),
    in_run(rules.processes, {**NONE, "sharding": "full"}, "--sharding"),
    in_train(rules.processes, {**TWO, "device": "cuda:1"}, "--device"),
    in_train(rules.machine, {"device": "cuda:1"}, "--device", ONE_GPU),
    in_run(rules.machine, {"trainer_gpus": 2}, "--trainer-gpus", ONE_GPU),
    in_train(rules.machine, {**LORA, "lora_transport": "nccl"}, "--lora-transport", CPU),
    in_train(rules.machine, {**SENT, "broadcast_transport": "nccl"}, "--broadcast-transport", CPU),
    in_run(rules.machine, {"server.pipeline_parallel_size": 2}, "--server.pipeline-parallel-size", CPU),
    in_train(rules.packages, {"log_to": "trackio"}, "--log-to", CPU),
    in_train(rules.packages, {**LORA, "load_in_4bit": True}, "--load-in-4bit", CPU),
    in_train(rules.packages, {"attention": "flash_attention_2"}, "--attention", CPU),
]


@pytest.fixture(autouse=True)
def no_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)


def problems_of(row: Row) -> list[Problem]:
    given = {"model_name": "m", **{key: value for key, value in row.given.items() if value is not None}}
    if not row.run:
        return check(build(TrainConfig, given), row.hardware)
    try:
        config = build_run(row.file or {}, given)
    except ConfigError as error:
        return list(error.problems)
    return check(config, row.hardware)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.rule.__name__}-{row.field}")
def test_rules_each_refusal_names_its_option(row: Row, monkeypatch: pytest.MonkeyPatch) -> None:
    if row.rule is rules.packages:
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(rules, "RULES", [row.rule])
    (problem,) = problems_of(row)
    assert problem.field == row.field and problem.got and (problem.wanted or problem.fix)


def test_every_refusal_has_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """All rules except `adapter`, which reads a file and has another test below."""
    tree = ast.parse(Path(rules.__file__).read_text())
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    judged = [functions[rule.__name__] for rule in rules.RULES if rule is not rules.adapter]
    refusals = {node.lineno for rule in judged for node in ast.walk(rule) if isinstance(node, ast.Yield)}
    seen: set[int] = set()

    def watched(rule: Rule) -> Rule:
        def watch(case: Case) -> Iterator[Problem]:
            found: Any = rule(case)
            for problem in found:
                seen.add(found.gi_frame.f_lineno)  # where the rule waits: at its yield
                yield problem

        return watch

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for row in ROWS:
        monkeypatch.setattr(rules, "RULES", [watched(row.rule)])
        problems_of(row)
    assert refusals == seen and len(seen) > len(judged)


@pytest.mark.parametrize(
    "row",
    [
        in_train(rules.processes, {**TWO, "sharding": "full"}, "", ONE_GPU),
        in_run(rules.groups, {"batch_size": 16, "gradient_accumulation_steps": 1}, "", file=groups_of(6, 10)),  # 6 + 10
        # whose groups nobody knows before it runs
        in_run(rules.groups, {"batch_size": 3}, "", file={"environments": [{"name": "my.envs.maze"}]}),
        in_train(rules.loss, {"kl_beta": 0.1, "ref_offload": True}, "", CPU),
        in_train(rules.four_bits, {**LORA, "load_in_4bit": True, "dtype": "bfloat16"}, ""),
        in_train(rules.shared_weights, {**SHARED, "vllm_dtype": "float32"}, ""),
        in_run(rules.shared_weights, {**SHARED, "device": "cpu"}, "", CPU),
        in_run(rules.shared_weights, {"device": "cpu"}, "", ONE_GPU),
        in_run(rules.written_server, {"server.tensor_parallel_size": "2"}, ""),
        in_run(rules.shards, SHARDS, "", CPU),
        in_run(rules.written_server, SHARDS, "", CPU),
        in_run(rules.pairs, SHARDS, "", CPU),
        in_run(rules.written_server, {**SHARED, "server.extra_args": "--seed,7"}, ""),
        in_run(rules.servers, REPLICAS, "", ONE_GPU),
        in_run(rules.servers, {**LORA, "server.replicas": 2}, "", CPU),
        in_run(rules.servers, CLUSTER | {"server.replicas": 2}, "", ONE_GPU),
        in_run(rules.machine, CLUSTER | {"trainer_gpus": 4}, "", ONE_GPU),
        in_run(rules.cluster, CLUSTER | {"cluster_nodes": 4, "trainer_gpus": 2}, ""),
        in_run(rules.machine, {"trainer_gpus": 4, "device": "cuda"}, "", Hardware(on_gpu=True)),
        in_run(rules.machine, {"trainer_gpus": 2}, "", CPU),
    ],
    ids=lambda row: f"{row.rule.__name__}-{'-'.join(map(str, row.given))}",
)
def test_what_goes_together_has_no_problem(row: Row) -> None:
    assert problems_of(row) == []


def test_a_rank_from_torchrun_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "1")
    (problem,) = check(build(TrainConfig, {"model_name": "m"}))
    assert (problem.field, problem.got) == ("--trainer-rank", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "1")
    assert check(build(TrainConfig, {"model_name": "m"})) == []
    assert build_run({}, {"model_name": "m", "sharding": "none"}), "a run counts its own processes"


def test_options_that_contradict_an_adapter_are_all_named(tmp_path: Path) -> None:
    given = {"model_name": "m", **LORA, "lora_adapter": str(saved(tmp_path, lora_alpha=12))}
    other = {"lora_r": 16, "lora_alpha": 3, "lora_rslora": True, "lora_target_modules": "q_proj"}
    found = {each.field: (each.got, each.wanted) for each in check(build(TrainConfig, given | other))}
    assert found == {
        "--lora-r": ("16", "8"),
        "--lora-alpha": ("3.0", "12.0"),
        "--lora-rslora": ("on", "off"),
        "--lora-target-modules": ("q_proj", "q_proj,up_proj"),
    }
    (layers,) = check(build(TrainConfig, given | {"lora_layer_indices": "0"}))
    assert (layers.field, layers.got, layers.wanted) == ("--lora-layer-indices", "0", "all")
    assert check(build(TrainConfig, given | {"lora_r": 8, "lora_target_modules": "up_proj,q_proj"})) == []


def test_an_adapter_of_some_layers_says_which_unless_they_are_given(tmp_path: Path) -> None:
    given = {"model_name": "m", **LORA, "lora_adapter": str(saved(tmp_path, layers_to_transform=[1]))}
    for same in ({}, {"lora_layer_indices": "1"}, {"lora_layer_indices": [1]}):
        assert check(build(TrainConfig, given | same)) == []
    (layers,) = check(build(TrainConfig, given | {"lora_layer_indices": "0-1"}))
    assert (layers.got, layers.wanted) == ("0,1", "1")


# all at once ------------------------------------------------------------------------------------------------


def test_a_runs_mistakes_are_told_together() -> None:
    """Unknown keys and wrong values of all tables first; combinations once these are right."""
    file = {
        "trainr": {},
        "trainer": {"model_name": "m", "lerning_rate": 1, "lr": 0, "seq_len": 1, "in_flight": "keep", "save_path": "x"},
        "server": {"prt": 1, "dtype": "int3"},
        "api": {"port": -1},
        "environments": [{"name": "arithmetic", "env": {"group_sise": 3}, "openai": {"modl_name": "m"}}],
    }
    with pytest.raises(ConfigError) as error:
        build_run(file, {})
    assert {problem.field for problem in error.value.problems} == {
        *("trainr", "lerning_rate", "--lr", "--seq-len", "--in-flight", "--save-path"),
        *("server.prt", "--server.dtype", "--api.port"),
        *("--env arithmetic: env.group_sise", "--env arithmetic: openai.modl_name"),
    }
    with pytest.raises(ConfigError) as together:
        given = {"warmup_steps": 100, "sharding": "full", "kl_beta": 0.1, "dual_clip": 2}
        build_run({}, {"model_name": "m", "weight_bridge_mode": "none", **given})
    assert [each.field for each in together.value.problems] == ["--warmup-steps", "--sharding", "--sharding"]
    with pytest.raises(ConfigError) as unknown:  # rules are asked of what was meant, not of what is left of it
        build_run({}, {"model_name": "m", "warmup_steps": 200}, ["--training-stepss", "9", "--env.group_sise", "4"])
    assert [each.field for each in unknown.value.problems] == ["--training-stepss", "--env arithmetic: env.group_sise"]


def test_the_command_line_tells_them_together(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fields(*arguments: str) -> list[str]:
        monkeypatch.setattr(sys, "argv", ["grpo", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code == 2
        return [line.removeprefix("grpo: ").partition(": ")[0] for line in capsys.readouterr().err.splitlines()]

    unknown = ("--lerning-rate", "1", "--sed=3", "word", "--lr", "0")
    for command in ("train", "run"):
        assert sorted(fields(command, "--model", "m", *unknown)) == ["--lerning-rate", "--lr", "--sed", "word"]
    together = ("--sharding", "full", "--kl-beta", "0.1", "--warmup-steps", "10")
    assert fields("train", "--model", "m", *together) == ["--warmup-steps", "--sharding", "--sharding"]


# sampling ------------------------------------------------------------------------------------------------------------


PLAIN: dict[str, Any] = {
    "temperature": 0.7,
    "max_tokens": 5,
    "stop": ["x"],
    "seed": 3,
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "presence_penalty": 0.0,
    "repetition_penalty": 1,
    "min_tokens": 0,
    "logit_bias": {},
    "bad_words": [],
    "structured_outputs": None,
    "response_format": {"type": "text"},
    "ignore_eos": True,
}


def test_plain_sampling_and_temperature_are_reproduced() -> None:
    assert bends(PLAIN) is None and bends({}) is None and cuts(PLAIN) == {}


@pytest.mark.parametrize(
    ("name", "value", "got"),
    [
        ("temperature", 0, "0"),
        ("temperature", 1e-6, "1e-06"),
        ("top_p", 0.9, "0.9"),
        ("top_k", 5, "5"),
        ("min_p", 0.05, "0.05"),
        ("presence_penalty", 0.5, "0.5"),
        ("frequency_penalty", -0.5, "-0.5"),
        ("repetition_penalty", 1.1, "1.1"),
        ("min_tokens", 4, "4"),
        ("logit_bias", {"3": 1.0}, "{'3': 1.0}"),
        ("bad_words", ["no"], "['no']"),
        ("allowed_token_ids", [1], "[1]"),
        ("structured_outputs", {"json": {}}, "{'json': {}}"),
        ("guided_regex", "a+", "'a+'"),
        ("response_format", {"type": "json_object"}, "{'type': 'json_object'}"),
    ],
)
def test_what_bends_the_distribution_is_refused_by_name(name: str, value: object, got: str) -> None:
    problem = bends(PLAIN | {name: value})
    assert problem is not None and (problem.field, problem.got) == (name, got)
    assert problem.wanted and problem.fix


@pytest.mark.parametrize("value", [None, "0.9", True, [0.5]])
def test_what_is_no_number_leaves_nothing_out(value: object) -> None:
    """Foreign environments may send anything; the server that sampled has read it otherwise."""
    params = {"top_p": value, "top_k": value, "min_p": value}
    assert cuts(params) == {} and bends(params) is None
