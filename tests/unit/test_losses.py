"""Losses against values computed by hand and against autograd of the plain formula in float64."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from grpo_trainer.losses import LossInputs, LossName, old_logprobs, policy_loss, token_weight


def inputs(
    lp: list[float], advantages: list[float], *, roll: list[float] | None = None, weights: list[float] | None = None
) -> LossInputs:
    count = len(lp)
    return LossInputs(
        trainer_logprobs_N=torch.tensor(lp, requires_grad=True),
        entropy_N=torch.zeros(count),
        rollout_logprobs_N=torch.tensor(roll or [0.0] * count),
        has_rollout_N=torch.full((count,), roll is not None),
        advantages_N=torch.tensor(advantages),
        weights_N=torch.tensor(weights or [1.0] * count),
    )


# ratio, advantage -> loss and gradient with respect to lp; clip range [0.8, 1.2]
CASES = [
    (1.0, 2.0, -2.0, -2.0),  # inside: -(1 * 2); d/dlp = -ratio * A = -2
    (1.5, 1.0, -1.2, 0.0),  # too high, A > 0: clipped at 1.2, no gradient
    (0.5, 1.0, -0.5, -0.5),  # too low, A > 0: min(0.5, 0.8) = 0.5, the gradient stays
    (0.5, -1.0, 0.8, 0.0),  # too low, A < 0: min(-0.5, -0.8) = -0.8, no gradient
    (1.5, -1.0, 1.5, 1.5),  # too high, A < 0: min(-1.5, -1.2) = -1.5, the gradient stays
]


@pytest.mark.parametrize(("ratio", "advantage", "loss", "gradient"), CASES)
def test_clipped_surrogate_for_both_signs_and_sides(
    ratio: float, advantage: float, loss: float, gradient: float
) -> None:
    case = inputs([math.log(ratio)], [advantage])
    output = policy_loss(case, torch.zeros(1), eps_low=0.2, eps_high=0.2)
    output.loss.backward()
    assert output.loss.item() == pytest.approx(loss, abs=1e-6)
    assert case.trainer_logprobs_N.grad is not None
    assert case.trainer_logprobs_N.grad.item() == pytest.approx(gradient, abs=1e-6)


def test_clip_higher_moves_only_the_upper_bound() -> None:
    high = policy_loss(inputs([math.log(1.25)], [1.0]), torch.zeros(1), eps_low=0.2, eps_high=0.28)
    assert high.loss.item() == pytest.approx(-1.25)  # below 1.28: not clipped
    low = policy_loss(inputs([math.log(0.7)], [-1.0]), torch.zeros(1), eps_low=0.2, eps_high=0.28)
    assert low.loss.item() == pytest.approx(0.8)  # still clipped at 0.8


def test_clip_fractions_count_only_tokens_that_lose_their_gradient() -> None:
    ratios = [1.5, 1.5, 0.5, 0.5]
    output = policy_loss(
        inputs([math.log(r) for r in ratios], [1.0, -1.0, -1.0, 1.0]), torch.zeros(4), eps_low=0.2, eps_high=0.2
    )
    assert output.metrics["grpo/clipped_high"].value() == 0.25  # 1.5 with A > 0
    assert output.metrics["grpo/clipped_low"].value() == 0.25  # 0.5 with A < 0
    assert output.metrics["grpo/clipped_fraction"].value() == 0.5
    assert output.metrics["grpo/mean_ratio"].value() == pytest.approx(1.0)
    assert output.metrics["grpo/max_ratio"].value() == pytest.approx(1.5)


@pytest.mark.parametrize(
    ("loss", "weight"),
    [
        ("grpo", 1 / (5 * 4)),  # 5 tokens in this sequence, 4 sequences
        ("dapo", 1 / 30),  # 30 trained tokens in the batch
        ("dr_grpo", 1 / (4 * 100)),  # 4 sequences of at most 100 tokens
    ],
)
def test_token_weights(loss: LossName, weight: float) -> None:
    got = token_weight(loss, length=5, sequences=4, trained_tokens=30, max_completion_len=100)
    assert got == pytest.approx(weight)


def test_unknown_rollout_logprobs_are_replaced_by_the_trainers_own() -> None:
    case = inputs([-1.0, -2.0], [1.0, 1.0], roll=[-1.5, 1.0])
    case = LossInputs(**{**case.__dict__, "has_rollout_N": torch.tensor([True, False])})
    assert old_logprobs(case, "rollout").tolist() == [-1.5, -2.0]
    assert old_logprobs(case, "trainer").tolist() == [-1.0, -2.0]
    assert not old_logprobs(case, "trainer").requires_grad


def test_gap_to_the_rollout_policy_is_measured_where_it_is_known() -> None:
    case = inputs([-1.0, -2.0], [1.0, 1.0], roll=[-1.5, 1.0])
    case = LossInputs(**{**case.__dict__, "has_rollout_N": torch.tensor([True, False])})
    metrics = policy_loss(case, old_logprobs(case, "rollout"), 0.2, 0.2).metrics
    assert metrics["alignment/logprob_diff_mean"].value() == pytest.approx(0.5)
    assert metrics["alignment/logprob_diff_max"].value() == pytest.approx(0.5)
    # k3 with x = roll - lp = -0.5: exp(-0.5) + 0.5 - 1 = 0.10653
    assert metrics["alignment/kl_rollout"].value() == pytest.approx(0.10653, abs=1e-5)


@given(
    st.lists(
        st.tuples(st.floats(-3, 0), st.floats(-3, 0), st.floats(-2, 2), st.floats(0.01, 1)), min_size=1, max_size=20
    )
)
def test_loss_and_gradient_equal_the_plain_formula_in_float64(rows: list[tuple[float, float, float, float]]) -> None:
    lp, old, advantages, weights = (list(column) for column in zip(*rows, strict=True))
    if any(abs(math.exp(a - b) - edge) < 1e-4 for a, b in zip(lp, old, strict=True) for edge in (0.8, 1.2)):
        return  # at the corner of the clip the gradient is either side's
    case = inputs(lp, advantages, weights=weights)
    output = policy_loss(case, torch.tensor(old), 0.2, 0.2)
    output.loss.backward()
    exact = torch.tensor(lp, dtype=torch.float64, requires_grad=True)
    ratio = torch.exp(exact - torch.tensor(old, dtype=torch.float64))
    a = torch.tensor(advantages, dtype=torch.float64)
    plain = -(torch.tensor(weights, dtype=torch.float64) * torch.min(ratio * a, ratio.clamp(0.8, 1.2) * a)).sum()
    plain.backward()
    assert output.loss.item() == pytest.approx(plain.item(), rel=1e-4, abs=1e-4)
    assert case.trainer_logprobs_N.grad is not None and exact.grad is not None
    torch.testing.assert_close(case.trainer_logprobs_N.grad.double(), exact.grad, rtol=1e-3, atol=1e-4)
