"""What `grpo run` chooses where nothing is said, and what its start says."""

from __future__ import annotations

import logging
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from grpo_trainer.bench.models import SHAPES
from grpo_trainer.config.options import build
from grpo_trainer.config.processes import RunConfig
from grpo_trainer.config.run import build_run
from grpo_trainer.config.train import TrainConfig
from grpo_trainer.doctor.before_start import warn_of_memory
from grpo_trainer.errors import ConfigError
from grpo_trainer.machine import Gpu, Machine
from grpo_trainer.memory import SERVER_WORKSPACE, Setup
from grpo_trainer.model.shape import ModelShape
from grpo_trainer.run_defaults import chosen, described, planned_cache, with_room
from tests.unit.factories import refusing
from tests.unit.test_doctor import CONFIG, GIB, MACHINE, MODULES, run_of, write_model
from vllm_server.protocol import SPARE_ADAPTERS

GB = 10**9
CPU = Machine(python="3.12", memory=24 * GB)
TINY = ModelShape(64, 128, layers=2, heads=4, kv_heads=4, head_dim=16, vocab=1000, tied=True, positions=128)
SMALL = ModelShape(576, 1536, layers=30, heads=9, kv_heads=3, head_dim=64, vocab=49_152, tied=True, positions=8192)
LARGE = ModelShape(3584, 18_944, layers=28, heads=28, kv_heads=4, head_dim=128, vocab=152_064, tied=False)
"""Of 0.08M, 135M and 7.6B parameters."""


def gpu(size: int) -> Machine:
    return Machine(python="3.12", memory=200 * GB, gpus=(Gpu("GPU", "u", size * GB, size * GB),))


def made(
    flags: dict[str, Any] | None = None, file: dict[str, Any] | None = None, words: tuple[str, ...] = ()
) -> RunConfig:
    return build_run(file or {}, {"model_name": "m", **(flags or {})}, words)


# bridge -----------------------------------------------------------------------------------------------------


def test_a_run_trains_an_adapter_and_grpo_train_all_weights() -> None:
    assert made().trainer.weight_bridge_mode == "lora_only" and made().trainer.training_steps == 100
    train = build(TrainConfig, {"model_name": "m"})
    assert train.weight_bridge_mode == "none" and train.training_steps == 10
    assert made({"single_copy": True}).trainer.weight_bridge_mode == "shared_vllm"
    assert made(file={"trainer": {"single-copy": True}}).trainer.weight_bridge_mode == "shared_vllm"


