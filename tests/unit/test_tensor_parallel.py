"""Processes with a shard of every matrix each train as one process with the whole model does."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from grpo_trainer.engine.tensor_shards import Cut, cut_model, shard_of
from grpo_trainer.errors import ModelError
from tests.golden.models import CONFIGS, SIZES, random_model
from tests.processes import ROOT, free_port
from tests.unit.tensor_trainers import CASES

RANKS = 2
TOLERANCE = {"16 bits": (1e-3, 0.05), "8-bit states": (1e-5, 1e-3)}
"""Of losses and weights: rounding to 16 bits is random, and blocks of 8-bit states begin at other elements."""


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, warm_trainers: None) -> list[dict[str, Any]]:
    """Of one process, then of each of two."""
    folder, port = tmp_path_factory.mktemp("trained"), free_port()
    ranks = [(0, 1), (0, RANKS), (1, RANKS)]
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.unit.tensor_trainers", str(rank), str(size), str(port), str(folder)],
            cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank, size in ranks
    ]  # fmt: skip
    said = [process.communicate(timeout=240)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * 3, "\n".join(text[-3000:] for text in said)
    return [torch.load(folder / f"rank{rank}of{size}.pt") for rank, size in ranks]


@pytest.mark.parametrize("case", CASES)
def test_two_shards_train_as_one_model(results: list[dict[str, Any]], case: str) -> None:
    alone, first, second = (result[case] for result in results)
    of_losses, of_weights = TOLERANCE.get(case, (1e-6, 1e-6))
    assert first["losses"] == second["losses"] == pytest.approx(alone["losses"], abs=of_losses)
    assert first["norms"] == second["norms"] == pytest.approx(alone["norms"], rel=0.05 if case == "16 bits" else 1e-4)
    assert first["weights"].keys() == alone["weights"].keys()
    for name, weight in alone["weights"].items():
        assert first["weights"][name].dtype == weight.dtype
        assert torch.allclose(first["weights"][name], weight, atol=of_weights, rtol=0), name
    assert all(map(torch.equal, first["everywhere"], second["everywhere"])), "norms are rounded once for all"
    assert all(torch.equal(first["prepared"][name], weight) for name, weight in first["weights"].items())
    if case not in TOLERANCE:
        assert torch.allclose(first["logprobs"], alone["logprobs"], atol=1e-5), "the model's own logits"
    assert first["size"] < 0.53 * alone["size"] and second["size"] < 0.53 * alone["size"]


@pytest.mark.parametrize("case", CASES)
def test_states_are_gathered_as_one_process_has_them_and_cut_again(results: list[dict[str, Any]], case: str) -> None:
    alone, first, _ = (result[case] for result in results)
    theirs, ours = alone["states"]["state"], first["states"]["state"]
    assert ours.keys() == theirs.keys()
    for number, state in theirs.items():
        shapes = {key: value.shape for key, value in state.items() if torch.is_tensor(value) and value.ndim}
        gathered = {key: value.shape for key, value in ours[number].items() if torch.is_tensor(value)}
        assert gathered == shapes
    for number, state in first["kept"].items():
        for key, value in state.items():
            if torch.is_tensor(value) and value.dtype == torch.float32 and case not in TOLERANCE:
                assert torch.equal(first["own"][number][key], value)


@given(st.integers(1, 300), st.integers(1, 8))
def test_parts_of_a_vocabulary_make_up_the_whole(size: int, ranks: int) -> None:
    each = -(-size // 64) * 64 // ranks + 1
    parts = [Cut(0, size, each).own(rank) for rank in range(ranks)]
    assert [index for part in parts for index in part] == list(range(size))


@pytest.mark.parametrize("architecture", ["phi3", "gemma3", "mixtral", "qwen3_moe"])
def test_a_model_whose_shards_are_not_known_is_refused_by_name(architecture: str) -> None:
    with pytest.raises(ModelError) as refused:
        cut_model(random_model(architecture), 0, RANKS)
    assert "model." in refused.value.field and "--server.tensor-parallel-size" in refused.value.fix


def test_sizes_that_can_not_be_divided_are_refused_by_name() -> None:
    model = random_model("qwen2")
    with pytest.raises(ModelError) as refused:
        cut_model(model, 0, 4)
    assert "num_key_value_heads" in refused.value.field and refused.value.got == "2"
    assert shard_of(model) is None


def test_a_model_without_weights_is_cut_to_the_shapes_of_vllms_workers() -> None:
    kind, fields = CONFIGS["qwen2"]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(kind(**SIZES | fields))
    shard = cut_model(model, 1, RANKS)
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    assert shapes["model.layers.0.self_attn.q_proj.weight"] == (64, 128)  # 2 of 4 heads of 32
    assert shapes["model.layers.0.self_attn.k_proj.bias"] == (32,)  # 1 of 2 heads
    assert shapes["model.layers.0.self_attn.o_proj.weight"] == (128, 64)
    assert shapes["model.layers.0.mlp.down_proj.weight"] == (128, 48)
    assert shapes["model.layers.0.input_layernorm.weight"] == (128,)
    assert shapes["model.embed_tokens.weight"] == (98 - 64, 128)  # vLLM pads 98 to 128, 64 for each worker
    assert shard.padded["model.embed_tokens.weight"] == 64
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert all(parameter.is_meta for parameter in model.parameters())
