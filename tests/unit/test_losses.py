"""The loss of a batch by hand, and against autograd of the plain formulas in float64; losses of the user's own."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from grpo_trainer import import_paths
from grpo_trainer.batch.batching import group_advantages, import_own_parts
from grpo_trainer.config.loss import LOSSES, LossConfig
from grpo_trainer.config.options import build
from grpo_trainer.engine.head import TokenScores
from grpo_trainer.errors import ConfigError
from grpo_trainer.losses import BatchCounts, LossInputs, TrainedTokens, batch_loss, token_weight
from grpo_trainer.losses.surrogates import (
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
from grpo_trainer.metrics.types import reduce
from tests.processes import ROOT
from tests.unit.factories import refusing

MAX_LEN = 7


@dataclass
class PlainSequence:
    """Trained tokens of one sequence."""

    lp: list[float]
    advantages: list[float]
    old: list[float]  # the trainer's before the first update
    roll: list[float] | None = None
    ref: list[float] | None = None
    supervised: bool = False
    leaf: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.leaf = torch.tensor(self.lp, dtype=torch.float64, requires_grad=True)


def inputs(sequences: list[PlainSequence], config: LossConfig, **changes: Any) -> LossInputs:
    """Return the loss's inputs for these sequences as one batch; `changes` are of any of its parts."""
    counts = BatchCounts(len(sequences), sum(len(s.lp) for s in sequences))

    def flat(values: list[list[float]]) -> Tensor:
        return torch.tensor([value for each in values for value in each])

    def each(values: Sequence[float]) -> Tensor:
        return torch.tensor([value for value, s in zip(values, sequences, strict=True) for _ in s.lp])

    weights = [
        token_weight(config.loss, length=len(s.lp), counts=counts, max_completion_len=MAX_LEN) for s in sequences
    ]
    nothing_NK = torch.zeros(counts.trained_tokens, 0)
    tokens = TrainedTokens(
        rows_N=each(range(len(sequences))),
        advantages_N=flat([[1.0] * len(s.lp) if s.supervised else s.advantages for s in sequences]),
        weights_N=each(weights),
        shares_N=torch.ones(counts.trained_tokens),
        rollout_logprobs_N=flat([s.roll or [0.0] * len(s.lp) for s in sequences]),
        has_rollout_N=each([s.roll is not None for s in sequences]),
        supervised_N=each([s.supervised for s in sequences]),
        teacher_logprobs_NK=nothing_NK,
        versions_B=torch.zeros(len(sequences)),
    )
    scores = TokenScores(flat([s.lp for s in sequences]).requires_grad_(), nothing_NK.sum(-1), nothing_NK)
    ref_N = flat([s.ref or [0.0] * len(s.lp) for s in sequences]) if config.kl_beta else None
    made = LossInputs(tokens, scores, counts, flat([s.old for s in sequences]), ref_N)

    def of(part: Any) -> dict[str, Any]:
        return {key: value for key, value in changes.items() if hasattr(part, key)}

    return replace(made, tokens=replace(tokens, **of(tokens)), scores=replace(scores, **of(scores)), **of(made))


def one(lp: list[float], advantage: float = 1.0, **fields: object) -> PlainSequence:
    values: dict[str, object] = {"advantages": [advantage] * len(lp), "old": list(lp), **fields}
    return PlainSequence(lp, **values)  # type: ignore[arg-type]


def gradient(case: LossInputs, config: LossConfig) -> list[float]:
    (slope_N,) = torch.autograd.grad(batch_loss(case, config).loss, case.scores.logprobs_N)
    return slope_N.tolist()


# ---------------------------------------------------------------- means, parts


