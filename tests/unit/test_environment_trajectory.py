"""A group says at which temperature it was sampled: the trainer divides its logits by it."""

from __future__ import annotations

from environments.api import wire
from environments.peers.inference import Completion
from environments.trajectory import Trajectory, scored_group
from grpo_trainer.rollouts.decode import to_group


def temperatures_at_the_trainer(*temperatures: float) -> list[float]:
    made = [Completion([1], [2], [-0.5], "", "stop", 3, temperature) for temperature in temperatures]
    group = scored_group([Trajectory.of(completion, 1.0) for completion in made])
    return [sample.temperature for sample in to_group(wire.pack(group)).samples]


def test_the_temperature_reaches_the_trainer() -> None:
    assert temperatures_at_the_trainer(0.7, 0.7) == [0.7, 0.7]
    assert temperatures_at_the_trainer(0.7, 1.2) == [0.7, 1.2]
    assert temperatures_at_the_trainer(1.0) == [1.0]
