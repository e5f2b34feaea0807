"""Chosen logprobs: the shift, the temperature, fp32, chunks, and a microbatch with nothing to train."""

from __future__ import annotations

import math

import pytest
import torch

from grpo_trainer.engine import logprobs
from grpo_trainer.engine.logprobs import token_scores


def test_by_hand() -> None:
    # position 0 predicts token 1: logits 0, log 3 -> probabilities 1/4, 3/4; at temperature 2: weights 1, sqrt 3
    logits_BTV = torch.tensor([[[0.0, math.log(3.0)], [5.0, -5.0]]])
    tokens_BT = torch.tensor([[0, 1]])
    at = torch.tensor([0]), torch.tensor([1])
    scores = token_scores(logits_BTV, tokens_BT, *at, torch.ones(1), torch.tensor([[1, 0, 0]]))
    assert scores.logprobs_N.item() == pytest.approx(math.log(0.75))
    assert scores.entropy_N.item() == pytest.approx(-0.75 * math.log(0.75) - 0.25 * math.log(0.25))
    assert scores.others_NK.tolist() == [pytest.approx([math.log(0.75), math.log(0.25), math.log(0.25)])]
    warm = token_scores(logits_BTV, tokens_BT, *at, torch.tensor([2.0]))
    assert warm.logprobs_N.item() == pytest.approx(math.log(math.sqrt(3) / (1 + math.sqrt(3))))
    assert warm.others_NK.shape == (1, 0)


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
        scores = token_scores(leaf, tokens, rows, columns, torch.ones(16), torch.full((16, 2), 7))
        assert scores.logprobs_N.dtype == torch.float32 and not scores.entropy_N.requires_grad
        (scores.logprobs_N.sum() + scores.others_NK.sum()).backward()
        results.append((scores.logprobs_N.detach(), scores.entropy_N, scores.others_NK.detach(), leaf.grad))
    exact = torch.log_softmax(logits.double(), -1)[rows, columns - 1].gather(-1, tokens[rows, columns][:, None])[:, 0]
    torch.testing.assert_close(results[0][0].double(), exact, rtol=0, atol=1e-5)
    for few, many in zip(*results, strict=True):
        torch.testing.assert_close(few, many, rtol=0, atol=1e-6)


def test_nothing_to_train_gives_a_zero_that_can_be_backpropagated() -> None:
    logits = torch.randn(1, 3, 5, requires_grad=True)
    none = torch.zeros(0, dtype=torch.int64)
    scores = token_scores(
        logits, torch.zeros(1, 3, dtype=torch.int64), none, none, torch.zeros(0), none.view(0, 2), entropy_gradient=True
    )
    assert scores.others_NK.shape == (0, 2)
    (scores.logprobs_N.sum() + scores.entropy_N.sum() + scores.others_NK.sum()).backward()
    assert logits.grad is not None and not logits.grad.any()


def test_the_entropys_gradient_is_there_on_request() -> None:
    logits = torch.randn(1, 4, 5, dtype=torch.float64, requires_grad=True)
    at = torch.zeros(3, dtype=torch.int64), torch.arange(1, 4)
    scores = token_scores(
        logits, torch.zeros(1, 4, dtype=torch.int64), *at, torch.full((3,), 0.7), entropy_gradient=True
    )
    (got,) = torch.autograd.grad(scores.entropy_N.sum(), logits)
    (wanted,) = torch.autograd.grad(torch.distributions.Categorical(logits=logits[0, :3] / 0.7).entropy().sum(), logits)
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)
