"""Group-relative advantages, pure.

| estimate | definition | source |
|---|---|---|
| group | (r - mean) / (std + 1e-4) | DeepSeekMath, arXiv 2402.03300 |
| group, unscaled | r - mean | Dr. GRPO, arXiv 2503.20783 |
| rloo | r - mean of the others | RLOO, arXiv 2402.14740 |
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

STD_FLOOR = 1e-4
"""Added to the standard deviation; a smaller one would amplify the noise of nearly equal floating-point rewards."""


def group_advantages(
    rewards: Sequence[float],
    scale: Literal["group", "none"] = "group",
    estimator: Literal["group", "rloo"] = "group",
) -> list[float]:
    """Advantages of a group's sequences over a baseline of their rewards.

    Args:
        rewards: one per sequence of a group.
        scale: "group" divides by the group's sample standard deviation (n - 1) plus `STD_FLOOR`.
        estimator: the baseline is the mean of the group, or for each sequence that of the others.

    Returns:
        One advantage per sequence. They sum to 0; a group whose rewards are all equal gets exactly 0.
    """
    if is_zero_variance(rewards):
        return [0.0] * len(rewards)
    count = len(rewards)
    mean = math.fsum(rewards) / count
    centred = [reward - mean for reward in rewards]
    std = math.sqrt(math.fsum(value * value for value in centred) / (count - 1))
    factor = count / (count - 1) if estimator == "rloo" else 1.0  # r - (n mean - r) / (n - 1) = n / (n - 1) (r - mean)
    return [factor * value / (std + STD_FLOOR if scale == "group" else 1.0) for value in centred]


def is_zero_variance(rewards: Sequence[float]) -> bool:
    """Whether a group teaches nothing: all its rewards are the same."""
    return len(set(rewards)) <= 1
