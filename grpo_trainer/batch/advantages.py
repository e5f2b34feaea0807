"""Group-relative advantages, pure.

| estimate | definition | source |
|---|---|---|
| group | (r - mean) / (std + 1e-4) | DeepSeekMath, arXiv 2402.03300 |
| group, unscaled | r - mean | Dr. GRPO, arXiv 2503.20783 |
| rloo | r - mean of the others | RLOO, arXiv 2402.14740 |
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Literal

from grpo_trainer import import_paths
from grpo_trainer.errors import ConfigError

FLAG = "--advantage-estimator"
STD_FLOOR = 1e-4
"""Added to the standard deviation; a smaller one would amplify the noise of nearly equal floating-point rewards."""


def group_advantages(
    rewards: Sequence[float],
    scale: Literal["group", "none"] = "group",
    estimator: str = "group",
) -> list[float]:
    """Return the advantages of a group's sequences over a baseline of their rewards.

    Args:
        rewards: one per sequence of a group.
        scale: "group" divides by the group's sample standard deviation (n - 1) plus `STD_FLOOR`.
        estimator: the baseline is the mean of the group ("group"), or for each sequence that of the others ("rloo");
            or the import path of a function from the rewards to the advantages, which `scale` does not change.

    Returns:
        One advantage per sequence. They sum to 0 unless the user's own function gave them; a group whose rewards are
        all equal gets exactly 0.

    Raises:
        ConfigError: the user's own function did not return one finite number for each reward.
    """
    if is_zero_variance(rewards):
        return [0.0] * len(rewards)
    if import_paths.is_import_path(estimator):
        return _own(rewards, estimator)
    count = len(rewards)
    mean = math.fsum(rewards) / count
    centred = [reward - mean for reward in rewards]
    std = math.sqrt(math.fsum(value * value for value in centred) / (count - 1))
    factor = count / (count - 1) if estimator == "rloo" else 1.0  # r - (n mean - r) / (n - 1) = n / (n - 1) (r - mean)
    return [factor * value / (std + STD_FLOOR if scale == "group" else 1.0) for value in centred]


def estimator_of(path: str) -> Callable[[list[float]], Iterable[float]]:
    """Return the user's own function by its import path.

    Raises:
        ConfigError: the path names no function.
    """
    found: Callable[[list[float]], Iterable[float]] = import_paths.load(path, FLAG)
    if not callable(found):
        raise ConfigError(field=FLAG, got=f"{path} is of type {type(found).__name__}", wanted="a function")
    return found


def _own(rewards: Sequence[float], path: str) -> list[float]:
    advantages = [float(value) for value in estimator_of(path)(list(rewards))]
    if len(advantages) != len(rewards) or not all(map(math.isfinite, advantages)):
        raise ConfigError(
            field=FLAG,
            got=f"{advantages} from {path} for the rewards {list(rewards)}",
            wanted="one finite number for each reward",
        )
    return advantages


def is_zero_variance(rewards: Sequence[float]) -> bool:
    """Return whether all rewards of a group are the same, so that its advantages are 0."""
    return len(set(rewards)) <= 1
