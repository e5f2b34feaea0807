"""A group says at which temperature it was sampled, because the trainer divides its logits by it; and its scores."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from environments.api import wire
from environments.api.intake import read_one
from environments.peers.inference import Completion
from environments.trajectory import Trajectory, scored_group
from grpo_trainer.rollouts.groups import to_group


def temperatures_at_the_trainer(*temperatures: float) -> list[float]:
    made = [Completion([1], [2], [-0.5], "", "stop", 3, temperature) for temperature in temperatures]
    group = scored_group([Trajectory.of(completion, 1.0) for completion in made])
    return [sample.temperature for sample in to_group(wire.pack(group)).samples]


def test_the_temperature_reaches_the_trainer() -> None:
    assert temperatures_at_the_trainer(0.7, 0.7) == [0.7, 0.7]
    assert temperatures_at_the_trainer(0.7, 1.2) == [0.7, 1.2]
    assert temperatures_at_the_trainer(1.0) == [1.0]


@pytest.mark.parametrize("content_type", [wire.MSGPACK, wire.JSON])
@pytest.mark.parametrize("score", [True, 1, np.float32(1.0), np.float64(1.0), np.int64(1), np.bool_(True)])
def test_a_score_is_any_kind_of_number(score: Any, content_type: str) -> None:
    made = scored_group([Trajectory.of(Completion([1], [2], [-0.5], "", "stop", 3), score)])
    assert read_one(wire.encode_group(made, content_type), content_type).group.scores == [1.0]


def test_what_is_no_number_is_no_score() -> None:
    """It raises where the environment's group is made, so that it costs this group and no other."""
    no_score: Any = "x"
    with pytest.raises(ValueError, match="float"):
        scored_group([Trajectory.of(Completion([1], [2], [-0.5], "", "stop", 3), no_score)])
