"""Sharded weights in main memory, from the trainer's sender to a worker's buffers."""

from __future__ import annotations

import errno
import gc
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from grpo_trainer.locked_memory import LockedMemory
from grpo_trainer.model.export import stored_tensors
from grpo_trainer.weights.broadcast import PresentWeights
from grpo_trainer.weights.buckets import Buckets
from grpo_trainer.weights.senders.main_memory import MemorySender
from grpo_trainer.weights.senders.sender import NotInPlaceError, Way
from tests.unit.factories import bridge_info
from vllm_server.worker.packed import Layout, layout_of
from vllm_server.worker.sources import MemoryMap

CPU = torch.device("cpu")


SIZES: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 32, "vocab_size": 24, "num_hidden_layers": 1}
HEADS: dict[str, Any] = {"num_attention_heads": 2, "num_key_value_heads": 1}


@pytest.fixture
def model() -> PreTrainedModel:
    torch.manual_seed(0)
    return Qwen2ForCausalLM(Qwen2Config(**SIZES, **HEADS, tie_word_embeddings=True))


def tensors_of(model: PreTrainedModel) -> Mapping[str, Tensor]:
    return {name: tensor for name, (_, tensor) in stored_tensors(model).items()}


def gathering(model: PreTrainedModel) -> PresentWeights:
    def gather(keep: Callable[[Tensor], Tensor]) -> Mapping[str, Tensor]:
        return {name: keep(tensor.detach()) for name, tensor in tensors_of(model).items()}

    return PresentWeights(lambda: tensors_of(model), gather)


def way_of(model: PreTrainedModel, weights: PresentWeights) -> Way:
    buckets, gathered = Buckets(model, weights.own(), torch.bfloat16, limit=2048), weights.gathered(torch.bfloat16)
    return Way("http://server", bridge_info(), Path("/none"), buckets, weights.own(), gathered)


def layouts_of(way: Way) -> list[Layout]:
    return [layout_of(header, "") for header in way.buckets.headers]


def test_each_version_arrives_as_it_would_be_packed(model: PreTrainedModel) -> None:
    weights = gathering(model)
    way = way_of(model, weights)
    sender, layouts = MemorySender(way), layouts_of(way)
    assert len(layouts) > 2 and sender.is_ahead
    mapped = MemoryMap(sender.source, layouts, CPU)
    for version in (1, 2):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(-1.5)
        sender.send(version, weights.of(version, torch.bfloat16))
        for number, layout in enumerate(layouts):
            got_E = torch.zeros(layout.numel, dtype=torch.bfloat16)
            wanted_E = way.buckets.pack(number, tensors_of(model), torch.zeros_like(got_E))
            mapped.fill(version, number, got_E)
            assert torch.equal(got_E, wanted_E) and got_E.any()


def test_a_worker_refuses_memory_that_it_does_not_see_or_that_is_something_else(
    model: PreTrainedModel, tmp_path: Path
) -> None:
    way = way_of(model, gathering(model))
    source, layouts = MemorySender(way).source, layouts_of(way)
    file = tmp_path / "memory"
    file.write_bytes(bytes(source.nbytes))
    link = tmp_path / "link"
    link.symlink_to(file)
    first, *rest = source.tensors
    short = replace(source.tensors[first], shape=[1], stride=[1])
    for wrong, named in (
        (replace(source, path="/proc/0/fd/9"), "/proc/0/fd/9"),
        (replace(source, path=str(link)), str(link)),
        (replace(source, name="grpo-0"), source.path),
        (replace(source, nbytes=source.nbytes + 4096), source.path),
        (replace(source, tensors={name: source.tensors[name] for name in rest}), first),
        (replace(source, tensors={**source.tensors, first: short}), first),
    ):
        with pytest.raises(ValueError, match=named):
            MemoryMap(wrong, layouts, CPU)
    MemoryMap(source, layouts, CPU)


def test_without_memory_that_processes_can_share_weights_take_another_way(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forbidden(name: str) -> int:
        raise OSError(errno.EPERM, "not permitted")

    monkeypatch.setattr(os, "memfd_create", forbidden)
    weights = gathering(model)
    with pytest.raises(NotInPlaceError):
        MemorySender(way_of(model, weights))
    found = weights.of(1, torch.float32)
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors_of(model).items())


def test_memory_stays_open_as_long_as_a_tensor_of_it(model: PreTrainedModel) -> None:
    memory = LockedMemory(4096, shared=True)
    path, tensor = memory.path, memory.take([8], torch.float32)
    del memory
    gc.collect()
    assert Path(path).exists()
    del tensor
    gc.collect()
    assert not Path(path).exists()


def test_what_is_converted_for_a_checkpoint_takes_another_way() -> None:
    """transformers fuses a mixture's experts, which a checkpoint has apart."""
    experts: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
    mixture = Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, **HEADS, **experts))
    with pytest.raises(NotInPlaceError) as refused:
        MemorySender(way_of(mixture, gathering(mixture)))
    assert "experts" in refused.value.got
