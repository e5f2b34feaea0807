"""The LoRA forward pass of our own: PEFT's values and gradients, without its copies."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from peft import PeftModel
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from grpo_trainer.model.lora import adapter_state
from grpo_trainer.model.lora_linear import use_few_kernels
from tests.unit.tiny_lora import VOCAB, fill_b, tiny_lora, tiny_qwen

TOKENS = torch.randint(0, VOCAB, (2, 9), generator=torch.Generator().manual_seed(0))


def made(dtype: torch.dtype, **options: Any) -> PeftModel:
    model = tiny_lora(**options)
    fill_b(model)
    for parameter in model.parameters():
        if not parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)
    return model


def outcome(model: PeftModel) -> tuple[Tensor, dict[str, Tensor]]:
    logits = model(input_ids=TOKENS, use_cache=False).logits
    logits.float().square().mean().backward()
    return logits, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("rslora", [False, True], ids=["lora", "rslora"])
def test_values_and_gradients_are_pefts(rslora: bool) -> None:
    theirs = made(torch.float32, rslora=rslora, alpha=24)
    ours = copy.deepcopy(theirs)
    assert use_few_kernels(ours) == 14  # seven modules in each of two layers
    (logits, grads), (their_logits, their_grads) = outcome(ours), outcome(theirs)
    torch.testing.assert_close(logits, their_logits, rtol=1e-5, atol=1e-5)
    assert grads.keys() == their_grads.keys() and len(grads) == 28
    for name, grad in grads.items():
        torch.testing.assert_close(grad, their_grads[name], rtol=1e-4, atol=1e-6)


def test_on_16_bits_it_is_as_near_to_the_truth_as_pefts() -> None:
    errors = []
    _, truth = outcome(made(torch.float32))
    for few in (False, True):
        model = made(torch.bfloat16)
        if few:
            use_few_kernels(model)
        _, grads = outcome(model)
        assert all(grad.dtype == torch.float32 for grad in grads.values())
        errors.append(torch.stack([(grads[name] - true).norm() / true.norm() for name, true in truth.items()]).mean())
    assert errors[1] < 1.2 * errors[0] < 0.1


def test_names_and_the_model_without_its_adapter_are_as_before() -> None:
    model = made(torch.float32)
    names = list(model.state_dict()), list(adapter_state(model))
    use_few_kernels(model)
    assert (list(model.state_dict()), list(adapter_state(model))) == names
    with model.disable_adapter():
        bare = model(input_ids=TOKENS, use_cache=False).logits
    torch.testing.assert_close(bare, tiny_qwen()(input_ids=TOKENS, use_cache=False).logits)
    assert not torch.allclose(bare, model(input_ids=TOKENS, use_cache=False).logits)
    again = copy.deepcopy(model)  # its modules' forward passes are its own
    with torch.no_grad():
        next(p for name, p in again.named_parameters() if "lora_B" in name).add_(1.0)
    assert not torch.allclose(
        again(input_ids=TOKENS, use_cache=False).logits, model(input_ids=TOKENS, use_cache=False).logits
    )


class LargeCasts(TorchDispatchMode):
    """Counts copies of whole activations in another dtype."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # torch's own
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and out.ndim == 3 and out.dtype == torch.float32:
            self.count += 1
        return out


def test_no_activation_is_cast() -> None:
    """In addition to those of norms (two in each of two layers, and the last) and of the rotary embedding."""
    counts = []
    for few in (False, True):
        model = made(torch.bfloat16)
        if few:
            use_few_kernels(model)
        with LargeCasts() as casts:
            model(input_ids=TOKENS, use_cache=False)
        counts.append(casts.count)
    assert counts[1] == 6 < counts[0]
