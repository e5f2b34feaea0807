"""An optimisation step on a GPU: its attention kernel, and packed, compiled, recomputed steps against plain ones."""

from __future__ import annotations

import copy
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from grpo_trainer.bridge_options import LoraOnly
from grpo_trainer.config import TrainConfig
from grpo_trainer.metrics.types import reduce
from grpo_trainer.model.attention import packed_attention
from grpo_trainer.model.lora import add_adapter
from grpo_trainer.trainer import Trainer
from tests.unit.test_packing import settings, tiny
from tests.unit.test_trainer import full_rollouts
from tests.unit.tiny_lora import fill_b


def test_the_kernel_is_attention_of_each_sequence_alone() -> None:
    torch.manual_seed(0)
    ends = [0, 37, 300, 1000]
    boundaries = torch.tensor(ends, dtype=torch.int32, device="cuda")
    inputs = [torch.randn(1000, n, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True) for n in (12, 2, 2)]
    out, _ = packed_attention(*inputs, boundaries, 700, 128**-0.5)  # type: ignore[misc]
    factor = torch.randn_like(out)
    got = torch.autograd.grad(out, inputs, factor)
    parts = []
    for start, end in pairwise(ends):
        own = (each[start:end].transpose(0, 1)[None].float() for each in inputs)
        alone = scaled_dot_product_attention(*own, is_causal=True, enable_gqa=True)  # type: ignore[misc]
        parts.append(alone[0].transpose(0, 1))
    wanted = torch.cat(parts)
    assert (out.float() - wanted).norm() < 0.01 * wanted.norm()
    for one, other in zip(got, torch.autograd.grad(wanted, inputs, factor.float()), strict=True):
        assert (one.float() - other.float()).norm() < 0.01 * other.float().norm()


def gradients_of(model: Any, config: TrainConfig) -> tuple[float, torch.Tensor]:
    trainer = Trainer(model, config)
    numbers = reduce(trainer.step(full_rollouts(), 0).metrics)
    return numbers["train/loss"], torch.cat(
        [p.grad.float().flatten() for p in trainer.parameters if p.grad is not None]
    )


@pytest.mark.parametrize("checkpointing", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("compiled", ["off", "on"])
def test_an_adapters_step_is_the_padded_one(compiled: str, checkpointing: bool) -> None:
    """In bfloat16, so to its rounding."""
    base: Any = tiny("qwen2", hidden_size=64, num_hidden_layers=3)
    base.to("cuda", torch.bfloat16).requires_grad_(False)
    model = add_adapter(base, LoraOnly(mode="lora_only", r=8), seed=0)
    fill_b(model)
    loss, gradient = gradients_of(copy.deepcopy(model), settings(packing="off"))
    config = settings(packing="on", compile=compiled, checkpointing=checkpointing, max_tokens_per_microbatch=40)
    other_loss, other = gradients_of(model, config)
    assert other_loss == pytest.approx(loss, abs=0.02)
    assert (other - gradient).norm() < 0.1 * gradient.norm()