def test_old_logprobs_are_the_servers_the_trainers_before_or_the_trainers_now() -> None:
    # log ratios: the server's 0.5 where it is known; the trainer's, a moment ago, 0.1; its own now, 0
    sequences = [one([-1.0], old=[-1.1], roll=[-1.5]), one([-1.0], old=[-1.1])]
    against_server, against_trainer = LossConfig(), LossConfig(ratio_against="trainer")

    def mean_ratio(config: LossConfig, **changes: object) -> float:
        return reduce(batch_loss(inputs(sequences, config, **changes), config).metrics)["grpo/mean_ratio"]

    assert mean_ratio(against_server) == pytest.approx((math.exp(0.5) + math.exp(0.1)) / 2)
    assert mean_ratio(against_trainer) == pytest.approx(math.exp(0.1))
    assert mean_ratio(against_server, old_logprobs_N=None) == pytest.approx((math.exp(0.5) + 1) / 2)
    assert mean_ratio(against_trainer, old_logprobs_N=None) == pytest.approx(1)


def test_correction_weighs_the_policys_part_alone() -> None:
    config = LossConfig(ratio_against="trainer", is_cap=1.25, kl_beta=0.1, kl_estimator="k2")
    sequences = [one([-1.0], 2.0, roll=[-1.2], ref=[-1.5]), one([-1.0], 2.0, roll=[-2.0], ref=[-1.0])]
    # w = exp(0.2) = 1.2214 and min(exp(1), 1.25) = 1.25; dapo: half of each
    # policy -(1.2214 + 1.25) * 2 / 2 = -2.4714; KL 0.1 * 0.5^2 / 2 / 2 = 0.00625
    output = batch_loss(inputs(sequences, config), config)
    numbers = reduce(output.metrics)
    assert numbers["loss/policy"] == pytest.approx(-2.4714, abs=1e-4)
    assert numbers["loss/kl"] == pytest.approx(0.00625)
    assert output.loss.item() == pytest.approx(-2.4714 + 0.00625, abs=1e-4)
    assert numbers["correction/weight_mean"] == pytest.approx((1.2214 + 1.25) / 2, abs=1e-4)
    assert numbers["correction/clipped_fraction"] == 0.5
    contained = reduce(batch_loss(inputs(sequences, LossConfig()), LossConfig()).metrics)
    assert not [key for key in contained if key.startswith("correction/")], "the ratio contains it"


@pytest.mark.parametrize(
    ("marked", "counts", "shares", "bonus", "mean", "slopes"),
    [
        # of all trained tokens, whatever the loss's mean: -0.5 * (1 + 2 + 6) / 3
        ({}, (2, 3), [1, 1, 1], -1.5, 3.0, [-0.5 / 3] * 3),
        # what counts less does so here, and the normaliser stays: -0.5 * (1 + 2 + 0.25 * 6) / 3
        ({}, (2, 3), [1, 1, 0.25], -0.75, 3.0, [-0.5 / 3, -0.5 / 3, -0.125 / 3]),
        # what is imitated has no part in it: -0.5 * (1 + 2) / 2
        ({"supervised": True}, (2, 3, 0, 1), [1, 1, 1], -0.75, 1.5, [-0.25, -0.25, 0.0]),
    ],
    ids=["mean", "stale", "imitated"],
)
def test_the_entropy_bonus_by_hand(
    marked: dict[str, bool], counts: Any, shares: list[float], bonus: float, mean: float, slopes: list[float]
) -> None:
    config = LossConfig(loss="dr_grpo", entropy_coef=0.5)
    entropy_N = torch.tensor([1.0, 2.0, 6.0], requires_grad=True)
    changes = {"entropy_N": entropy_N, "counts": BatchCounts(*counts), "shares_N": torch.tensor(shares)}
    case = inputs([one([-1.0, -1.0], 0.0), one([-1.0], 0.0, **marked)], config, **changes)
    output = batch_loss(case, config)
    assert reduce(output.metrics)["loss/entropy"] == pytest.approx(bonus)
    assert reduce(output.metrics)["grpo/entropy"] == pytest.approx(mean)
    (slope_N,) = torch.autograd.grad(output.loss, entropy_N)
    assert slope_N.tolist() == pytest.approx(slopes)
    without = reduce(batch_loss(case, LossConfig()).metrics)
    assert without["grpo/entropy"] == pytest.approx(mean) and "loss/entropy" not in without


