"""What a batch of rollouts is to the trainer."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from grpo_trainer.metrics.types import Metric


@dataclass(frozen=True, eq=False)
class Teacher:
    """A teacher's likeliest tokens for each position of a sequence: K of them at most.

    Attributes:
        ids_TK: token ids; 0 where it gave fewer than K.
        logprobs_TK: their logprobs in the place of the position's own token; -inf where it gave fewer.
    """

    ids_TK: NDArray[np.int64]
    logprobs_TK: NDArray[np.float32]

    def at(self, positions: NDArray[np.int64] | slice) -> Teacher:
        """Of some positions only."""
        return Teacher(self.ids_TK[positions], self.logprobs_TK[positions])

    @property
    def given_T(self) -> NDArray[np.bool_]:
        """Where it gave any."""
        return np.asarray(np.isfinite(self.logprobs_TK).any(axis=-1))


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
        supervised: it is to be imitated, not judged: the policy did not sample it.
        teacher: what a teacher would have put in the place of each token, else None.
        weight: its loss counts so much.
    """

    tokens_T: NDArray[np.int64]
    trained_T: NDArray[np.bool_]
    reward: float
    advantages_T: NDArray[np.float32] | None = None
    rollout_logprobs_T: NDArray[np.float32] | None = None
    policy_version: int | None = None
    temperature: float = 1.0
    supervised: bool = False
    teacher: Teacher | None = None
    weight: float = 1.0


@dataclass(frozen=True)
class Group:
    """Several samples of one prompt."""

    samples: tuple[Sample, ...]
    environment: int | None = None

    @property
    def rewards(self) -> list[float]:
        """Of what the policy sampled: what is to be imitated is no measure of it."""
        return [sample.reward for sample in self.samples if not sample.supervised]


@dataclass(frozen=True)
class Leased:
    """A batch as it came: its lease, and whole groups, oldest first; of those that can't be trained on the number."""

    batch_id: str
    groups: tuple[Group, ...]
    refused: int = 0


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
