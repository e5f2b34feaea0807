"""The size of the server's key-value cache, where the memory plan is to fix it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from grpo_trainer.doctor.memory import SERVER_WORKSPACE, SPARE_ADAPTERS
from grpo_trainer.doctor.planned_cache import planned_cache
from tests.unit.test_doctor import CONFIG, GIB, MACHINE, MODULES, run_of, write_model


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


@pytest.mark.parametrize(
    "flags",
    [
        {"weight_bridge_mode": "none"},
        {"weight_bridge_mode": "lora_restart"},
        {"trainer_gpus": "2"},
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