def test_distillation_is_a_mean_over_the_places_that_have_a_teacher() -> None:
    config = LossConfig(distill_coef=2.0)
    lp_NK = torch.tensor([[-1.0], [-3.0], [-5.0]], requires_grad=True)
    changes = {
        "others_NK": lp_NK,
        "teacher_logprobs_NK": torch.tensor([[-0.1], [-0.2], [-math.inf]]),
        "shares_N": torch.tensor([1.0, 0.5, 1.0]),
        "counts": BatchCounts(sequences=2, trained_tokens=3, teacher_tokens=4),  # two more in another microbatch
    }
    output = batch_loss(inputs([one([-1.0, -1.0], 0.0), one([-1.0], 0.0)], config, **changes), config)
    assert output.loss.item() == pytest.approx(1.25)  # 2 * (1 + 0.5 * 3) / 4
    (slope_NK,) = torch.autograd.grad(output.loss, lp_NK)
    assert slope_NK.tolist() == [[-0.5], [-0.25], [0.0]]


@pytest.mark.parametrize("loss", ["gspo", "grpo", "dapo"])
def test_a_logprob_of_minus_9999_moves_neither_its_token_nor_the_others_of_its_sequence(loss: str) -> None:
    """A server says so where a token had no probability. Log ratios: 0.1, 9998, 0.3."""
    config = LossConfig(loss=loss, ratio_against="rollout")
    lost = one([-1.0, -1.0, -1.0], -2.0, roll=[-1.1, -9999.0, -1.3])
    slopes = gradient(inputs([lost], config), config)
    if loss == "gspo":  # exp((0.1 + 0.3) / 2) = 1.2214 for both; -(-2) * 1.2214 / 3 = 0.8143
        assert slopes == pytest.approx([0.8143, 0.0, 0.8143], abs=1e-4)
    else:  # exp(0.1) = 1.1052, exp(0.3) = 1.3499: 2 / 3 of these
        assert slopes == pytest.approx([0.7368, 0.0, 0.8999], abs=1e-4)


@pytest.mark.parametrize("loss", LOSSES)
def test_loss_of_a_logprob_that_is_no_number_is_none(loss: str) -> None:
    config = LossConfig(loss=loss)
    assert math.isnan(batch_loss(inputs([one([-1.0, -1.0], roll=[math.nan, -1.0])], config), config).loss.item())


@pytest.mark.parametrize("loss", LOSSES)
def test_loss_slope_at_a_ratio_of_1_is_the_advantage(loss: str) -> None:
    config = LossConfig(loss=loss)
    tokens = 2 * MAX_LEN if LOSSES[loss].mean == "constant" else 2
    slopes = gradient(inputs([one([-1.0], 3.0), one([-0.5], -2.0)], config), config)
    assert slopes == pytest.approx([-3 / tokens, 2 / tokens])


def test_supervision_is_the_logprob_itself_and_no_sample_of_the_policy() -> None:
    config = LossConfig(kl_beta=1.0, clip_eps=0.1)
    marked = one([-4.0, -4.0], supervised=True, ref=[-1.0, -1.0], old=[-9.0, -9.0])  # a ratio that would be clipped
    case = inputs([marked, one([-1.0, -2.0], 0.0, roll=[-1.0, -1.5], ref=[-1.0, -2.0])], config)
    numbers = reduce(batch_loss(case, config).metrics)
    assert numbers["loss/supervised"] == pytest.approx(2.0)  # (4 + 4) / 4
    assert gradient(case, config)[:2] == pytest.approx([-0.25, -0.25])
    assert numbers["loss/policy"] == 0 and numbers["loss/kl"] == pytest.approx(0)
    assert numbers["grpo/clipped_fraction"] == 0
    assert numbers["grpo/mean_ratio"] == pytest.approx((1 + math.exp(-0.5)) / 2)
    assert numbers["alignment/kl_reference"] == pytest.approx(0)


