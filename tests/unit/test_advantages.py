"""Group advantages by hand and by property."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_trainer.batch.advantages import group_advantages, is_zero_variance
from grpo_trainer.config.train import LossConfig

rewards_of_a_group = st.lists(st.floats(-10, 10).map(lambda x: round(x, 3)), min_size=2, max_size=16)


def test_by_hand() -> None:
    # mean 0.25, centred -0.25 -0.25 -0.25 0.75, sum of squares 0.75, std = sqrt(0.75 / 3) = 0.5
    expected = [-0.25 / 0.5001] * 3 + [0.75 / 0.5001]
    assert group_advantages([0, 0, 0, 1]) == pytest.approx(expected)


def test_unscaled_by_hand() -> None:
    assert group_advantages([1, 2, 6], "none") == [-2, -1, 3]


def test_rloo_by_hand() -> None:
    # 1 - (2 + 6) / 2 = -3, 2 - (1 + 6) / 2 = -1.5, 6 - (1 + 2) / 2 = 4.5
    assert group_advantages([1, 2, 6], "none", "rloo") == pytest.approx([-3, -1.5, 4.5])
    # divided on request: std = sqrt((4 + 1 + 9) / 2) = sqrt 7
    assert group_advantages([1, 2, 6], "group", "rloo") == pytest.approx([v / (7**0.5 + 1e-4) for v in (-3, -1.5, 4.5)])
    assert group_advantages([3.0], "none", "rloo") == [0.0]  # there are no others


def test_dr_grpo_is_defined_without_the_division() -> None:
    assert LossConfig(loss="dr_grpo").advantage_scale == "none"
    assert LossConfig(loss="dapo").advantage_scale == "group"
    assert LossConfig(loss="dr_grpo", scale_rewards="group").advantage_scale == "group"
    assert LossConfig(advantage_estimator="rloo").advantage_scale == "none"
    assert {LossConfig(loss=loss).advantage_scale for loss in ("grpo", "bnpo", "gspo", "cispo", "sapo")} == {"group"}


def test_equal_rewards_teach_exactly_nothing() -> None:
    assert group_advantages([0.1] * 3) == [0.0] * 3  # 0.1 is not exact: a mean would leave noise to amplify
    assert is_zero_variance([0.1] * 3) and not is_zero_variance([0.1, 0.2])


def test_nearly_equal_rewards_are_not_amplified() -> None:
    assert max(map(abs, group_advantages([1.0, 1.0 + 1e-9]))) < 1e-4


@given(rewards_of_a_group)
def test_they_sum_to_zero_and_keep_the_order(rewards: list[float]) -> None:
    advantages = group_advantages(rewards)
    assert sum(advantages) == pytest.approx(0, abs=1e-6)
    pairs = sorted(zip(rewards, advantages, strict=True))
    assert all(a[1] <= b[1] for a, b in pairwise(pairs))


@given(rewards_of_a_group, st.floats(-5, 5), st.randoms(use_true_random=False))
def test_shifting_all_rewards_or_permuting_them_changes_nothing(rewards: list[float], by: float, random) -> None:
    order = list(range(len(rewards)))
    random.shuffle(order)
    plain = group_advantages(rewards)
    moved = group_advantages([rewards[i] + by for i in order])
    assert moved == pytest.approx([plain[i] for i in order], abs=1e-6)
