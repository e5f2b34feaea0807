"""Divergence estimators and distillation, by hand and by what they estimate."""

from __future__ import annotations

import math

import pytest
import torch

from grpo_trainer.config.loss import KlEstimator
from grpo_trainer.losses.regularisers import divergence, teacher_cross_entropy


@pytest.mark.parametrize(
    ("estimator", "above", "below", "slopes"),
    [
        ("k1", 0.5, -0.5, (1.0, 1.0)),  # x
        ("k2", 0.125, 0.125, (0.5, -0.5)),  # x^2 / 2; derivative x
        # exp(-0.5) + 0.5 - 1 = 0.106531, exp(0.5) - 0.5 - 1 = 0.148721; derivative 1 - exp(-x)
        ("k3", 0.106531, 0.148721, (0.393469, -0.648721)),
    ],
)
def test_by_hand(estimator: KlEstimator, above: float, below: float, slopes: tuple[float, float]) -> None:
    lp_N = torch.tensor([-1.0, -2.0], requires_grad=True)
    got = divergence(lp_N, torch.tensor([-1.5, -1.5]), estimator)
    assert got.tolist() == pytest.approx([above, below], abs=1e-6)
    got.sum().backward()
    assert lp_N.grad is not None and lp_N.grad.tolist() == pytest.approx(slopes, abs=1e-6)


def test_a_divergence_beyond_fp32_makes_no_nan() -> None:
    lp_N = torch.tensor([-300.0], requires_grad=True)
    divergence(lp_N, torch.tensor([-0.1]), "k3").sum().backward()
    assert lp_N.grad is not None and lp_N.grad.isfinite().all()


def test_values_and_gradients_estimate_what_they_are_said_to() -> None:
    """Over a whole distribution: the mean of k1 and k3 is the KL, of the gradients only k2's is the KL's."""
    torch.manual_seed(0)
    logits = torch.randn(6, dtype=torch.float64, requires_grad=True)
    ref = torch.log_softmax(torch.randn(6, dtype=torch.float64), -1)
    lp = torch.log_softmax(logits, -1)
    p = lp.detach().exp()  # how often each token is sampled
    kl = (lp.exp() * (lp - ref)).sum()
    reverse = (ref.exp() * (ref - lp)).sum()

    def slope(value: torch.Tensor) -> torch.Tensor:
        return torch.autograd.grad(value, logits, retain_graph=True)[0]

    for estimator in ("k1", "k3"):
        torch.testing.assert_close((p * divergence(lp, ref, estimator)).sum(), kl)
    torch.testing.assert_close(slope((p * divergence(lp, ref, "k1")).sum()), torch.zeros_like(ref))
    torch.testing.assert_close(slope((p * divergence(lp, ref, "k2")).sum()), slope(kl))
    torch.testing.assert_close(slope((p * divergence(lp, ref, "k3")).sum()), slope(reverse))
    ratio = torch.exp(lp - lp.detach())
    for estimator in ("k1", "k3"):
        torch.testing.assert_close(slope((p * ratio * divergence(lp, ref, estimator)).sum()), slope(kl))


def test_distillation_by_hand() -> None:
    # teacher 0.6, 0.2 of the whole, so 3/4, 1/4 of the two; at temperature 2: sqrt 3 to 1
    teacher_NK = torch.log(torch.tensor([[0.6, 0.2]]))
    lp_NK = torch.log(torch.tensor([[0.5, 0.1]])).requires_grad_()
    at_1 = teacher_cross_entropy(lp_NK, teacher_NK, 1.0)
    assert at_1.item() == pytest.approx(-0.75 * math.log(0.5) - 0.25 * math.log(0.1))
    at_2 = teacher_cross_entropy(lp_NK, teacher_NK, 2.0)
    first = math.sqrt(3) / (1 + math.sqrt(3))
    assert at_2.item() == pytest.approx(-first * math.log(0.5) - (1 - first) * math.log(0.1))
    (slope,) = torch.autograd.grad(at_1.sum(), lp_NK)
    assert slope.tolist() == [pytest.approx([-0.75, -0.25])]


def test_places_without_a_teacher_and_missing_tokens_count_nothing() -> None:
    nothing = -math.inf
    teacher_NK = torch.tensor([[-0.1, nothing], [nothing, nothing]])
    lp_NK = torch.tensor([[-2.0, -7.0], [-3.0, -4.0]], requires_grad=True)
    cross_N = teacher_cross_entropy(lp_NK, teacher_NK, 0.5)
    assert cross_N.tolist() == [2.0, 0.0]  # all of the first one's weight is on its one token
    cross_N.sum().backward()
    assert lp_NK.grad is not None and lp_NK.grad.tolist() == [[-1.0, 0.0], [0.0, 0.0]]
    assert teacher_cross_entropy(torch.zeros(3, 0), torch.zeros(3, 0), 1.0).tolist() == [0.0] * 3
