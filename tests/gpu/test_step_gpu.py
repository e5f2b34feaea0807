"""An optimisation step on a GPU: its attention kernel, and packed, compiled, recomputed steps against plain ones."""

from __future__ import annotations

import copy
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch._dynamo.utils import counters
from torch.nn.functional import scaled_dot_product_attention

from grpo_trainer.batch.microbatches import Packed, split
from grpo_trainer.config.bridge import BridgeConfig
from grpo_trainer.engine.attention import NONE_SHARED, arguments, packed_attention
from grpo_trainer.engine.recompute import Kept, LayerMemory, Recomputation
from grpo_trainer.metrics.types import reduce
from grpo_trainer.model.lora import add_adapter
from grpo_trainer.rollouts.groups import Sample
from grpo_trainer.trainer import Trainer
from tests.unit.test_memory_fit import fitting_of
from tests.unit.test_packing import settings, tiny
from tests.unit.test_trainer import full_rollouts
from tests.unit.tiny_lora import fill_b


def test_the_kernel_is_attention_of_each_sequence_alone() -> None:
    torch.manual_seed(0)
    ends = [0, 37, 300, 1000]
    boundaries = torch.tensor(ends, dtype=torch.int32, device="cuda")
    inputs = [torch.randn(1000, n, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True) for n in (12, 2, 2)]
    out, _ = packed_attention(*inputs, boundaries, 700, 128**-0.5, *NONE_SHARED)  # type: ignore[misc]
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


def test_the_kernel_sees_prompts_that_stand_in_the_row_once() -> None:
    """Against the same sequences with their prompts to themselves, in float32."""
    random = np.random.default_rng(0)

    def made(prompt: int, completion: int) -> Sample:
        tokens = np.concatenate([np.arange(prompt), random.integers(0, 9, completion)])
        return Sample(tokens, np.arange(prompt, prompt + completion))

    (one,) = split([made(*each) for each in SHARED], 100, packed=True, shared=True)
    one = one.to(torch.device("cuda"))
    assert one.packed is not None and one.packed.shared is not None
    options = arguments(one.packed)
    torch.manual_seed(0)
    tokens = one.tokens_BT.shape[1]
    shapes = [(tokens, n, 128) for n in (12, 2, 2)]
    inputs = [torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True) for shape in shapes]
    lengths = (options["cu_seq_lens_q"], options["max_length_q"])
    out, _ = packed_attention(*inputs, *lengths, 128**-0.5, *options["shared_prompts"])  # type: ignore[misc]
    factor = torch.randn_like(out)
    got = torch.autograd.grad(out, inputs, factor)
    wanted = torch.zeros(tokens, 12, 128, device="cuda")
    for row in rows_of(one.packed):
        own = (each[row].transpose(0, 1)[None].float() for each in inputs)
        alone = scaled_dot_product_attention(*own, is_causal=True, enable_gqa=True)  # type: ignore[misc]
        wanted[row] = alone[0].transpose(0, 1)
    assert (out.float() - wanted).norm() < 0.01 * wanted.norm()
    for part, other in zip(got, torch.autograd.grad(wanted, inputs, factor.float()), strict=True):
        assert (part.float() - other.float()).norm() < 0.01 * other.float().norm()


SHARED = [*((37, n) for n in (263, 1, 700)), *((300, n) for n in (64, 128)), (5, 90)]
"""Tokens of prompt and completion; prompts of one length are the same."""


def rows_of(packed: Packed) -> list[list[int]]:
    """Where in the row each sequence stands, prompt and all; a prompt's own tokens are written last, by itself."""
    shared = packed.shared
    assert shared is not None
    pieces = [range(*each) for each in pairwise(packed.boundaries.tolist())]
    prompts = pieces[: len(shared.prompts) - 1]
    readers = [range(shared.first + start, shared.first + end) for start, end in pairwise(shared.readers.tolist())]
    rows = []
    for piece in pieces[len(prompts) :]:
        before = [prompt for prompt, reading in zip(prompts, readers, strict=True) if piece[0] in reading]
        rows.append([*(before[0] if before else ()), *piece])
    return rows


def gradients_of(trainer: Trainer) -> tuple[float, torch.Tensor]:
    """Return the loss and the gradients of a step; an optimizer of 16-bit weights frees their memory in the update."""
    found: list[torch.Tensor] = []
    finish = trainer.holding.finish_gradients

    def finishing() -> None:
        finish()
        found.extend(p.grad.float().flatten() for p in trainer.parameters if p.grad is not None)

    trainer.holding.finish_gradients = finishing  # type: ignore[method-assign]
    numbers = reduce(trainer.step(full_rollouts(), 0).metrics)
    return numbers["train/loss"], torch.cat(found)


@pytest.mark.parametrize("checkpointing", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("compiled", ["off", "on"])
@pytest.mark.parametrize("shared", ["off", "on"])
def test_an_adapters_step_is_the_padded_one(shared: str, compiled: str, checkpointing: bool) -> None:
    """In bfloat16, so to its rounding."""
    base: Any = tiny("qwen2", hidden_size=64, num_hidden_layers=3)
    base.to("cuda", torch.bfloat16).requires_grad_(False)
    model = add_adapter(base, BridgeConfig(weight_bridge_mode="lora_only", lora_r=8), seed=0)
    fill_b(model)
    loss, gradient = gradients_of(Trainer(copy.deepcopy(model), settings(packing="off")))
    more = {"checkpointing": checkpointing, "max_tokens_per_microbatch": 40, "share_prompts": shared}
    config = settings(packing="on", compile=compiled, **more)
    other_loss, other = gradients_of(Trainer(model, config))
    assert other_loss == pytest.approx(loss, abs=0.02)
    assert (other - gradient).norm() < 0.1 * gradient.norm()


@pytest.mark.parametrize("kept", [Kept.PRODUCTS, Kept.NARROW, Kept.INPUT], ids=lambda kept: kept.name)
def test_a_step_of_all_weights_is_the_same_whatever_layers_keep(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    """In bfloat16, so to its rounding."""
    base: Any = tiny("qwen2", hidden_size=64, num_hidden_layers=3)
    base.to("cuda", torch.bfloat16).requires_grad_(True)
    found = {}
    for plan in (Recomputation(), Recomputation(3, kept)):
        monkeypatch.setattr(LayerMemory, "plan", lambda *_, plan=plan: plan)
        config = settings(packing="on", share_prompts="on", compile="on", checkpointing=None)
        trainer = Trainer(copy.deepcopy(base), config)
        assert trainer.forward.compiled is not None and trainer.forward.compiled.plan == plan
        found[plan] = gradients_of(trainer)
    (loss, gradient), (other_loss, other) = found.values()
    assert other_loss == pytest.approx(loss, abs=0.02)
    assert (other - gradient).norm() < 0.05 * gradient.norm()


def test_a_graph_serves_few_tokens_and_many() -> None:
    """For a GPU, torch's compiler would join the two reductions of a norm's backward pass for many tokens only."""
    torch._dynamo.reset()
    counters.clear()
    base: Any = tiny("qwen2", hidden_size=1024, num_hidden_layers=2)
    base.to("cuda", torch.bfloat16).requires_grad_(True)
    trainer = Trainer(base, settings(packing="on", share_prompts="on", compile="on"))
    before = counters["stats"]["unique_graphs"]
    passes = fitting_of(trainer.forward)
    for tokens in (16, 3072, 8192):
        with trainer.forward.learning():
            passes.run(tokens).float().square().mean().backward()
    assert counters["stats"]["unique_graphs"] == before == 3  # one for all layers, two of the head
