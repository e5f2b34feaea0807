"""The size of the server's key-value cache, where the memory plan is to fix it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from grpo_trainer.bench.models import SHAPES
from grpo_trainer.config.processes import RunConfig
from grpo_trainer.doctor.before_start import warn_of_memory
from grpo_trainer.machine import Gpu
from grpo_trainer.memory import SERVER_WORKSPACE
from grpo_trainer.run_defaults import planned_cache, with_room
from tests.unit.test_doctor import CONFIG, GIB, MACHINE, MODULES, run_of, write_model
from vllm_server.protocol import SPARE_ADAPTERS


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


def test_servers_of_several_trainers_have_a_planned_size_too(model: Path) -> None:
    two = replace(MACHINE, gpus=MACHINE.gpus[:1] * 2)
    alone = planned_cache(run_of(model, weight_bridge_mode="shared_vllm"), two)
    assert planned_cache(run_of(model, weight_bridge_mode="shared_vllm", trainer_gpus="2"), two) == alone
    assert planned_cache(run_of(model, trainer_gpus="2"), two) == planned_cache(run_of(model), two)


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


def test_without_a_gpu_the_server_has_a_size_of_its_own(model: Path) -> None:
    assert planned_cache(run_of(model), replace(MACHINE, gpus=())) is None


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