def test_loss_metrics_by_hand() -> None:
    numbers = reduce(batch_loss(inputs([one([-1.0], roll=[-1.5]), one([-2.0])], LossConfig()), LossConfig()).metrics)
    assert numbers["alignment/logprob_diff_mean"] == pytest.approx(0.5)
    assert numbers["alignment/logprob_diff_max"] == pytest.approx(0.5)
    # k3 of tokens that the server sampled, with x = roll - lp = -0.5: exp(0.5) - 0.5 - 1 = 0.14872
    assert numbers["alignment/kl_rollout"] == pytest.approx(0.14872, abs=1e-5)
    assert numbers["logprobs/rollout_mean"] == -1.5 and numbers["logprobs/trainer_mean"] == -1.5

    # weights exp(old - roll) of the tokens whose logprob is known: 1, 1 and exp(log 4) = 4
    marked = one([-9.0, -9.0], roll=[-1.0, -2.0], old=[-1.0, -2.0])
    case = inputs([marked, one([-9.0], roll=[-3.0], old=[-3.0 + math.log(4)]), one([-2.0], old=[-7.0])], LossConfig())
    # (1 + 1 + 4)² / (3 (1 + 1 + 16)) = 36 / 54
    assert reduce(batch_loss(case, LossConfig()).metrics)["alignment/ess"] == pytest.approx(36 / 54, abs=1e-5)

    case = inputs([one([-1.0], 0.0)], LossConfig(log_kl=True), ref_logprobs_N=torch.tensor([-1.5]))
    output = batch_loss(case, LossConfig(log_kl=True, kl_estimator="k1"))
    assert reduce(output.metrics)["alignment/kl_reference"] == pytest.approx(0.10653, abs=1e-5)
    assert output.loss.item() == 0

    logs = [math.log(ratio) for ratio in (1.5, 1.5, 0.5, 0.5)]
    sequence = PlainSequence(logs, advantages=[1.0, -1.0, -1.0, 1.0], old=[0.0] * 4)
    numbers = reduce(batch_loss(inputs([sequence], LossConfig()), LossConfig()).metrics)
    assert numbers["grpo/clipped_high"] == 0.25  # 1.5 with A > 0
    assert numbers["grpo/clipped_low"] == 0.25  # 0.5 with A < 0
    assert numbers["grpo/clipped_fraction"] == 0.5
    assert numbers["grpo/mean_ratio"] == pytest.approx(1.0)
    assert numbers["grpo/max_ratio"] == pytest.approx(1.5)


def test_a_microbatch_without_trained_tokens_has_a_loss_of_0() -> None:
    config = LossConfig(kl_beta=0.1, distill_coef=1.0, entropy_coef=0.1)
    counts = BatchCounts(2, trained_tokens=10, teacher_tokens=3)
    case = inputs([one([-1.0], ref=[-1.0])], config, counts=counts)

    def emptied(part: Any) -> Any:
        return replace(part, **{name: value[:0] for name, value in vars(part).items() if name.endswith(("_N", "_NK"))})

    empty = replace(emptied(case), tokens=emptied(case.tokens), scores=emptied(case.scores), old_logprobs_N=None)
    output = batch_loss(empty, config)
    assert output.loss.item() == 0 and reduce(output.metrics)["grpo/max_ratio"] == 0


# ---------------------------------------------------------------- all of it, in float64


def plain_loss(sequences: Sequence[PlainSequence], config: LossConfig) -> Tensor:
    """The loss once more, the plain way: in float64, sequence by sequence, straight from the formulas."""
    tokens = sum(len(sequence.lp) for sequence in sequences)
    total = torch.zeros((), dtype=torch.float64)
    for sequence in sequences:
        per_token = _tokens(sequence, config)
        match config.loss:
            case "grpo" | "gspo" | "sapo":
                total = total + per_token.mean() / len(sequences)
            case "dapo" | "bnpo" | "cispo":
                total = total + per_token.sum() / tokens
            case "dr_grpo":
                total = total + per_token.sum() / (len(sequences) * MAX_LEN)
    return total