@pytest.mark.parametrize(
    ("file", "flags", "warned"),
    [
        ({"trainer": {"lr": 1e-4}}, {}, True),
        ({"trainer": {"weight-bridge-mode": "none"}}, {}, False),
        ({"trainer": {"lr": 1e-4}}, {"weight_bridge_mode": "none"}, False),
        ({}, {}, False),
    ],
)
def test_a_file_without_a_mode_says_what_changed(
    file: dict[str, Any], flags: dict[str, Any], warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        made(flags, file)
    assert [record.args for record in caplog.records] == ([("lora_only",)] if warned else [])


# prompts and answers ----------------------------------------------------------------------------------------


def of_groups(*sizes: int) -> dict[str, Any]:
    return {"environments": [{"env": {"group_size": size}} for size in sizes]}


@pytest.mark.parametrize(
    ("file", "flags", "sequences", "size", "prompts"),
    [
        # 32 prompts x 8 answers, of which 16384 / 2048 = 8 are in a microbatch
        ({}, {}, 256, 8, 32),
        # 32 x 4 = 128, of which 16384 / 64 = 256 would fit
        (of_groups(4), {"seq_len": 64}, 128, 128, 32),
        (of_groups(4, 16), {}, 32 * 16, 8, 32),  # of two environments the larger group counts
        ({}, {"prompts_per_step": 12, "seq_len": 1024}, 96, 16, 12),
        ({}, {"prompts_per_step": 12, "batch_size": 4}, 96, 4, 12),
        ({}, {"max_tokens_per_microbatch": 4096}, 256, 2, 32),
        # the older names
        ({}, {"batch_size": 8}, 256, 8, None),
        ({}, {"gradient_accumulation_steps": 4}, 8, 2, None),
        # a flag wins over a file's other name
        ({"trainer": {"batch_size": 512, "gradient_accumulation_steps": 1}}, {"prompts_per_step": 4}, 32, 8, 4),
        ({"trainer": {"prompts-per-step": 4}}, {}, 32, 8, 4),
        ({"prompts_per_step": 4}, {"gradient_accumulation_steps": 16}, 32, 2, None),
        ({"prompts_per_step": 4}, {"batch_size": 16}, 32, 16, 4),
    ],
)
def test_the_batch_is_computed_from_prompts_and_answers(
    file: dict[str, Any], flags: dict[str, Any], sequences: int, size: int, prompts: int | None
) -> None:
    config = made(flags, file)
    assert (config.trainer.sequences_per_step, config.trainer.batch_size) == (sequences, size)
    assert config.options.prompts_per_step == prompts


@pytest.mark.parametrize(
    ("flags", "got"),
    [
        ({"gradient_accumulation_steps": 4}, "3 and --gradient-accumulation-steps 4"),
        ({"batch_size": 7}, "3 x 8 answers in microbatches of 7"),
    ],
)
def test_two_sizes_of_a_step_are_refused(flags: dict[str, Any], got: str) -> None:
    with refusing(ConfigError, "--prompts-per-step", got=got):
        made({"prompts_per_step": 3, **flags})


# model and machine ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "mode", "rate"),
    [
        *((TINY, mode, 5e-4) for mode in ("lora_only", "lora_restart")),
        *((TINY, mode, 1e-4) for mode in ("none", "shared_vllm", "broadcast")),
        (SMALL, "lora_only", 3e-4),
        (SMALL, "none", 3e-5),
        (LARGE, "lora_only", 1e-5),
        (LARGE, "none", 1e-6),
        (None, "lora_only", 1e-5),
    ],
)
def test_the_learning_rate_suits_bridge_and_size(shape: ModelShape | None, mode: str, rate: float) -> None:
    config = made({"weight_bridge_mode": mode})
    assert chosen(config, CPU, shape).trainer.lr == rate
    assert chosen(made({"weight_bridge_mode": mode, "lr": 7e-5}), CPU, shape).trainer.lr == 7e-5


def test_defaults_sequence_length() -> None:
    def length(*words: str, **flags: Any) -> int:
        return made(flags, words=words).trainer.seq_len

    assert length("--env.max_tokens", "4096") == 4096 + 1024 and length("--env.max_tokens", "256") == 2048
    assert length("--env.max_tokens", "4096", seq_len=4200) == 4200
    assert chosen(made(words=("--env.max_tokens", "9000")), CPU, SMALL).trainer.seq_len == 8192

    assert chosen(made(), CPU, TINY).trainer.seq_len == 128
    assert chosen(made(), CPU, SMALL).trainer.seq_len == 2048
    assert chosen(made({"seq_len": 256}), CPU, TINY).trainer.seq_len == 256, "doctor refuses it"


def test_microbatches_are_as_large_as_memory_allows() -> None:
    def tokens(size: int, **flags: Any) -> int | None:
        return chosen(made(flags), gpu(size), LARGE).trainer.max_tokens_per_microbatch

    assert tokens(80) == 16_384
    smaller = tokens(44)
    assert smaller is not None and 2048 <= smaller < 16_384
    assert tokens(10) == 2048, "nothing fits"
    assert tokens(80, batch_size=4) is None and tokens(80, max_tokens_per_microbatch=4096) == 4096


