"""From groups to a batch: advantages, weights of the whole batch, what is skipped, metrics; by hand and by property."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_trainer.batch.batching import ReadyBatch, group_advantages, is_zero_variance, prepare
from grpo_trainer.batch.microbatches import split
from grpo_trainer.config.loss import LossConfig
from grpo_trainer.metrics.types import reduce
from grpo_trainer.rollouts.groups import Sample
from tests.unit.factories import batch, sample, untrained

# ---------------------------------------------------------------- advantages

REWARDS = st.lists(st.floats(-10, 10).map(lambda x: round(x, 3)), min_size=2, max_size=16)


@pytest.mark.parametrize(
    ("rewards", "scale", "estimator", "advantages"),
    [
        # mean 0.25, centred -0.25 -0.25 -0.25 0.75, sum of squares 0.75, std = sqrt(0.75 / 3) = 0.5
        ([0, 0, 0, 1], "group", "group", [-0.25 / 0.5001] * 3 + [0.75 / 0.5001]),
        ([1, 2, 6], "none", "group", [-2, -1, 3]),
        # 1 - (2 + 6) / 2 = -3, 2 - (1 + 6) / 2 = -1.5, 6 - (1 + 2) / 2 = 4.5
        ([1, 2, 6], "none", "rloo", [-3, -1.5, 4.5]),
        # divided on request: std = sqrt((4 + 1 + 9) / 2) = sqrt 7
        ([1, 2, 6], "group", "rloo", [v / (7**0.5 + 1e-4) for v in (-3, -1.5, 4.5)]),
        ([3.0], "none", "rloo", [0.0]),  # there are no others
    ],
)
def test_group_advantages_by_hand(rewards: list[float], scale: Any, estimator: str, advantages: list[float]) -> None:
    assert group_advantages(rewards, scale, estimator) == pytest.approx(advantages)


def test_advantage_scale_follows_the_loss() -> None:
    assert LossConfig(loss="dr_grpo").advantage_scale == "none"
    assert LossConfig(loss="dr_grpo", scale_rewards="group").advantage_scale == "group"
    assert LossConfig(advantage_estimator="rloo").advantage_scale == "none"
    others = ("dapo", "grpo", "bnpo", "gspo", "cispo", "sapo")
    assert {LossConfig(loss=loss).advantage_scale for loss in others} == {"group"}


def test_group_advantages_of_equal_rewards_are_0_and_of_nearly_equal_ones_small() -> None:
    assert group_advantages([0.1] * 3) == [0.0] * 3  # 0.1 is not exact: a mean would leave noise to amplify
    assert is_zero_variance([0.1] * 3) and not is_zero_variance([0.1, 0.2])
    assert max(map(abs, group_advantages([1.0, 1.0 + 1e-9]))) < 1e-4


@given(REWARDS, st.floats(-5, 5), st.randoms(use_true_random=False))
def test_group_advantages_sum_to_0_keep_the_order_and_ignore_shifts(rewards: list[float], by: float, random) -> None:
    plain = group_advantages(rewards)
    assert sum(plain) == pytest.approx(0, abs=1e-6)
    assert all(a[1] <= b[1] for a, b in pairwise(sorted(zip(rewards, plain, strict=True))))
    order = list(range(len(rewards)))
    random.shuffle(order)
    assert group_advantages([rewards[i] + by for i in order]) == pytest.approx([plain[i] for i in order], abs=1e-6)


# ---------------------------------------------------------------- weights, and what is trained on


def prepared(groups: Sequence[Sequence[Sample]], seq_len: int = 10, *, drop: bool = False, **loss: Any) -> ReadyBatch:
    return prepare(batch(*groups), LossConfig(**loss), seq_len, drop_overlong=drop)


def advantages(made: ReadyBatch) -> list[list[float]]:
    return [[] if one.advantages is None else one.advantages.tolist() for one in made.sequences]


def numbers(made: ReadyBatch, prefix: str = "batch/") -> dict[str, float]:
    return {k.removeprefix(prefix): v for k, v in reduce(made.metrics).items() if k.startswith(prefix)}


def test_prepare_by_hand() -> None:
    made = prepared([[sample([1, 2], [3], 1.0, logprobs=[-0.5]), sample([1, 2], [4, 5], 0.0)]])
    first, second = made.sequences
    assert first.positions.tolist() == [2] and second.positions.tolist() == [2, 3]
    # mean 0.5, std = sqrt(0.5) = 0.70711
    assert advantages(made) == [pytest.approx([0.5 / 0.70721], 1e-5), pytest.approx([-0.5 / 0.70721] * 2, 1e-5)]
    assert first.weight == second.weight == pytest.approx(1 / 3)  # dapo: 3 trained tokens
    assert first.rollout_logprobs is not None and first.rollout_logprobs.tolist() == [-0.5]
    assert second.rollout_logprobs is None and [first.number, second.number] == [0, 1]


def test_zero_variance_groups_cost_nothing_but_count_in_the_normaliser() -> None:
    dull = [sample([1], [2, 3], 1.0), sample([1], [4, 5], 1.0)]
    made = prepared([dull, [sample([1], [2], 0.0), sample([1], [3], 1.0)]])
    assert [one.number for one in made.sequences] == [2, 3] and made.sequences[0].weight == pytest.approx(1 / 6)
    found = numbers(made)
    assert (found["zero_variance_share"], found["sequences"], found["sequences_trained"]) == (0.5, 4, 2)
    assert reduce(made.metrics)["reward/mean"] == 0.75
    # from these terms there is more to learn than from rewards
    assert len(prepared([dull], kl_beta=0.1).sequences) == len(prepared([dull], entropy_coef=0.1).sequences) == 2
    taught = [sample([1], [2, 3], 1.0, teacher=[{4: -0.1}, {}]), dull[1]]
    made = prepared([taught], distill_coef=1.0)
    assert len(made.sequences) == 1 and made.counts.teacher_tokens == 1
    unused = prepared([taught])
    assert not unused.sequences and numbers(unused)["teacher_tokens"] == 1


@pytest.mark.parametrize(("drop", "kept"), [(False, 2), (True, 1)])
def test_overlong_sequences_are_cut_or_left_out(drop: bool, kept: int) -> None:
    """Left out: as if the batch had been without them, but for the mean of rewards that the others are measured by."""
    groups = [[sample([1, 2], [3, 4, 5], 1.0, logprobs=[-1, -2, -3]), sample([1, 2], [3], 0.0)]]
    made = prepared(groups, 4, drop=drop)
    assert [one.tokens_T.tolist() for one in made.sequences] == [[1, 2, 3, 4], [1, 2, 3]][-kept:]
    assert [one.positions.tolist() for one in made.sequences] == [[2, 3], [2]][-kept:]
    assert advantages(made)[-1] == pytest.approx([-0.5 / 0.70721], 1e-5)
    if not drop:  # with the logprobs of the tokens that are left
        assert made.sequences[0].rollout_logprobs is not None
        assert made.sequences[0].rollout_logprobs.tolist() == [-1.0, -2.0]
    assert made.sequences[-1].weight == pytest.approx(1.0 if drop else 1 / 3)
    found = numbers(made)
    assert (found["dropped_overlong"], found["truncated"]) == (int(drop), int(not drop))
    assert (found["sequences"], found["trained_tokens"]) == (kept, 1 if drop else 3)
    assert prepared(groups, 2, drop=drop, loss="grpo").sequences == ()  # cut before any completion


LEFT_OUT = [{"truncated": True}, {"unscored": True}]


@pytest.mark.parametrize("why", LEFT_OUT, ids=["masked", "unscored"])
@pytest.mark.parametrize(
    ("loss", "weights"),
    [
        ("grpo", [1 / (3 * 2), 1 / (1 * 2)]),  # a mean over the tokens of each sequence, then over 2 sequences
        ("dapo", [1 / 4, 1 / 4]),  # a mean over 4 tokens
        ("dr_grpo", [1 / (2 * 8), 1 / (2 * 8)]),  # divided by 2 sequences of 8 tokens
    ],
)
def test_a_sequence_without_trained_tokens_is_in_no_denominator(
    loss: str, weights: list[float], why: dict[str, bool]
) -> None:
    group = [sample([1], [2, 3, 4], 0.0), untrained(sample([1], [5, 6], 3.0), **why), sample([1], [7], 0.0)]
    made = prepared([group], loss=loss, scale_rewards="none", max_completion_len=8, entropy_coef=0.1)
    assert [one.weight for one in made.sequences] == pytest.approx(weights)
    # its reward is in the baseline unless no reward applies to it: the mean of 0, 3 and 0 is 1, that of 0 and 0 is 0
    baseline = 1.0 if "truncated" in why else 0.0
    assert advantages(made) == [[-baseline] * 3, [-baseline]]
    found = numbers(made)
    assert (found["sequences"], found["unscored"]) == (3, int("unscored" in why))
    assert numbers(made, "reward/")["mean"] == baseline
    assert numbers(made, "length/")["truncated_share"] == pytest.approx(baseline / 3)
    assert numbers(made, "length/")["completion_mean"] == 2.0  # 3 + 1 tokens of 2 trained sequences
    nothing = prepared([[group[1]] * 2])
    assert not nothing.sequences and nothing.largest_weight == 0.0
    assert numbers(nothing, "length/")["completion_mean"] == 0.0


def test_advantages_of_the_environment_are_used() -> None:
    given = [sample([1], [2, 3], 0.0, advantages=[0.25, -4.0]), sample([1], [2], 0.0, advantages=[0.0])]
    assert advantages(prepared([given])) == [[0.25, -4.0]]  # an advantage of 0 teaches nothing


def test_what_is_to_be_imitated_has_advantage_1_and_is_no_part_of_the_groups_baseline() -> None:
    imitated = sample([1], [9], 5.0, supervised=True, logprobs=[-0.5], version=3)
    made = prepared([[imitated, sample([1], [2], 0.0), sample([1], [3], 1.0)]], scale_rewards="none")
    assert advantages(made) == [[1.0], [-0.5], [0.5]]
    first = made.sequences[0]
    assert first.supervised and first.rollout_logprobs is None and first.version is None  # the policy did not sample it
    assert numbers(made, "reward/")["mean"] == 0.5 and numbers(made)["supervised"] == 1
    alone = prepared([[imitated]])
    assert len(alone.sequences) == 1 and numbers(alone)["zero_variance_share"] == 0
    # the environment's 0 wins over imitation, imitation over its other advantages
    left_out, other = (sample([1], [2], 0.0, supervised=True, advantages=[value]) for value in (0.0, 7.0))
    assert advantages(prepared([[left_out, other]])) == [[1.0]]


def test_the_teachers_tokens_follow_the_trained_ones_through_cutting_and_sorting() -> None:
    long = sample([1, 2], [3, 4, 5], 1.0, teacher=[{7: -0.1, 8: -2.0}, {}, {9: -0.3}])
    made = prepared([[long, sample([1], [6], 0.0, teacher=[{10: -0.4}])]], 4, distill_coef=1.0)
    assert made.counts.teacher_tokens == 2  # the last of the long one is cut away
    (microbatch,) = split(made.sequences, 2)
    assert microbatch.teacher_ids_NK.tolist() == [[10, 0], [7, 8], [0, 0]]
    assert microbatch.teacher_logprobs_NK.isfinite().tolist() == [[True, False], [True, True], [False, False]]


def test_a_stale_groups_share_multiplies_its_weight_and_leaves_the_normaliser() -> None:
    group = [sample([1], [2, 3], 0.0), sample([1], [4], 1.0)]
    plain, lowered = prepared([group, group]), prepared([group, [replace(one, share=0.25) for one in group]])
    assert lowered.counts == plain.counts
    ratios = [b.weight / a.weight for a, b in zip(plain.sequences, lowered.sequences, strict=True)]
    assert ratios == [1.0, 1.0, 0.25, 0.25] == [one.share for one in lowered.sequences]  # in the entropy bonus, too


# ---------------------------------------------------------------- metrics


def test_equal_answers_to_one_prompt_and_to_different_ones() -> None:
    first = [sample([1], [7, 8], 1.0), sample([1], [7, 8], 0.0), sample([1], [9], 0.0)]
    second = [sample([2], [7, 8], 1.0), sample([2], [7], 0.0), sample([2], [8], 0.0)]
    found = numbers(prepared([first, second]))
    assert found["same_answers_in_group"] == pytest.approx(1 / 6)  # of 3 + 3 pairs one is equal
    assert found["same_answers"] == pytest.approx(2 / 9)  # [7, 8] of the second and two of the first
    masked = [untrained(sample([1], [token], 0.0)) for token in (7, 8)]
    groups = [[sample([1], [3], 1.0), masked[0]], [sample([2], [4], 1.0), masked[1]]]
    assert numbers(prepared(groups))["same_answers"] == 0.0  # of 3 and 4; answers that are left out do not count


def test_rewards_of_each_environment() -> None:
    rollouts = batch([sample([1], [2], 0.0), sample([1], [3], 1.0)], [sample([1], [2], 3.0)], [sample([1], [2], 5.0)])
    first, *rest = rollouts.groups
    rollouts = replace(rollouts, groups=(first, *(replace(group, environment=1) for group in rest)))
    found = numbers(prepare(rollouts, LossConfig(), 9), "reward/")
    assert (found["env_0"], found["env_0_std"], found["env_1"], found["env_1_std"]) == (0.5, 0.5, 4.0, 1.0)


def test_the_spread_of_rewards_and_lengths() -> None:
    made = prepared([[sample([1], [2] * n, reward) for n, reward in ((1, 0.0), (2, 1.0), (3, 2.0), (11, 4.0))]], 20)
    found = numbers(made, "reward/")
    # p25: a quarter of 3 places from the first, 0 + 0.75 * (1 - 0)
    assert [found[name] for name in ("min", "p25", "median", "p75", "max")] == [0.0, 0.75, 1.5, 2.5, 4.0]
    found = numbers(made, "length/completion_")
    # 0.3 places from 1; 2.7 places: 3 + 0.7 * (11 - 3)
    assert [found[name] for name in ("min", "p10", "p90", "max")] == pytest.approx([1.0, 1.3, 8.6, 11.0])


def test_the_shares_of_few_distinct_rewards() -> None:
    few = (0.0, 0.0, 0.0, 1 / 3, 0.0, 0.0, 0.0, 1 / 3)
    made = prepared([[sample([1], [2], reward) for reward in few]])
    assert numbers(made, "reward/share/") == {"0": 0.75, "0.3333": 0.25}
    made = prepared([[sample([1], [2], reward) for reward in few[:7]]])
    assert numbers(made, "reward/share/") == {}, "more than one distinct value for four samples"
