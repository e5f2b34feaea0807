"""The tables of tuned LoRA kernels: complete, found by vLLM's own lookup, and merged without loss."""

from __future__ import annotations

import json
import os

import pytest

from vllm_server import lora_kernels
from vllm_server.lora_kernels import FOLDER, VARIABLE, file_name, use_tuned_kernels
from vllm_server.tune_lora import MIX, Layer, candidates, layers_of, merged, versions_of, with_more_slices

BLOCKS = {"block_m", "block_n", "block_k", "num_warps", "num_stages", "num_ctas"}


def test_layers_of_a_decoder_with_grouped_queries() -> None:
    config = {"hidden_size": 3584, "num_attention_heads": 28, "num_key_value_heads": 4, "intermediate_size": 18944}
    # heads of 3584 / 28 = 128, so 4 · 128 = 512 rows for k and for v
    assert layers_of(config) == [
        Layer(3584, (3584, 512, 512)),
        Layer(3584, (3584,)),
        Layer(3584, (18944, 18944)),
        Layer(18944, (3584,)),
    ]


def test_heads_wider_than_the_hidden_size_over_their_number() -> None:
    config = {"hidden_size": 64, "num_attention_heads": 2, "head_dim": 48, "intermediate_size": 128}
    assert layers_of(config)[:2] == [Layer(64, (96, 96, 96)), Layer(96, (64,))]


@pytest.mark.parametrize("kernel", ["SHRINK", "EXPAND_TRUE"])
def test_shipped_tables_have_an_entry_for_every_number_of_slices(kernel: str) -> None:
    for file in FOLDER.glob(f"*_{kernel}.json"):
        for slices in json.loads(file.read_text()).values():
            assert set(slices) == {"1", "2", "3", "4", "5", "6"}  # vLLM fails on a number that is missing
            entries = [e for tokens in slices.values() for k in tokens.values() for n in k.values() for e in n.values()]
            assert entries and all(set(entry) >= BLOCKS for entry in entries)
            assert all(entry["block_m"] >= 16 and entry["block_k"] >= 16 for entry in entries)  # Triton's least


def test_each_gpu_has_both_tables_or_none() -> None:
    shrink = {file.name.removesuffix("_SHRINK.json") for file in FOLDER.glob("*_SHRINK.json")}
    expand = {file.name.removesuffix("_EXPAND_TRUE.json") for file in FOLDER.glob("*_EXPAND_TRUE.json")}
    assert shrink == expand != set()


def test_file_names_are_what_vllm_looks_for() -> None:
    assert file_name("NVIDIA H100-PCIe 80GB", "SHRINK") == "NVIDIA_H100_PCIe_80GB_SHRINK.json"


def test_a_known_gpu_is_pointed_here_unless_the_user_points_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert not use_tuned_kernels("No Such GPU")
    assert VARIABLE not in os.environ
    monkeypatch.setenv(VARIABLE, "/mine")
    assert use_tuned_kernels("NVIDIA H200")
    assert os.environ[VARIABLE] == "/mine"
    monkeypatch.delenv(VARIABLE)
    assert use_tuned_kernels("NVIDIA H200")
    assert os.environ[VARIABLE] == str(lora_kernels.FOLDER)


def test_tables_are_merged_entry_by_entry() -> None:
    old = {"9": {"1": {"16": {"64": {"16": {"block_m": 1}}, "32": {"16": {"block_m": 2}}}}}}
    new = {"9": {"1": {"16": {"64": {"16": {"block_m": 3}}}}, "2": {}}}
    both = merged(old, new)
    assert both["9"]["1"]["16"] == {"64": {"16": {"block_m": 3}}, "32": {"16": {"block_m": 2}}}
    assert both["9"]["2"] == {}


def test_more_slices_take_what_most_slices_have() -> None:
    table = with_more_slices({"9": {"1": {"a": 1}, "3": {"a": 3}}})
    assert table["9"]["4"] == {"a": 3} == table["9"]["6"]
    assert table["9"]["1"] == {"a": 1}


def test_tokens_of_several_versions() -> None:
    assert versions_of(3, (1.0,)) == [0, 0, 0]
    # 16 tokens end at round(6.4) = 6, round(11.2) = 11, round(14.4) = 14 and 16
    assert versions_of(16, MIX) == [0] * 6 + [1] * 5 + [2] * 3 + [3] * 2


def test_candidates_differ() -> None:
    for kernel in ("shrink", "expand"):
        tried = list(candidates(kernel))
        assert len(tried) == len(set(tried)) > 10