def test_microbatches_are_chosen_by_the_plan_that_the_start_shows() -> None:
    def tokens(machine: Machine, **flags: Any) -> int:
        config = chosen(made(flags), machine, SMALL)
        limit = config.trainer.max_tokens_per_microbatch
        text = described(made(flags), config, machine, SMALL)[-1]
        assert limit is not None and ("memory planned" in text) == (machine in (roomy, tight) and not flags)
        return limit

    roomy, tight = replace(CPU, memory=200 * GB), replace(CPU, memory=8 * GB)
    assert tokens(roomy) == 16_384 and 2048 <= tokens(tight) < 16_384
    assert Setup.of(chosen(made(), CPU, SMALL), SMALL, CPU).plan().fits
    assert tokens(roomy, cluster="auto") == 2048 and tokens(roomy, cluster="auto", seq_len=4096) == 4096
    part_of_a_gpu = replace(roomy, version={"vllm": "0.32.0"}.get)
    assert tokens(part_of_a_gpu) == 2048, "nothing is known of it"
    assert tokens(gpu(80), **{"server.gpus": "GPU-1"}) == 2048


def test_start_says_lengths_of_answers_rank_and_evaluations() -> None:
    def numbers(given: RunConfig) -> set[str]:
        return {*re.findall(r"\d+", described(given, chosen(given, CPU, SMALL), CPU, SMALL)[-1])}

    given = made({"eval_every": 11, "lora_r": 64, "lora_alpha": 55}, words=("--env.max_tokens", "77"))
    assert {"11", "64", "55", "77"} <= numbers(given) and not {"11", "64", "55", "77"} & numbers(made())


# the size of the server's key-value cache, where the memory plan is to fix it -------------------------------


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model")


def test_it_is_what_the_servers_share_leaves(model: Path) -> None:
    # Embedding (96 x 64), tied; q and o 64 x 64, k and v 32 x 64, three of 128 x 64; biases 64 + 2 x 32; 3 norms of 64.
    weights = 2 * (96 * 64 + 2 * 64 * 64 + 2 * 32 * 64 + 3 * 128 * 64 + 128 + 3 * 64)
    share = int(0.5 * 141 * GIB)
    flags: dict[str, Any] = {"server.gpu_memory_utilization": "0.5"}
    assert planned_cache(run_of(model, weight_bridge_mode="shared_vllm", **flags), MACHINE) == (
        share - weights - SERVER_WORKSPACE
    )
    # r x (in + out) for q 128, k and v 96 each, o 128, gate, up and down 192 each
    adapter = 2 * 8 * (128 + 96 + 96 + 128 + 3 * 192)
    targets = "q_proj,k_proj,v_proj,o_proj,gate_proj,up_proj,down_proj"
    config = run_of(model, **flags, lora_r="8", lora_target_modules=targets, lora_keep_versions="3")
    assert planned_cache(config, MACHINE) == share - weights - SERVER_WORKSPACE - (3 + SPARE_ADAPTERS) * adapter


def test_planned_cache_of_several_or_none(model: Path) -> None:
    two = replace(MACHINE, gpus=MACHINE.gpus[:1] * 2)
    alone = planned_cache(run_of(model, weight_bridge_mode="shared_vllm"), two)
    assert planned_cache(run_of(model, weight_bridge_mode="shared_vllm", trainer_gpus="2"), two) == alone
    assert planned_cache(run_of(model, trainer_gpus="2"), two) == planned_cache(run_of(model), two)

    assert planned_cache(run_of(model), replace(MACHINE, gpus=())) is None


@pytest.mark.parametrize(
    "flags",
    [
        {"weight_bridge_mode": "none"},
        {"weight_bridge_mode": "lora_restart"},
        {"server.extra_args": "--kv-cache-memory-bytes,1000000"},
        {"server.extra_args": "--kv_cache_memory_bytes=1000000"},
        {"server.quantization": "fp8"},
        {"server.kv_cache_dtype": "fp8"},
        {"server.gpu_memory_utilization": "0.01"},  # it would not fit: vLLM says so better
    ],
    ids=lambda flags: " ".join(f"{flag} {value}" for flag, value in flags.items()),
)
def test_vllm_measures_where_the_plan_is_not_needed_or_does_not_hold(model: Path, flags: dict[str, Any]) -> None:
    assert planned_cache(run_of(model), MACHINE) is not None
    assert planned_cache(run_of(model, **flags), MACHINE) is None


