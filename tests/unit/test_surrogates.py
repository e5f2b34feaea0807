"""Ratios and surrogates by hand: each sign of the advantage, each side of each clip."""

from __future__ import annotations

import math

import pytest
import torch

from grpo_trainer.config.loss import LossConfig
from grpo_trainer.losses.segments import Segments
from grpo_trainer.losses.surrogates import Surrogate, cispo, clipped, sapo, sequence_ratio, token_ratio


def gain(
    ratio: float, advantage: float, config: LossConfig, surrogate=clipped, lp: float = -1.0
) -> tuple[float, float, Surrogate]:
    """Of one token: its gain, the gain's derivative by its logprob, and all that the surrogate says."""
    lp_N = torch.tensor([lp], requires_grad=True)
    ratio_N = token_ratio(lp_N, torch.tensor([lp - math.log(ratio)]), Segments(torch.tensor([0]), 1))
    result = surrogate(ratio_N, lp_N, torch.tensor([advantage]), config)
    (slope,) = torch.autograd.grad(result.gain_N.sum(), lp_N)
    return result.gain_N.item(), slope.item(), result


# ratio, advantage -> gain, its derivative by lp; clip range [0.8, 1.2]. d ratio / d lp = ratio
CASES = [
    (1.0, 2.0, 2.0, 2.0),  # inside: 1 * 2; derivative ratio * A = 2
    (1.5, 1.0, 1.2, 0.0),  # too high, A > 0: min(1.5, 1.2), no gradient
    (0.5, 1.0, 0.5, 0.5),  # too low, A > 0: min(0.5, 0.8) = 0.5, the gradient stays
    (0.5, -1.0, -0.8, 0.0),  # too low, A < 0: min(-0.5, -0.8) = -0.8, no gradient
    (1.5, -1.0, -1.5, -1.5),  # too high, A < 0: min(-1.5, -1.2) = -1.5, the gradient stays
]


@pytest.mark.parametrize(("ratio", "advantage", "value", "slope"), CASES)
def test_clipped_for_both_signs_and_sides(ratio: float, advantage: float, value: float, slope: float) -> None:
    got = gain(ratio, advantage, LossConfig())
    assert got[:2] == pytest.approx((value, slope), abs=1e-6)


def test_clip_higher_moves_only_the_upper_bound() -> None:
    config = LossConfig(clip_eps_high=0.28)
    assert gain(1.25, 1.0, config)[:2] == pytest.approx((1.25, 1.25))  # below 1.28: not clipped
    assert gain(1.30, 1.0, config)[:2] == pytest.approx((1.28, 0.0))
    assert gain(0.7, -1.0, config)[:2] == pytest.approx((-0.8, 0.0))  # still clipped at 0.8


# ratio, advantage -> gain, derivative, held by the clip; clip range [0.8, 1.2], dual clip 3
DUAL = [
    (2.9, -2.0, -5.8, -5.8, False),  # min(-5.8, -2.4) = -5.8 is above 3 * -2 = -6
    (4.0, -2.0, -6.0, 0.0, True),  # min(-8, -2.4) = -8, max(-8, -6) = -6: no gradient
    (4.0, 2.0, 2.4, 0.0, True),  # A > 0: the plain clip, 1.2 * 2
    (0.5, -2.0, -1.6, 0.0, False),  # the lower end as ever: 0.8 * -2
]


@pytest.mark.parametrize(("ratio", "advantage", "value", "slope", "high"), DUAL)
def test_dual_clip_bounds_what_a_bad_token_costs(
    ratio: float, advantage: float, value: float, slope: float, high: bool
) -> None:
    got = gain(ratio, advantage, LossConfig(dual_clip=3.0))
    assert got[:2] == pytest.approx((value, slope), abs=1e-5)
    assert bool(got[2].high_N) is high


def test_clip_marks_only_tokens_that_lose_their_gradient() -> None:
    marks = {(ratio, a): gain(ratio, a, LossConfig())[2] for ratio in (0.5, 1.0, 1.5) for a in (-1.0, 1.0)}
    assert [key for key, s in marks.items() if s.low_N] == [(0.5, -1.0)]
    assert [key for key, s in marks.items() if s.high_N] == [(1.5, 1.0)]


# ratio, advantage -> gain, derivative; weights are cut at 1.2, lp = -0.5
CISPO = [
    (1.0, 2.0, -1.0, 2.0),  # 1 * 2 * -0.5; the weight is a constant, so the derivative is 1 * 2
    (1.5, 1.0, -0.6, 1.2),  # 1.2 * 1 * -0.5: cut, but the gradient stays
    (1.5, -1.0, 0.6, -1.2),  # for both signs
    (0.1, 1.0, -0.05, 0.1),  # not cut from below
]