def _tokens(s: PlainSequence, config: LossConfig) -> Tensor:
    lp = s.leaf
    if s.supervised:
        return -lp
    a, own = (torch.tensor(x, dtype=torch.float64) for x in (s.advantages, s.old))
    roll = own if s.roll is None else torch.tensor(s.roll, dtype=torch.float64)
    log_ratio = lp - (roll if config.ratio_against == "rollout" else own)
    if config.loss == "gspo":
        log_ratio = log_ratio.mean().expand(len(lp))
    ratio = torch.exp(log_ratio)
    low, high = 1 - config.clip_eps, 1 + config.eps_high
    if config.loss == "cispo":
        gain = ratio.detach().clamp(max=high) * a * lp
    elif config.loss == "sapo":
        tau = torch.where(a > 0, config.sapo_tau_pos, config.sapo_tau_neg)
        gain = 4 / tau * torch.sigmoid(tau * (ratio - 1)) * a
    else:
        gain = torch.min(ratio * a, ratio.clamp(low, high) * a)
        if config.dual_clip is not None:
            gain = torch.where(a < 0, torch.max(gain, config.dual_clip * a), gain)
    loss = -_weights(own - roll, config) * gain
    if config.kl_beta and s.ref is not None:
        x = lp - torch.tensor(s.ref, dtype=torch.float64)
        kl = {"k1": x, "k2": x**2 / 2, "k3": torch.exp(-x) + x - 1}[config.kl_estimator]
        kl = kl * ratio if config.kl_unbiased else kl
        loss = loss + config.kl_beta * kl
    return loss


def _weights(log_w: Tensor, config: LossConfig) -> Tensor:
    if config.correction == "none":
        return torch.ones_like(log_w)
    w = torch.exp(log_w.sum().expand(len(log_w)) if config.is_level == "sequence" else log_w)
    if config.correction == "truncate":
        return torch.minimum(w, torch.tensor(config.is_cap, dtype=torch.float64))
    return torch.where((w >= 1 / config.is_cap) & (w <= config.is_cap), w, 0.0)


def near_a_corner(sequences: Sequence[PlainSequence], config: LossConfig) -> bool:
    """Whether a ratio or weight lies where fp32 and float64 may fall on different sides of an edge."""
    edges = [1 - config.clip_eps, 1 + config.eps_high, config.dual_clip or 1.0, config.is_cap, 1 / config.is_cap]
    for s in sequences:
        roll = s.old if s.roll is None else s.roll
        logs = [[a - b for a, b in zip(s.lp, other, strict=True)] for other in (s.old, roll)]
        logs.append([a - b for a, b in zip(s.old, roll, strict=True)])
        for log in logs:
            values = [*log, sum(log), sum(log) / len(log)]
            if any(abs(math.exp(value) - edge) < 1e-4 for value in values for edge in edges if edge != 1.0):
                return True
    return False


@st.composite
def any_sequences(draw: st.DrawFn) -> list[PlainSequence]:
    made = []
    for _ in range(draw(st.integers(1, 4))):
        length = draw(st.integers(1, 5))
        values = st.lists(st.floats(-3, -0.01), min_size=length, max_size=length)
        advantages = draw(st.one_of(st.floats(-2, 2).map(lambda a: [a] * 5), st.just([1.5, -0.5] * 3)))[:length]
        made.append(
            PlainSequence(
                lp=draw(values),
                advantages=advantages,
                old=draw(values),
                roll=draw(st.none() | values),
                ref=draw(values),
                supervised=draw(st.integers(0, 5)) == 0,
            )
        )
    return made


