"""Which kernel packed attention takes, and what it is given; the kernels themselves: tests/gpu/test_step_gpu.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from grpo_trainer.microbatches import layout
from grpo_trainer.model import kernels
from grpo_trainer.model.attention import heads_of, packed_attention
from grpo_trainer.model.kernels import CUDNN, FLASH, Heads, boundaries_for, fastest
from tests.unit.test_packing import tiny

HEADS = Heads(4, 2, 8)


def test_flash_attention_takes_boundaries_as_they_are() -> None:
    packed = layout([3, 1, 5])
    assert boundaries_for(FLASH.name, packed) == (packed.boundaries, 5)


@pytest.mark.parametrize(
    ("lengths", "count", "longest"),
    [([3, 1, 5], 16, 256), ([300] * 16, 16, 512), ([2] * 17, 32, 256), ([256], 16, 256)],
    [([3, 1, 5], 16, 256), ([300] * 16, 16, 512), ([2] * 17, 32, 256), ([256], 16, 256)],
)
def test_what_is_built_for_each_shape_sees_few(lengths: list[int], count: int, longest: int) -> None:
    boundaries, most = boundaries_for(CUDNN.name, layout(lengths))
    assert (len(boundaries), most) == (count + 1, longest)
    assert boundaries.dtype == torch.int32
    assert boundaries[: len(lengths) + 1].tolist() == layout(lengths).boundaries.tolist()
    assert set(boundaries[len(lengths) :].tolist()) == {sum(lengths)}


def test_empty_sequences_change_nothing() -> None:
    packed = layout([3, 1, 5])
    inputs = [torch.randn(9, n, 8) for n in (4, 2, 2)]
    rounded, longest = boundaries_for(CUDNN.name, packed)
    for own, other in zip(
        packed_attention(*inputs, packed.boundaries, 5, 0.3),  # type: ignore[misc]
        packed_attention(*inputs, rounded, longest, 0.3),  # type: ignore[misc]
        strict=True,
    ):
        assert torch.equal(own, other)


@pytest.mark.parametrize(
    ("cudnn", "chosen"),
    [
        (([torch.ones(3)], 1.0), CUDNN),
        (([torch.ones(3)], 1.99), FLASH),  # no gain
        (([torch.ones(3) * 1.1], 1.0), FLASH),  # something else
        (([torch.full((3,), torch.nan)], 1.0), FLASH),
        (RuntimeError("no engine"), FLASH),
    ],
)
def test_the_fastest_that_agrees_is_taken(cudnn: Any, chosen: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def tried(kernel: Any, *_: Any) -> Any:
        if kernel is FLASH:
            return [torch.ones(3)], 2.0
        if isinstance(cudnn, Exception):
            raise cudnn
        return cudnn

    monkeypatch.setattr(kernels, "_tried", tried)
    assert fastest(HEADS, 64, torch.bfloat16, torch.device("cpu")) == chosen.name


def test_heads_are_a_configurations() -> None:
    model: Any = tiny("qwen2", hidden_size=64)
    config = model.config
    found = heads_of(config)
    assert (found.queries, found.keys) == (config.num_attention_heads, config.num_key_value_heads)
    assert found.size * found.queries == 64