@pytest.mark.parametrize(("ratio", "advantage", "value", "slope"), CISPO)
def test_cispo_weighs_the_gradient_of_the_logprob(ratio: float, advantage: float, value: float, slope: float) -> None:
    got = gain(ratio, advantage, LossConfig(loss="cispo"), cispo, lp=-0.5)
    assert got[:2] == pytest.approx((value, slope), abs=1e-6)
    assert bool(got[2].high_N) is (ratio > 1.2) and not got[2].low_N


# ratio, advantage -> gain, derivative; tau 1 where A > 0, 2 elsewhere; s(x) = 1 / (1 + exp(-x))
SAPO = [
    (1.0, 3.0, 6.0, 3.0),  # 4 / 1 * s(0) * 3 = 6; derivative 4 s (1 - s) ratio A = 4 * 0.25 * 1 * 3
    (1.0, -3.0, -3.0, -3.0),  # 4 / 2 * s(0) * -3 = -3; the slope at 1 is A whatever tau is
    (2.0, 1.0, 2.924234, 1.572896),  # 4 s(1) = 4 * 0.7310586; 4 * 0.7310586 * 0.2689414 * 2
    (2.0, -1.0, -1.761594, -0.839949),  # 2 s(2) = 2 * 0.8807971; 4 * 0.8807971 * 0.1192029 * 2
    (0.5, -1.0, -0.537883, -0.393224),  # 2 s(-1) = 2 * 0.2689414; 4 * 0.2689414 * 0.7310586 * 0.5
]


@pytest.mark.parametrize(("ratio", "advantage", "value", "slope"), SAPO)
def test_sapo_gates_softly_by_the_sign_of_the_advantage(
    ratio: float, advantage: float, value: float, slope: float
) -> None:
    got = gain(ratio, advantage, LossConfig(loss="sapo", sapo_tau_neg=2.0), sapo)
    assert got[:2] == pytest.approx((value, slope), abs=1e-5)
    assert not got[2].high_N and not got[2].low_N


def test_the_ratio_of_a_sequence_is_the_geometric_mean_of_its_tokens() -> None:
    lp_N = torch.tensor([-1.0, -1.0, -2.0], requires_grad=True)
    old_N = torch.tensor([-1.3, -2.4, -0.9])
    ratio_N = sequence_ratio(lp_N, old_N, Segments(torch.tensor([0, 1, 0]), 2))
    # sequence 0 has the log ratios 0.3 and -1.1, mean -0.4; sequence 1 has 1.4
    assert ratio_N.tolist() == pytest.approx([math.exp(-0.4), math.exp(1.4), math.exp(-0.4)])
    (slope_N,) = torch.autograd.grad(ratio_N.sum(), lp_N)
    # d s / d lp_t is s / |o| in GSPO; here each of the |o| tokens bears s, and the mean over them is the same
    assert slope_N.tolist() == pytest.approx(ratio_N.tolist())


def test_gspo_has_the_gradient_of_the_papers_formula() -> None:
    """s = exp(mean(lp - old)), loss min(s A, clip(s) A) once a sequence: equation 5 of arXiv 2507.18071."""
    torch.manual_seed(0)
    lp, old = torch.randn(5, dtype=torch.float64, requires_grad=True), torch.randn(5, dtype=torch.float64) * 0.1
    segments = Segments(torch.tensor([0, 0, 0, 1, 1]), 2)
    for advantages in ([1.0, -1.0], [-1.0, 1.0]):
        a_N = torch.tensor(advantages, dtype=torch.float64)[segments.index_N]
        own = clipped(sequence_ratio(lp, lp.detach() + old, segments), lp, a_N, LossConfig(clip_eps=0.9)).gain_N
        (got,) = torch.autograd.grad(own[:3].mean() + own[3:].mean(), lp)
        plain = torch.zeros((), dtype=torch.float64)
        for part, advantage in zip((slice(0, 3), slice(3, 5)), advantages, strict=True):
            s = torch.exp((lp[part] - (lp.detach() + old)[part]).mean())
            plain = plain + torch.min(s * advantage, s.clamp(0.1, 1.9) * advantage)
        (wanted,) = torch.autograd.grad(plain, lp)
        torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize("ratio", [token_ratio, sequence_ratio])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_a_ratio_beyond_fp32_makes_no_nan(ratio, advantage: float) -> None:
    lp_N = torch.tensor([-0.1, -200.0], requires_grad=True)
    ratio_N = ratio(lp_N, torch.tensor([-120.0, -0.1]), Segments(torch.tensor([0, 1]), 2))
    clipped(ratio_N, lp_N, torch.full((2,), advantage), LossConfig()).gain_N.sum().backward()
    assert lp_N.grad is not None and lp_N.grad.isfinite().all()