@st.composite
def any_config(draw: st.DrawFn) -> LossConfig:
    loss = draw(st.sampled_from([*LOSSES]))
    against = draw(st.sampled_from(["rollout", "trainer"]))
    kind = draw(st.sampled_from(["auto", "none", "truncate", "mask"] if against == "trainer" else ["auto", "none"]))
    return LossConfig(
        loss=loss,
        clip_eps_high=draw(st.sampled_from([None, 0.28, 4.0])),
        dual_clip=None if LOSSES[loss].surrogate != "clipped" else draw(st.sampled_from([None, 3.0])),
        sapo_tau_neg=draw(st.sampled_from([1.05, 2.0])),
        ratio_against=against,  # type: ignore[arg-type]
        is_correction=kind,  # type: ignore[arg-type]
        is_level=draw(st.sampled_from(["token", "sequence"])),
        is_cap=draw(st.sampled_from([2.0, 1.3])),
        kl_beta=draw(st.sampled_from([0.0, 0.04])),
        kl_estimator=draw(st.sampled_from(["k1", "k2", "k3"])),
        kl_unbiased=draw(st.booleans()),
    )


@settings(max_examples=300)
@given(any_sequences(), any_config())
def test_loss_equals_the_plain_formulas_in_float64(sequences: list[PlainSequence], config: LossConfig) -> None:
    if near_a_corner(sequences, config):
        return  # there the gradient is either side's
    by_token = config.kl_unbiased or (config.correction != "none" and config.is_level == "token")
    if config.loss == "gspo" and (by_token or any(len(set(s.advantages)) > 1 for s in sequences)):
        return  # the plain formula has one factor a sequence, and shares its ratio's gradient among all tokens
    for s in sequences:
        s.roll = None if s.supervised else s.roll
    case = inputs(sequences, config)
    output = batch_loss(case, config)
    plain = plain_loss(sequences, config)
    assert output.loss.item() == pytest.approx(plain.item(), rel=1e-4, abs=1e-4)
    (got_N,) = torch.autograd.grad(output.loss, case.scores.logprobs_N)
    wanted = torch.autograd.grad(plain, [s.leaf for s in sequences])
    torch.testing.assert_close(got_N.double(), torch.cat(list(wanted)), rtol=1e-3, atol=1e-4)


# terms ---------------------------------------------------------------------------------------------------------------


