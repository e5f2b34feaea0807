"""Chosen logprobs: the shift, the temperature, fp32, chunks, and a microbatch with nothing to train."""

from __future__ import annotations

import math

import pytest
import torch

from grpo_trainer import logprobs
from grpo_trainer.logprobs import chosen_logprobs


def test_by_hand() -> None:
    # position 0 predicts token 1: logits 0, log 3 -> probabilities 1/4, 3/4; at temperature 2: weights 1, sqrt 3
    logits_BTV = torch.tensor([[[0.0, math.log(3.0)], [5.0, -5.0]]])
    tokens_BT = torch.tensor([[0, 1]])
    at = torch.tensor([0]), torch.tensor([1])
    lp, entropy = chosen_logprobs(logits_BTV, tokens_BT, *at, torch.ones(1))
    assert lp.item() == pytest.approx(math.log(0.75))
    assert entropy.item() == pytest.approx(-0.75 * math.log(0.75) - 0.25 * math.log(0.25))
    warm, _ = chosen_logprobs(logits_BTV, tokens_BT, *at, torch.tensor([2.0]))
    assert warm.item() == pytest.approx(math.log(math.sqrt(3) / (1 + math.sqrt(3))))


def test_chunks_and_bf16_change_neither_value_nor_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    logits = torch.randn(2, 9, 50, dtype=torch.bfloat16)
    tokens = torch.randint(0, 50, (2, 9))
    rows = torch.arange(2).repeat_interleave(8)
    columns = torch.arange(1, 9).repeat(2)
    results = []
    for chunk in (3, 1024):
        monkeypatch.setattr(logprobs, "CHUNK_TOKENS", chunk)
        leaf = logits.clone().requires_grad_()
        lp, entropy = chosen_logprobs(leaf, tokens, rows, columns, torch.ones(16))
        assert lp.dtype == torch.float32 and not entropy.requires_grad
        lp.sum().backward()
        results.append((lp.detach(), entropy, leaf.grad))
    exact = torch.log_softmax(logits.double(), -1)[rows, columns - 1].gather(-1, tokens[rows, columns][:, None])[:, 0]
    torch.testing.assert_close(results[0][0].double(), exact, rtol=0, atol=1e-5)
    for few, many in zip(*results, strict=True):
        torch.testing.assert_close(few, many, rtol=0, atol=1e-6)


def test_nothing_to_train_gives_a_zero_that_can_be_backpropagated() -> None:
    logits = torch.randn(1, 3, 5, requires_grad=True)
    none = torch.zeros(0, dtype=torch.int64)
    lp, _ = chosen_logprobs(logits, torch.zeros(1, 3, dtype=torch.int64), none, none, torch.zeros(0))
    lp.sum().backward()
    assert logits.grad is not None and not logits.grad.any()
