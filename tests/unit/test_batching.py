"""Batching: weights of the whole batch, what is skipped, what padding must not change."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from grpo_trainer.batch.batching import prepare
from grpo_trainer.batch.microbatches import plan, split
from grpo_trainer.config.loss import LOSSES, LossConfig
from grpo_trainer.metrics.types import reduce
from tests.unit.factories import VOCAB, batch, sample


def test_by_hand() -> None:
    prepared = prepare(
        batch([sample([1, 2], [3], 1.0, logprobs=[-0.5]), sample([1, 2], [4, 5], 0.0)]), LossConfig(), 10
    )
    first, second = prepared.sequences
    assert first.positions.tolist() == [2] and second.positions.tolist() == [2, 3]
    # mean 0.5, std = sqrt(0.5) = 0.70711
    assert first.advantages.tolist() == pytest.approx([0.5 / 0.70721], abs=1e-4)
    assert second.advantages.tolist() == pytest.approx([-0.5 / 0.70721] * 2, abs=1e-4)
    assert first.weight == second.weight == pytest.approx(1 / 3)  # dapo: 3 trained tokens
    assert first.rollout_logprobs is not None and first.rollout_logprobs.tolist() == [-0.5]
    assert second.rollout_logprobs is None


def test_zero_variance_groups_cost_nothing_but_count_in_the_normaliser() -> None:
    dull = [sample([1], [2, 3], 1.0), sample([1], [4, 5], 1.0)]
    sharp = [sample([1], [2], 0.0), sample([1], [3], 1.0)]
    prepared = prepare(batch(dull, sharp), LossConfig(), 10)
    assert len(prepared.sequences) == 2
    assert prepared.sequences[0].weight == pytest.approx(1 / 6)
    numbers = reduce(prepared.metrics)
    assert numbers["batch/zero_variance_share"] == 0.5
    assert numbers["batch/sequences"] == 4 and numbers["batch/sequences_trained"] == 2
    assert numbers["reward/mean"] == 0.75


def test_equal_answers_to_one_prompt_and_to_different_ones() -> None:
    first = [sample([1], [7, 8], 1.0), sample([1], [7, 8], 0.0), sample([1], [9], 0.0)]
    second = [sample([2], [7, 8], 1.0), sample([2], [7], 0.0), sample([2], [8], 0.0)]
    numbers = reduce(prepare(batch(first, second), LossConfig(), 10).metrics)
    assert numbers["batch/same_answers_in_group"] == pytest.approx(1 / 6)  # of 3 + 3 pairs one is equal
    assert numbers["batch/same_answers"] == pytest.approx(2 / 9)  # [7, 8] of the second and two of the first


def test_same_answers_leave_out_answers_without_trained_tokens() -> None:
    masked = [replace(sample([1], [token], 0.0), trained_T=np.zeros(2, bool)) for token in (7, 8)]
    first, second = [sample([1], [3], 1.0), masked[0]], [sample([2], [4], 1.0), masked[1]]
    numbers = reduce(prepare(batch(first, second), LossConfig(), 10).metrics)
    assert numbers["batch/same_answers"] == 0.0  # of 3 and 4


def test_too_long_sequences_are_cut_and_counted() -> None:
    prepared = prepare(batch([sample([1, 2], [3, 4, 5], 1.0), sample([1, 2], [3], 0.0)]), LossConfig(), 4)
    assert prepared.sequences[0].positions.tolist() == [2, 3]
    assert reduce(prepared.metrics)["batch/truncated"] == 1
    assert prepared.sequences[0].weight == pytest.approx(1 / 3)


def test_a_sequence_cut_before_its_completion_has_no_trained_token() -> None:
    prepared = prepare(batch([sample([1, 2, 3], [4], 1.0), sample([1], [2], 0.0)]), LossConfig(loss="grpo"), 3)
    assert [len(s.tokens_T) for s in prepared.sequences] == [2]


@pytest.mark.parametrize(
    ("loss", "weights"),
    [
        ("grpo", [1 / (3 * 2), 1 / (1 * 2)]),  # a mean over the tokens of each sequence, then over 2 sequences
        ("dapo", [1 / 4, 1 / 4]),  # a mean over 4 tokens
        ("dr_grpo", [1 / (2 * 8), 1 / (2 * 8)]),  # divided by 2 sequences of 8 tokens
    ],
)
def test_a_sequence_without_trained_tokens_leaves_the_denominators_and_stays_in_the_baseline(
    loss: Any, weights: list[float]
) -> None:
    masked = sample([1], [5, 6], 3.0)
    masked = replace(masked, trained_T=np.zeros(3, bool), truncated=True)
    group = [sample([1], [2, 3, 4], 0.0), masked, sample([1], [7], 0.0)]
    config = LossConfig(loss=loss, scale_rewards="none", max_completion_len=8)
    prepared = prepare(batch(group), config, 10)
    assert [s.weight for s in prepared.sequences] == pytest.approx(weights)
    assert [s.advantages[0] for s in prepared.sequences] == [-1.0, -1.0]  # the mean of 0, 3 and 0 is 1
    numbers = reduce(prepared.metrics)
    assert numbers["reward/mean"] == 1.0 and numbers["batch/sequences"] == 3
    assert numbers["length/truncated_share"] == pytest.approx(1 / 3)
    assert numbers["length/completion_mean"] == 2.0  # 3 + 1 tokens of 2 trained sequences


def test_a_batch_without_a_trained_token_has_nothing_to_learn() -> None:
    masked = replace(sample([1], [5, 6], 3.0), trained_T=np.zeros(3, bool), truncated=True)
    prepared = prepare(batch([masked, masked]), LossConfig(), 10)
    assert not prepared.sequences and prepared.largest_weight == 0.0
    assert reduce(prepared.metrics)["length/completion_mean"] == 0.0


def test_the_first_token_is_never_trained() -> None:
    prepared = prepare(batch([sample([], [3, 4], 1.0), sample([], [5, 6], 0.0)]), LossConfig(), 10)
    assert [s.positions.tolist() for s in prepared.sequences] == [[1], [1]]


def test_advantages_of_the_environment_are_used() -> None:
    own = [sample([1], [2, 3], 0.0, advantages=[0.25, -4.0]), sample([1], [2], 0.0, advantages=[0.0])]
    prepared = prepare(batch(own), LossConfig(), 10)
    assert len(prepared.sequences) == 1  # an advantage of 0 teaches nothing
    assert prepared.sequences[0].advantages.tolist() == [0.25, -4.0]


def test_where_there_is_more_to_learn_than_from_rewards_a_group_without_a_spread_is_not_skipped() -> None:
    dull = batch([sample([1], [2, 3], 1.0), sample([1], [4, 5], 1.0)])
    for config in (LossConfig(kl_beta=0.1), LossConfig(entropy_coef=0.1)):
        assert len(prepare(dull, config, 10).sequences) == 2
    taught = [sample([1], [2, 3], 1.0, teacher=[{4: -0.1}, {}]), sample([1], [4, 5], 1.0)]
    prepared = prepare(batch(taught), LossConfig(distill_coef=1.0), 10)
    assert len(prepared.sequences) == 1 and prepared.counts.teacher_tokens == 1
    unused = prepare(batch(taught), LossConfig(), 10)
    assert not unused.sequences and reduce(unused.metrics)["batch/teacher_tokens"] == 1


def test_what_is_to_be_imitated_has_advantage_1_and_is_no_part_of_the_groups_baseline() -> None:
    supervised_one = sample([1], [9], 5.0, supervised=True, logprobs=[-0.5], version=3)
    judged = [sample([1], [2], 0.0), sample([1], [3], 1.0)]
    prepared = prepare(batch([supervised_one, *judged]), LossConfig(scale_rewards="none"), 10)
    assert [s.advantages.tolist() for s in prepared.sequences] == [[1.0], [-0.5], [0.5]]
    first = prepared.sequences[0]
    assert first.supervised and first.rollout_logprobs is None and first.version is None  # the policy did not sample it
    numbers = reduce(prepared.metrics)
    assert numbers["reward/mean"] == 0.5 and numbers["batch/supervised"] == 1
    alone = prepare(batch([supervised_one]), LossConfig(), 10)
    assert len(alone.sequences) == 1 and reduce(alone.metrics)["batch/zero_variance_share"] == 0


def test_left_out_wins_over_imitation_and_imitation_over_given_advantages() -> None:
    left_out = sample([1], [2], 0.0, supervised=True)
    left_out = replace(left_out, advantages_T=np.zeros(2, np.float32))
    supervised_one = sample([1], [2], 0.0, supervised=True, advantages=[7.0])
    (kept,) = prepare(batch([left_out, supervised_one]), LossConfig(), 10).sequences
    assert kept.advantages.tolist() == [1.0]


def test_the_teachers_tokens_follow_the_trained_ones_through_cutting_and_sorting() -> None:
    long = sample([1, 2], [3, 4, 5], 1.0, teacher=[{7: -0.1, 8: -2.0}, {}, {9: -0.3}])
    short = sample([1], [6], 0.0, teacher=[{10: -0.4}])
    prepared = prepare(batch([long, short]), LossConfig(distill_coef=1.0), 4)
    assert prepared.counts.teacher_tokens == 2  # the last of the long one is cut away
    (microbatch,) = split(prepared.sequences, 2)
    assert microbatch.teacher_ids_NK.tolist() == [[10, 0], [7, 8], [0, 0]]
    assert microbatch.teacher_logprobs_NK.isfinite().tolist() == [[True, False], [True, True], [False, False]]


def test_rewards_of_each_environment() -> None:
    groups = batch([sample([1], [2], 0.0), sample([1], [3], 1.0)], [sample([1], [2], 3.0)], [sample([1], [2], 5.0)])
    first, *rest = groups.groups
    numbers = reduce(
        prepare(replace(groups, groups=(first, *(replace(g, environment=1) for g in rest))), LossConfig(), 9).metrics
    )
    assert (numbers["reward/env_0"], numbers["reward/env_0_std"]) == (0.5, 0.5)
    assert (numbers["reward/env_1"], numbers["reward/env_1_std"]) == (4.0, 1.0)


def test_the_spread_of_rewards_and_lengths() -> None:
    samples = [sample([1], [2] * length, reward) for length, reward in ((1, 0.0), (2, 1.0), (3, 2.0), (11, 4.0))]
    numbers = reduce(prepare(batch(samples), LossConfig(), 20).metrics)
    rewards = [numbers[f"reward/{name}"] for name in ("min", "p25", "median", "p75", "max")]
    assert rewards == [0.0, 0.75, 1.5, 2.5, 4.0]  # p25: a quarter of 3 places from the first, 0 + 0.75 * (1 - 0)
    lengths = [numbers[f"length/completion_{name}"] for name in ("min", "p10", "p90", "max")]
    assert lengths == pytest.approx([1.0, 1.3, 8.6, 11.0])  # 0.3 places from 1; 2.7 places: 3 + 0.7 * (11 - 3)


def test_the_shares_of_few_distinct_rewards() -> None:
    def shares(*rewards: float) -> dict[str, float]:
        numbers = reduce(prepare(batch([sample([1], [2], each) for each in rewards]), LossConfig(), 9).metrics)
        return {key: value for key, value in numbers.items() if key.startswith("reward/share/")}

    few = (0.0, 0.0, 0.0, 1 / 3, 0.0, 0.0, 0.0, 1 / 3)
    assert shares(*few) == {"reward/share/0": 0.75, "reward/share/0.3333": 0.25}
    assert shares(*few[:7]) == {}, "more than one distinct value for four samples"


completions = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=6)
groups = st.lists(
    st.lists(st.tuples(completions, st.sampled_from([0.0, 0.5, 1.0])), min_size=2, max_size=4), min_size=1, max_size=4
)


@given(
    groups,
    st.integers(1, 9),
    st.sampled_from([*LOSSES]),
    st.none() | st.integers(8, 30),
    st.booleans(),
)
def test_every_trained_token_is_in_exactly_one_microbatch(
    rows: list[list[tuple[list[int], float]]], size: int, loss: str, max_tokens: int | None, packed: bool
) -> None:
    rollouts = batch(*[[sample([1, 2], tokens, reward) for tokens, reward in group] for group in rows])
    prepared = prepare(rollouts, LossConfig(loss=loss), 100)
    microbatches = split(prepared.sequences, size, max_tokens=max_tokens, packed=packed)
    assert sum(len(m.versions_B) for m in microbatches) == len(prepared.sequences)
    if max_tokens is None:
        assert all(len(m.versions_B) <= size for m in microbatches)
    else:
        assert all(m.tokens_BT.numel() <= max_tokens for m in microbatches)
    wanted = sorted(
        (int(s.tokens_T[p]), float(a), s.weight)
        for s in prepared.sequences
        for p, a in zip(s.positions, s.advantages, strict=True)
    )
    got = sorted(
        (int(token), float(a), float(w))
        for m in microbatches
        for token, a, w in zip(m.targets_N, m.advantages_N, m.weights_N, strict=True)
    )
    assert got == [(token, advantage, pytest.approx(weight, rel=1e-6)) for token, advantage, weight in wanted]
    before = sorted(int(s.tokens_T[p - 1]) for s in prepared.sequences for p in s.positions)
    assert before == sorted(int(t) for m in microbatches for t in m.tokens_BT.view(-1)[m.predictors_N])


def test_a_packed_row_by_hand() -> None:
    prepared = prepare(batch([sample([1], [2, 3, 4], 1.0), sample([5], [6], 0.0)]), LossConfig(), 10)
    (microbatch,) = split(prepared.sequences, 2, packed=True)
    assert microbatch.tokens_BT.tolist() == [[5, 6, 1, 2, 3, 4]]
    assert microbatch.packed is not None and microbatch.packed.longest == 4
    assert microbatch.packed.boundaries.tolist() == [0, 2, 6]
    assert microbatch.packed.boundaries.dtype == torch.int32
    assert microbatch.packed.positions_1T.tolist() == [[0, 1, 0, 1, 2, 3]]
    assert microbatch.targets_N.tolist() == [6, 2, 3, 4] and microbatch.predictors_N.tolist() == [0, 2, 3, 4]
    assert microbatch.segments.count == 2 and microbatch.rows_N.tolist() == [0, 1, 1, 1]


def test_a_budget_of_tokens_decides_the_split() -> None:
    lengths = [5, 1, 4, 3, 2]
    assert plan(lengths, size=2, max_tokens=None, packed=True) == [[1, 4], [3, 2], [0]]
    # padded, 8 tokens: one row of 5, two of 4 (4 and 3), two of 2 (2 and 1)
    assert plan(lengths, size=2, max_tokens=8, packed=False) == [[0], [2, 3], [4, 1]]
    # packed, 8 tokens: 15 in all, so two bins: 5 + 3 and 4 + 2 + 1 first fit; longest to the emptier one is as even
    assert plan(lengths, size=2, max_tokens=8, packed=True) == [[0, 4, 1], [2, 3]]
    # two bins of 12 for 24 tokens: 6 + 6 and 4 + 4 + 4; the longest to the emptier one would come to 6 + 4 + 4 = 14
    assert plan([6, 6, 4, 4, 4], size=2, max_tokens=12, packed=True) == [[1, 0], [4, 3, 2]]
    # longer than the budget: alone
    assert plan([9, 2, 2], size=2, max_tokens=4, packed=True) == [[0], [2, 1]]


def test_overlong_sequences_are_dropped_on_request() -> None:
    """As if the batch had been without them, but for the mean of rewards that the others are measured by."""
    rollouts = batch([sample([1, 2], [3, 4, 5], 1.0), sample([1, 2], [3], 0.0)])
    prepared = prepare(rollouts, LossConfig(), 4, drop_overlong=True)
    assert [s.tokens_T.tolist() for s in prepared.sequences] == [[1, 2, 3]]
    assert prepared.sequences[0].weight == 1.0 and prepared.sequences[0].advantages[0] < 0
    numbers = reduce(prepared.metrics)
    assert numbers["batch/dropped_overlong"] == 1 and numbers["batch/truncated"] == 0
    assert numbers["batch/sequences"] == 1 and numbers["batch/trained_tokens"] == 1
    assert prepare(rollouts, LossConfig(loss="grpo"), 2, drop_overlong=True).sequences == ()


def test_padding_goes_right_and_carries_nothing() -> None:
    prepared = prepare(batch([sample([1], [2, 3, 4], 1.0), sample([1], [2], 0.0)]), LossConfig(), 10)
    (microbatch,) = split(prepared.sequences, 2)
    assert microbatch.tokens_BT.tolist() == [[1, 2, 0, 0], [1, 2, 3, 4]]  # sorted by length
    assert microbatch.rows_N.tolist() == [0, 1, 1, 1] and microbatch.columns_N.tolist() == [1, 1, 2, 3]
    assert microbatch.temperature_N.dtype == torch.float32
    assert np.isclose(float(microbatch.weights_N.sum()), 1.0)


def test_a_sequence_to_which_no_reward_applies_is_in_no_mean() -> None:
    # Rewards 1 and 0 count, the third sequence does not: mean 0.5, std 0.70711.
    group = [sample([1], [2], 1.0), sample([1], [3, 4, 5], 0.0), replace(sample([1], [6, 7], 9.0), unscored=True)]
    group[2] = replace(group[2], trained_T=np.zeros(3, np.bool_))
    prepared = prepare(batch(group), LossConfig(loss="grpo"), 10)
    first, second = prepared.sequences
    assert first.advantages.tolist() == pytest.approx([0.5 / 0.70721], abs=1e-4)
    assert (first.weight, second.weight) == (pytest.approx(1 / 2), pytest.approx(1 / 6))  # of two sequences, not three
    numbers = reduce(prepared.metrics)
    assert numbers["reward/mean"] == 0.5 and numbers["batch/unscored"] == 1 and numbers["batch/sequences"] == 3


def test_a_sequence_without_a_trained_token_is_in_no_denominator() -> None:
    empty = replace(sample([1], [4, 5], 0.0), trained_T=np.zeros(3, np.bool_))
    prepared = prepare(batch([sample([1], [2], 1.0), empty]), LossConfig(loss="grpo"), 10)
    (only,) = prepared.sequences
    assert only.weight == 1.0
    assert only.advantages.tolist() == pytest.approx([0.5 / 0.70721], abs=1e-4)  # the empty one is in the baseline