PPO, HIGHER, DUAL = LossConfig(), LossConfig(clip_eps_high=0.28), LossConfig(dual_clip=3.0)
SAPO = LossConfig(loss="sapo", sapo_tau_neg=2.0)
"""Temperatures 1 where A > 0, 2 elsewhere; s(x) = 1 / (1 + exp(-x))."""
# surrogate, ratio, advantage -> gain, its derivative by lp, the end that clips it. lp = -0.5, d ratio / d lp = ratio
CASES = [
    (clipped, PPO, 1.5, 1.0, 1.2, 0.0, "high"),  # too high, A > 0: min(1.5, 1.2), no gradient
    (clipped, PPO, 0.5, 1.0, 0.5, 0.5, ""),  # too low, A > 0: min(0.5, 0.8) = 0.5, the gradient stays
    (clipped, PPO, 0.5, -1.0, -0.8, 0.0, "low"),  # too low, A < 0: min(-0.5, -0.8) = -0.8, no gradient
    (clipped, PPO, 1.5, -1.0, -1.5, -1.5, ""),  # too high, A < 0: min(-1.5, -1.2) = -1.5, the gradient stays
    (clipped, HIGHER, 1.25, 1.0, 1.25, 1.25, ""),  # below 1.28: not clipped
    (clipped, HIGHER, 1.30, 1.0, 1.28, 0.0, "high"),
    (clipped, DUAL, 2.9, -2.0, -5.8, -5.8, ""),  # min(-5.8, -2.4) = -5.8 is above 3 * -2 = -6
    (clipped, DUAL, 4.0, -2.0, -6.0, 0.0, "high"),  # min(-8, -2.4) = -8, max(-8, -6) = -6: no gradient
    (clipped, DUAL, 4.0, 2.0, 2.4, 0.0, "high"),  # A > 0: the plain clip, 1.2 * 2
    (cispo, PPO, 1.5, 1.0, -0.6, 1.2, "high"),  # 1.2 * 1 * -0.5: cut, but the gradient stays
    (cispo, PPO, 1.5, -1.0, 0.6, -1.2, "high"),  # for both signs
    (cispo, PPO, 0.1, 1.0, -0.05, 0.1, ""),  # not cut from below
    (sapo, SAPO, 2.0, 1.0, 2.924234, 1.572896, ""),  # 4 s(1) = 4 * 0.7310586; 4 * 0.7310586 * 0.2689414 * 2
    (sapo, SAPO, 2.0, -1.0, -1.761594, -0.839949, ""),  # 2 s(2) = 2 * 0.8807971; 4 * 0.8807971 * 0.1192029 * 2
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


@pytest.mark.parametrize("ratio", [token_ratio, sequence_ratio])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_terms_beyond_fp32_make_no_nan(ratio: Any, advantage: float) -> None:
    lp_N, old_N = torch.tensor([-0.1, -200.0], requires_grad=True), torch.tensor([-120.0, -0.1])
    of_two = Segments(torch.tensor([0, 1]), 2)
    gain_N = clipped(ratio(lp_N, old_N, of_two), lp_N, torch.full((2,), advantage), LossConfig()).gain_N
    (gain_N + divergence(lp_N, old_N, "k3")).sum().backward()
    assert lp_N.grad is not None and lp_N.grad.isfinite().all()
    old_N, rollout_N = torch.tensor([-0.1, -0.1]), torch.tensor([-150.0, -0.1])
    kinds: dict[Any, float] = {"truncate": 2.0, "mask": 0.0}
    for kind, weight in kinds.items():
        known_N = torch.tensor([True, True])
        found = mismatch_correction(old_N, rollout_N, known_N, of_two, kind=kind, level="token", cap=2.0)
        assert found.weights_N.tolist() == [weight, 1.0]


# ---------------------------------------------------------------- weights against the mismatch of trainer and server

# Two sequences: w of the tokens is 1.5, 3, 0.25 and, in the other one, 0.8 and (not known) 1.
W = [1.5, 3.0, 0.25, 0.8, 1.0]
SEGMENTS = Segments(torch.tensor([0, 0, 0, 1, 1]), 2)


@pytest.mark.parametrize(
    ("kind", "level", "cap", "weights", "cut"),
    [
        ("none", "token", 2.0, [1, 1, 1, 1, 1], [0, 0, 0, 0, 0]),
        ("truncate", "token", 2.0, [1.5, 2, 0.25, 0.8, 1], [0, 1, 0, 0, 0]),  # min(w, 2): 3 is cut
        ("mask", "token", 2.0, [1.5, 0, 0, 0.8, 1], [0, 1, 1, 0, 0]),  # 3 is above 2, 0.25 below 1 / 2
        ("mask", "sequence", 2.0, [1.125] * 3 + [0.8] * 2, [0] * 5),  # 1.5 * 3 * 0.25 = 1.125; 0.8 * 1
        ("truncate", "sequence", 1.1, [1.1] * 3 + [0.8] * 2, [1] * 3 + [0] * 2),
        ("mask", "sequence", 1.1, [0] * 5, [1] * 5),  # 1.125 is above 1.1, 0.8 below 1 / 1.1 = 0.909
    ],
)
def test_correction_by_hand(kind, level, cap: float, weights: list[float], cut: list[int]) -> None:
    old_N = torch.tensor([-1.0] * 5, requires_grad=True)
    rollout_N = torch.tensor([-1.0 - math.log(w) for w in W[:4]] + [-50.0])
    known_N = torch.tensor([True] * 4 + [False])
    got = mismatch_correction(old_N, rollout_N, known_N, SEGMENTS, kind=kind, level=level, cap=cap)
    assert got.weights_N.tolist() == pytest.approx(weights)
    assert got.cut_N.tolist() == [bool(each) for each in cut]
    assert not got.weights_N.requires_grad  # the weight is a constant


# ---------------------------------------------------------------- distillation


def test_teacher_cross_entropy_by_hand() -> None:
    # teacher 0.6, 0.2 of the whole, so 3/4, 1/4 of the two; at temperature 2: sqrt 3 to 1
    teacher_NK = torch.log(torch.tensor([[0.6, 0.2]]))
    lp_NK = torch.log(torch.tensor([[0.5, 0.1]])).requires_grad_()
    first = math.sqrt(3) / (1 + math.sqrt(3))
    for temperature, share in ((1.0, 0.75), (2.0, first)):
        cross_N = teacher_cross_entropy(lp_NK, teacher_NK, temperature)
        assert cross_N.item() == pytest.approx(-share * math.log(0.5) - (1 - share) * math.log(0.1))
        (slope,) = torch.autograd.grad(cross_N.sum(), lp_NK)
        assert slope.tolist() == [pytest.approx([-share, share - 1])]
    nothing = -math.inf
    teacher_NK = torch.tensor([[-0.1, nothing], [nothing, nothing]])
    lp_NK = torch.tensor([[-2.0, -7.0], [-3.0, -4.0]], requires_grad=True)
    cross_N = teacher_cross_entropy(lp_NK, teacher_NK, 0.5)
    assert cross_N.tolist() == [2.0, 0.0]  # all of the first one's weight is on its one token
    assert torch.autograd.grad(cross_N.sum(), lp_NK)[0].tolist() == [[-1.0, 0.0], [0.0, 0.0]]
    assert teacher_cross_entropy(torch.zeros(3, 0), torch.zeros(3, 0), 1.0).tolist() == [0.0] * 3


# losses and estimates of advantages of the user's own, by import path: those of docs/training.md ----------------------


@pytest.fixture
def parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with the page's module, in which the command is started."""
    (text,) = re.findall(r"```python\n(import torch.*?)```", (ROOT / "docs/training.md").read_text(), re.DOTALL)
    (tmp_path / "my_parts.py").write_text(text + "\nnumber = 1\n\n\ndef short(rewards):\n    return rewards[1:]\n")
    (tmp_path / "broken_parts.py").write_text("import nowhere\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    import_paths.load.cache_clear()


def test_the_pages_loss_has_the_unclipped_gradient(parts: Path) -> None:
    config = LossConfig(loss="my_parts:my_loss")
    case = inputs([one([-1.0, -1.0], 2.0, roll=[-1.0, -3.0])], config)
    # ratios 1 and exp(2) = 7.389, which a clip at 1.2 would hold: -2 x ratio / 2
    assert gradient(case, config) == pytest.approx([-1.0, -7.389], abs=1e-3)


def test_the_pages_advantages_are_ranks(parts: Path) -> None:
    assert group_advantages([0.1, 0.9, 0.5], estimator="my_parts:ranks") == [-1.0, 1.0, 0.0]
    assert group_advantages([0.5, 0.5], estimator="my_parts:ranks") == [0.0, 0.0]
    with refusing(ConfigError, "--advantage-estimator"):  # too few
        group_advantages([0.0, 1.0], estimator="my_parts:short")


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"loss": "my_parts:nothing"}, "--loss"),
        ({"loss": "my_parts:number"}, "--loss"),
        ({"loss": "broken_parts:loss"}, "--loss"),
        ({"advantage_estimator": "my_parts:number"}, "--advantage-estimator"),
    ],
)
def test_what_is_not_there_or_of_another_kind_is_named_before_training(
    parts: Path, options: dict[str, str], field: str
) -> None:
    with refusing(ConfigError, field) as refused:
        import_own_parts(LossConfig(**options))  # type: ignore[arg-type]
    assert refused.value.got


@pytest.mark.parametrize(
    "name", ["no_such_package:loss", "my_parts:", ":loss", "my parts:loss", "a:b:c", "dappo", "my_parts.my_loss"]
)
def test_what_can_be_neither_a_name_nor_a_path_is_refused_with_the_options(name: str) -> None:
    with refusing(ConfigError, "--loss") as refused:
        build(LossConfig, {"loss": name})
    assert refused.value.got and refused.value.wanted
