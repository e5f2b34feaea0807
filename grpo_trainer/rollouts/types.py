"""The trainer's types for a batch of rollouts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from grpo_common.errors import Problem
from grpo_trainer.rollouts.routed_experts import RoutedExperts


@dataclass(frozen=True, eq=False)
class Teacher:
    """A teacher's up to K likeliest tokens for each position of a sequence.

    Attributes:
        ids_TK: token ids; 0 where the teacher gave fewer than K.
        logprobs_TK: the teacher's logprobs of these tokens at each position; -inf where it gave fewer.
    """

    ids_TK: NDArray[np.int64]
    logprobs_TK: NDArray[np.float32]

    def at(self, positions: NDArray[np.int64] | slice) -> Teacher:
        """Return the teacher at some positions only."""
        return Teacher(self.ids_TK[positions], self.logprobs_TK[positions])

    @property
    def given_T(self) -> NDArray[np.bool_]:
        """Positions at which the teacher gave tokens."""
        return np.asarray(np.isfinite(self.logprobs_TK).any(axis=-1))


@dataclass(frozen=True, eq=False)
class Sample:
    """One scored sequence, prompt and completion.

    Attributes:
        tokens_T: token ids.
        trained_T: True where the token is trained on (the completion), False on the prompt.
        reward: its score.
        advantages_T: per-token advantages when the environment gave them, else None.
        rollout_logprobs_T: logprobs that the server sampled with (natural log, at `temperature`), else None; only the
            values at trained tokens have a meaning.
        policy_version: the version that sampled it, if known.
        temperature: temperature of sampling; the trainer divides its logits by it.
        supervised: the sequence is imitated; the policy did not sample it.
        truncated: it reached a limit of its tokens.
        unscored: no reward applies to it: it has no trained token, and its group's baseline leaves it out.
        teacher: a teacher's tokens for each position, else None.
        weight: factor of its loss.
        experts: the experts that the server chose for each token; None: it does not say.
        bent: why the probabilities that it was sampled with can't be computed; None: they can.
    """

    tokens_T: NDArray[np.int64]
    trained_T: NDArray[np.bool_]
    reward: float
    advantages_T: NDArray[np.float32] | None = None
    rollout_logprobs_T: NDArray[np.float32] | None = None
    policy_version: int | None = None
    temperature: float = 1.0
    supervised: bool = False
    truncated: bool = False
    unscored: bool = False
    teacher: Teacher | None = None
    weight: float = 1.0
    experts: RoutedExperts | None = None
    bent: Problem | None = None


@dataclass(frozen=True)
class Group:
    """Several samples of one prompt.

    Attributes:
        says_sampling: the environment says how it samples.
    """

    samples: tuple[Sample, ...]
    environment: int | None = None
    says_sampling: bool = True

    @property
    def rewards(self) -> list[float]:
        """Rewards of the samples that the baseline counts: sampled by the policy, and scored."""
        return [sample.reward for sample in self.samples if not (sample.supervised or sample.unscored)]

    def advantages(self, of_rewards: Iterable[float]) -> list[float]:
        """Return one advantage for each sample: 1 if supervised, 0 if unscored, else the next one of `of_rewards`."""
        own = iter(of_rewards)
        return [1.0 if s.supervised else 0.0 if s.unscored else next(own) for s in self.samples]


@dataclass(frozen=True)
class RolloutBatch:
    """The leased groups of one step.

    Attributes:
        batch_id: id of the lease, which the acknowledgement ends.
        groups: whole groups, oldest first.
        refused: number of groups that were left out as untrainable.
    """

    batch_id: str
    groups: tuple[Group, ...]
    refused: int = 0
