"""Terms of the loss by hand: ratios and surrogates at each side of each clip, corrections, KL and distillation."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from grpo_trainer.config.loss import KlEstimator, LossConfig
from grpo_trainer.losses.surrogates import (
    Correction,
    Segments,
    cispo,
    clipped,
    divergence,
    mismatch_correction,
    sapo,
    sequence_ratio,
    teacher_cross_entropy,
    token_ratio,
)

PPO, HIGHER, DUAL = LossConfig(), LossConfig(clip_eps_high=0.28), LossConfig(dual_clip=3.0)
SAPO = LossConfig(loss="sapo", sapo_tau_neg=2.0)
"""Temperatures 1 where A > 0, 2 elsewhere; s(x) = 1 / (1 + exp(-x))."""
# surrogate, ratio, advantage -> gain, its derivative by lp, the end that clips it. lp = -0.5, d ratio / d lp = ratio
CASES = [
    (clipped, PPO, 1.0, 2.0, 2.0, 2.0, ""),  # inside [0.8, 1.2]: 1 * 2; derivative ratio * A = 2
    (clipped, PPO, 1.5, 1.0, 1.2, 0.0, "high"),  # too high, A > 0: min(1.5, 1.2), no gradient
    (clipped, PPO, 0.5, 1.0, 0.5, 0.5, ""),  # too low, A > 0: min(0.5, 0.8) = 0.5, the gradient stays
    (clipped, PPO, 0.5, -1.0, -0.8, 0.0, "low"),  # too low, A < 0: min(-0.5, -0.8) = -0.8, no gradient
    (clipped, PPO, 1.5, -1.0, -1.5, -1.5, ""),  # too high, A < 0: min(-1.5, -1.2) = -1.5, the gradient stays
    (clipped, HIGHER, 1.25, 1.0, 1.25, 1.25, ""),  # below 1.28: not clipped
    (clipped, HIGHER, 1.30, 1.0, 1.28, 0.0, "high"),
    (clipped, HIGHER, 0.7, -1.0, -0.8, 0.0, "low"),  # still clipped at 0.8
    (clipped, DUAL, 2.9, -2.0, -5.8, -5.8, ""),  # min(-5.8, -2.4) = -5.8 is above 3 * -2 = -6
    (clipped, DUAL, 4.0, -2.0, -6.0, 0.0, "high"),  # min(-8, -2.4) = -8, max(-8, -6) = -6: no gradient
    (clipped, DUAL, 4.0, 2.0, 2.4, 0.0, "high"),  # A > 0: the plain clip, 1.2 * 2
    (clipped, DUAL, 0.5, -2.0, -1.6, 0.0, "low"),  # the lower end as ever: 0.8 * -2
    (cispo, PPO, 1.0, 2.0, -1.0, 2.0, ""),  # 1 * 2 * -0.5; the weight is a constant, so the derivative is 1 * 2
    (cispo, PPO, 1.5, 1.0, -0.6, 1.2, "high"),  # 1.2 * 1 * -0.5: cut, but the gradient stays
    (cispo, PPO, 1.5, -1.0, 0.6, -1.2, "high"),  # for both signs
    (cispo, PPO, 0.1, 1.0, -0.05, 0.1, ""),  # not cut from below
    (sapo, SAPO, 1.0, 3.0, 6.0, 3.0, ""),  # 4 / 1 * s(0) * 3 = 6; derivative 4 s (1 - s) ratio A = 4 * 0.25 * 1 * 3
    (sapo, SAPO, 1.0, -3.0, -3.0, -3.0, ""),  # 4 / 2 * s(0) * -3 = -3; the slope at 1 is A whatever tau is
    (sapo, SAPO, 2.0, 1.0, 2.924234, 1.572896, ""),  # 4 s(1) = 4 * 0.7310586; 4 * 0.7310586 * 0.2689414 * 2
    (sapo, SAPO, 2.0, -1.0, -1.761594, -0.839949, ""),  # 2 s(2) = 2 * 0.8807971; 4 * 0.8807971 * 0.1192029 * 2
    (sapo, SAPO, 0.5, -1.0, -0.537883, -0.393224, ""),  # 2 s(-1) = 2 * 0.2689414; 4 * 0.2689414 * 0.7310586 * 0.5
]


@pytest.mark.parametrize(("surrogate", "config", "ratio", "advantage", "value", "slope", "end"), CASES)
def test_surrogates_by_hand(
    surrogate: Any, config: LossConfig, ratio: float, advantage: float, value: float, slope: float, end: str
) -> None:
    lp_N = torch.tensor([-0.5], requires_grad=True)
    ratio_N = token_ratio(lp_N, torch.tensor([-0.5 - math.log(ratio)]), Segments(torch.tensor([0]), 1))
    result = surrogate(ratio_N, lp_N, torch.tensor([advantage]), config)
    (slope_N,) = torch.autograd.grad(result.gain_N.sum(), lp_N)
    assert (result.gain_N.item(), slope_N.item()) == pytest.approx((value, slope), abs=1e-5)
    assert (bool(result.low_N), bool(result.high_N)) == (end == "low", end == "high")


def test_the_ratio_of_a_sequence_is_the_geometric_mean_of_its_tokens() -> None:
    lp_N = torch.tensor([-1.0, -1.0, -2.0], requires_grad=True)
    old_N = torch.tensor([-1.3, -2.4, -0.9])
    ratio_N = sequence_ratio(lp_N, old_N, Segments(torch.tensor([0, 1, 0]), 2))
    # sequence 0 has the log ratios 0.3 and -1.1, mean -0.4; sequence 1 has 1.4
    assert ratio_N.tolist() == pytest.approx([math.exp(-0.4), math.exp(1.4), math.exp(-0.4)])
    (slope_N,) = torch.autograd.grad(ratio_N.sum(), lp_N)
    # d s / d lp_t is s / |o| in GSPO; here each of the |o| tokens bears s, and the mean over them is the same
    assert slope_N.tolist() == pytest.approx(ratio_N.tolist())


@pytest.mark.parametrize("ratio", [token_ratio, sequence_ratio])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_a_ratio_beyond_fp32_makes_no_nan(ratio, advantage: float) -> None:
    lp_N = torch.tensor([-0.1, -200.0], requires_grad=True)
    ratio_N = ratio(lp_N, torch.tensor([-120.0, -0.1]), Segments(torch.tensor([0, 1]), 2))
    clipped(ratio_N, lp_N, torch.full((2,), advantage), LossConfig()).gain_N.sum().backward()
    assert lp_N.grad is not None and lp_N.grad.isfinite().all()


# ---------------------------------------------------------------- weights against the mismatch of trainer and server

# Two sequences: w of the tokens is 1.5, 3, 0.25 and, in the other one, 0.8 and (not known) 1.
W = [1.5, 3.0, 0.25, 0.8, 1.0]
SEGMENTS = Segments(torch.tensor([0, 0, 0, 1, 1]), 2)


def correct(kind, level, cap: float = 2.0) -> Correction:
    old_N = torch.tensor([-1.0] * 5, requires_grad=True)
    rollout_N = torch.tensor([-1.0 - math.log(w) for w in W[:4]] + [-50.0])
    known_N = torch.tensor([True] * 4 + [False])
    return mismatch_correction(old_N, rollout_N, known_N, SEGMENTS, kind=kind, level=level, cap=cap)


@pytest.mark.parametrize(
    ("kind", "level", "weights", "cut"),
    [
        ("none", "token", [1, 1, 1, 1, 1], [0, 0, 0, 0, 0]),
        ("truncate", "token", [1.5, 2, 0.25, 0.8, 1], [0, 1, 0, 0, 0]),  # min(w, 2): 3 is cut
        ("mask", "token", [1.5, 0, 0, 0.8, 1], [0, 1, 1, 0, 0]),  # 3 is above 2, 0.25 below 1 / 2
        ("truncate", "sequence", [1.125] * 3 + [0.8] * 2, [0] * 5),  # 1.5 * 3 * 0.25 = 1.125; 0.8 * 1
        ("mask", "sequence", [1.125] * 3 + [0.8] * 2, [0] * 5),
    ],
)
def test_correction_by_hand(kind, level, weights: list[float], cut: list[int]) -> None:
    got = correct(kind, level)
    assert got.weights_N.tolist() == pytest.approx(weights)
    assert got.cut_N.tolist() == [bool(each) for each in cut]
    assert not got.weights_N.requires_grad  # the weight is a constant


def test_whole_sequences_are_cut_at_their_own_weight() -> None:
    assert correct("truncate", "sequence", 1.1).weights_N.tolist() == pytest.approx([1.1] * 3 + [0.8] * 2)
    masked = correct("mask", "sequence", 1.1)  # 1.125 is above 1.1, 0.8 below 1 / 1.1 = 0.909
    assert masked.weights_N.tolist() == [0.0] * 5 and masked.cut_N.all()


def test_a_weight_beyond_fp32_is_cut_like_any_other() -> None:
    old_N, rollout_N = torch.tensor([-0.1, -0.1]), torch.tensor([-150.0, -0.1])
    known_N = torch.tensor([True, True])
    segments = Segments(torch.tensor([0, 1]), 2)
    options = (old_N, rollout_N, known_N, segments)
    assert mismatch_correction(*options, kind="truncate", level="token", cap=2.0).weights_N.tolist() == [2.0, 1.0]
    assert mismatch_correction(*options, kind="mask", level="token", cap=2.0).weights_N.tolist() == [0.0, 1.0]


# ---------------------------------------------------------------- divergence and distillation


@pytest.mark.parametrize(
    ("estimator", "above", "below", "slopes"),
    [
        ("k1", 0.5, -0.5, (1.0, 1.0)),  # x
        ("k2", 0.125, 0.125, (0.5, -0.5)),  # x^2 / 2; derivative x
        # exp(-0.5) + 0.5 - 1 = 0.106531, exp(0.5) - 0.5 - 1 = 0.148721; derivative 1 - exp(-x)
        ("k3", 0.106531, 0.148721, (0.393469, -0.648721)),
    ],
)
def test_divergence_by_hand(estimator: KlEstimator, above: float, below: float, slopes: tuple[float, float]) -> None:
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
