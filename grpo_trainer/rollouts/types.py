"""What a batch of rollouts is to the trainer."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from grpo_trainer.metrics.types import Metric


@dataclass(frozen=True, eq=False)
class Sample:
    """One scored sequence, prompt and completion.

    Attributes:
        tokens_T: token ids.
        trained_T: True where the token is trained on (the completion), False on the prompt.
        reward: its score.
        advantages_T: per-token advantages when the environment gave them, else None.
        rollout_logprobs_T: what the server sampled with (natural log, at `temperature`), else None; only the values
            at trained tokens mean anything.
        policy_version: the version that sampled it, if known.
        temperature: of sampling; the trainer's logits are divided by it.
    """

    tokens_T: NDArray[np.int64]
    trained_T: NDArray[np.bool_]
    reward: float
    advantages_T: NDArray[np.float32] | None = None
    rollout_logprobs_T: NDArray[np.float32] | None = None
    policy_version: int | None = None
    temperature: float = 1.0


@dataclass(frozen=True)
class Group:
    """Several samples of one prompt."""

    samples: tuple[Sample, ...]
    environment: int | None = None

    @property
    def rewards(self) -> list[float]:
        return [sample.reward for sample in self.samples]


@dataclass(frozen=True)
class RolloutBatch:
    """What one step trains on.

    Attributes:
        batch_id: names the lease that `ack` ends.
        groups: whole groups, oldest first.
        metrics: how long it took to come, how stale it is, what was dropped.
        policy_version: the trainer's when it came; samples of this version are fresh.
    """

    batch_id: str
    groups: tuple[Group, ...]
    metrics: dict[str, Metric]
    policy_version: int | None = None