def test_vllm_measures_for_models_that_the_plan_does_not_know(tmp_path: Path) -> None:
    quantised = write_model(tmp_path / "a", CONFIG | {"quantization_config": {"quant_method": "fp8"}})
    more = write_model(tmp_path / "b", modules=MODULES | {"mlp.shared_expert": (128, 64)})
    unknown = write_model(tmp_path / "c", {"architectures": ["MambaForCausalLM"], "model_type": "mamba"})
    (tmp_path / "d").mkdir()
    for folder in (quantised, more, unknown, tmp_path / "d", "nobody/nothing-here"):
        assert planned_cache(run_of(folder), MACHINE) is None


H200 = Gpu("H200", "GPU-a", 150_750_000_000, 150_000_000_000)


def shared_run(**flags: Any) -> RunConfig:
    """All weights of a 7B or 32B shape, in passes of 8,192 tokens."""
    given = {"max_tokens_per_microbatch": "8192", "seq_len": "1280", **flags}
    return run_of("a/model", weight_bridge_mode="shared_vllm", **given)


def share_of(config: RunConfig, shape: str = "7b", gpus: int = 1) -> float:
    found = with_room(config, replace(MACHINE, gpus=(H200,) * gpus), SHAPES[shape])
    assert found.server.gpu_memory_utilization == found.trainer.server.gpu_memory_utilization
    return found.server.gpu_memory_utilization


def test_the_servers_share_leaves_a_trainer_of_all_weights_room() -> None:
    # 7.6e9 parameters: gradients 15.2 GB, states in fp32 60.9, and activations of 5.5: with 0.45 of 150.75 GB for the
    # server that is 151 GB. With 8-bit states, 15.5 GB, it fits.
    assert share_of(shared_run()) == 0.35
    assert share_of(shared_run(optimizer="adamw_8bit")) == share_of(shared_run(), "1.5b") == 0.45
    halves: dict[str, Any] = {"trainer_gpus": "2", "server.tensor_parallel_size": "2"}
    assert share_of(shared_run(**halves), gpus=2) == 0.45
    assert share_of(shared_run(**halves, optimizer="adamw_8bit"), "32b", gpus=2) == 0.4


def test_a_share_that_was_chosen_or_does_not_help_stays(caplog: pytest.LogCaptureFixture) -> None:
    chosen, machine = shared_run(**{"server.gpu_memory_utilization": "0.45"}), replace(MACHINE, gpus=(H200,))
    assert share_of(chosen) == share_of(shared_run(), "32b") == 0.45
    for config in (chosen, shared_run()):  # an elastic run's machines may differ, and a CPU has no share
        assert with_room(config, replace(MACHINE, gpus=()), SHAPES["7b"]) is config
        assert with_room(config, MACHINE, None) is config
    assert share_of(shared_run(**{"server.extra_args": "--kv-cache-memory-bytes,9000000000"})) == 0.45
    unnumbered = shared_run(**{"server.gpus": "GPU-b"})  # the plan does not know whether the trainer has another one
    assert share_of(unnumbered, gpus=2) == 0.45
    assert (
        "gpu_memory_utilization" not in with_room(shared_run(), machine, SHAPES["7b"]).trainer.server.model_fields_set
    )
    on_cluster = shared_run(cluster="auto")
    assert with_room(on_cluster, MACHINE, SHAPES["7b"]) is on_cluster

    warn_of_memory(with_room(shared_run(), machine, SHAPES["7b"]), machine, SHAPES["7b"])
    assert not caplog.records
    warn_of_memory(shared_run(), machine, SHAPES["32b"])
    assert "--optimizer adamw_8bit" in caplog.text or "--weight-bridge-mode lora_only" in caplog.text
