"""Scored groups to microbatches: advantages, the whole batch's normaliser, length-sorted right-padded tensors. Pure.

Right padding needs no attention mask: attention is causal, so no trained token ever sees padding. What the loss needs
lies flat, one entry per trained token (suffix `_N`), so that padding can't enter it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from grpo_trainer.advantages import group_advantages, is_zero_variance
from grpo_trainer.config import LossConfig, TrainConfig
from grpo_trainer.losses import BatchCounts, token_weight
from grpo_trainer.metrics.types import Max, Mean, Metric, Sum
from grpo_trainer.rollouts.types import Group, RolloutBatch, Sample, Teacher
from grpo_trainer.segments import Segments


@dataclass(frozen=True, eq=False)
class TrainingSequence:
    """A sample with its advantages and its weight in the batch's loss."""

    tokens_T: NDArray[np.int64]
    positions: NDArray[np.int64]  # of its trained tokens, each >= 1: a token is predicted from the one before it
    advantages: NDArray[np.float32]  # one per trained token
    rollout_logprobs: NDArray[np.float32] | None  # one per trained token
    weight: float  # of each of its trained tokens in the loss of the whole batch
    temperature: float
    version: int | None = None  # of the policy that sampled it, if known
    supervised: bool = False
    teacher: Teacher | None = None  # of its trained tokens, if they learn from it


@dataclass(frozen=True)
class PreparedBatch:
    """What one step trains on, what its means are taken over, and what was seen while preparing it."""

    sequences: tuple[TrainingSequence, ...]
    counts: BatchCounts
    metrics: dict[str, Metric]


@dataclass(frozen=True)
class MicroBatch:
    """Tensors of one forward and backward pass. B sequences, T tokens, N trained tokens, K tokens of a teacher.

    Attributes:
        tokens_BT: token ids, right-padded.
        rows_N, columns_N: where the trained tokens stand in `tokens_BT`; columns are >= 1.
        advantages_N: of each trained token; 1 under supervision.
        weights_N: of each trained token in the loss of the whole batch.
        rollout_logprobs_N: what the server sampled with; 0 where `has_rollout_N` is False.
        temperature_N: of sampling.
        supervised_N: the token is to be imitated; the policy did not sample it.
        teacher_ids_NK, teacher_logprobs_NK: as in `rollouts.types.Teacher`; K is 0 where no sequence has a teacher.
        versions_B: the policy that sampled each sequence; -1: unknown.
    """

    tokens_BT: Tensor
    rows_N: Tensor
    columns_N: Tensor
    advantages_N: Tensor
    weights_N: Tensor
    rollout_logprobs_N: Tensor
    has_rollout_N: Tensor
    temperature_N: Tensor
    supervised_N: Tensor
    teacher_ids_NK: Tensor
    teacher_logprobs_NK: Tensor
    versions_B: Tensor

    def to(self, device: torch.device) -> MicroBatch:
        """The same on a device."""
        return MicroBatch(*(tensor.to(device, non_blocking=True) for tensor in self.__dict__.values()))

    @property
    def segments(self) -> Segments:
        """The sequences that the trained tokens belong to."""
        return Segments(self.rows_N, len(self.tokens_BT))


@dataclass(frozen=True)
class ReadyBatch:
    """All that a step needs of a batch but the device: a thread may make it while the step before it runs.

    Attributes:
        policy_version: the trainer's when the batch came, as in `RolloutBatch`.
    """

    prepared: PreparedBatch
    microbatches: tuple[MicroBatch, ...]
    policy_version: int | None


def ready(batch: RolloutBatch, config: TrainConfig) -> ReadyBatch:
    """Scored groups to tensors in main memory: `prepare`, then `split`."""
    prepared = prepare(batch, config.loss, config.model.seq_len)
    return ReadyBatch(prepared, tuple(split(prepared.sequences, config.batch_size)), batch.policy_version)


def prepare(batch: RolloutBatch, config: LossConfig, seq_len: int) -> PreparedBatch:
    """Give every trained token its advantage and its weight.

    The weights are those of the whole batch, counted before anything is left out, so neither the split into
    microbatches nor skipping changes the loss. Sequences that have neither loss nor gradient are skipped: those whose
    advantages are all 0, where nothing else is to be learnt from them.
    """
    cut = [_cut(sample, seq_len) for group in batch.groups for sample in group.samples]
    positions = [np.flatnonzero(sample.trained_T) for sample in cut]
    teachers = [_teacher(sample, where) for sample, where in zip(cut, positions, strict=True)]
    counts = BatchCounts(
        sequences=len(cut),
        trained_tokens=sum(map(len, positions)),
        teacher_tokens=sum(int(teacher.given_T.sum()) for teacher in teachers if teacher is not None),
    )
    advantages = [value for group in batch.groups for value in _advantages(group, config)]
    sequences = tuple(
        _training_sequence(sample, where, advantage, teacher if config.distill_coef else None, counts, config, seq_len)
        for sample, where, advantage, teacher in zip(cut, positions, advantages, teachers, strict=True)
        if len(where)
    )
    kept = tuple(sequence for sequence in sequences if _teaches(sequence, config))
    return PreparedBatch(kept, counts, _batch_metrics(batch, cut, positions, counts, kept))


def _teacher(sample: Sample, positions: NDArray[np.int64]) -> Teacher | None:
    """What a teacher says of the trained tokens, if anything."""
    teacher = None if sample.teacher is None else sample.teacher.at(positions)
    return teacher if teacher is not None and teacher.given_T.any() else None


def _training_sequence(
    sample: Sample,
    positions: NDArray[np.int64],
    advantage: float | NDArray[np.float32],
    teacher: Teacher | None,
    counts: BatchCounts,
    config: LossConfig,
    seq_len: int,
) -> TrainingSequence:
    roll = None if sample.supervised else sample.rollout_logprobs_T
    return TrainingSequence(
        tokens_T=sample.tokens_T,
        positions=positions,
        advantages=np.broadcast_to(np.asarray(advantage, np.float32), sample.tokens_T.shape)[positions],
        rollout_logprobs=None if roll is None else roll[positions],
        weight=token_weight(
            config.loss,
            length=len(positions),
            counts=counts,
            max_completion_len=config.max_completion_len or seq_len,
        ),
        temperature=sample.temperature,
        version=None if sample.supervised else sample.policy_version,
        supervised=sample.supervised,
        teacher=teacher,
    )


def _teaches(sequence: TrainingSequence, config: LossConfig) -> bool:
    return bool(sequence.advantages.any()) or config.trains_without_advantage or sequence.teacher is not None


def _cut(sample: Sample, seq_len: int) -> Sample:
    """The sample within `seq_len` tokens, its first token untrained: nothing predicts it."""
    trained_T = sample.trained_T[:seq_len].copy()
    trained_T[0] = False
    cut = slice(0, seq_len)
    return replace(
        sample,
        tokens_T=sample.tokens_T[cut],
        trained_T=trained_T,
        advantages_T=None if sample.advantages_T is None else sample.advantages_T[cut],
        rollout_logprobs_T=None if sample.rollout_logprobs_T is None else sample.rollout_logprobs_T[cut],
        teacher=None if sample.teacher is None else sample.teacher.at(cut),
    )


def _advantages(group: Group, config: LossConfig) -> list[float | NDArray[np.float32]]:
    """Of each sequence: 1 under supervision, the environment's own (per token) where it gave them, else the group's."""
    own = iter(group_advantages(group.rewards, config.advantage_scale, config.advantage_estimator))
    values: list[float | NDArray[np.float32]] = []
    for sample in group.samples:
        value, given = 1.0 if sample.supervised else next(own), sample.advantages_T
        values.append(value if given is None or (sample.supervised and given.any()) else given)
    return values


def _batch_metrics(
    batch: RolloutBatch,
    cut: Sequence[Sample],
    positions: Sequence[NDArray[np.int64]],
    counts: BatchCounts,
    kept: Sequence[TrainingSequence],
) -> dict[str, Metric]:
    judged = [group for group in batch.groups if group.rewards]
    rewards = [reward for group in judged for reward in group.rewards]
    metrics: dict[str, Metric] = {
        "batch/zero_variance_share": Mean(sum(is_zero_variance(group.rewards) for group in judged), len(judged)),
        "batch/sequences": Sum(counts.sequences),
        "batch/sequences_trained": Sum(len(kept)),
        "batch/supervised": Sum(sum(sample.supervised for sample in cut)),
        "batch/truncated": Sum(
            sum(len(s.tokens_T) > len(c.tokens_T) for s, c in zip(_samples(batch), cut, strict=True))
        ),
        "batch/trained_tokens": Sum(counts.trained_tokens),
        "batch/teacher_tokens": Sum(counts.teacher_tokens),
        "batch/tokens": Sum(sum(len(sample.tokens_T) for sample in cut)),
        "length/completion_mean": Mean(counts.trained_tokens, counts.sequences),
        "length/completion_max": Max(max(map(len, positions))),
        **_reward_metrics("reward/mean", "reward/std", rewards),
    }
    for environment in sorted({group.environment for group in judged if group.environment is not None}):
        own = [reward for group in judged if group.environment == environment for reward in group.rewards]
        metrics |= _reward_metrics(f"reward/env_{environment}", f"reward/env_{environment}_std", own)
    return metrics


def _reward_metrics(mean: str, std: str, rewards: Sequence[float]) -> dict[str, Metric]:
    return {mean: Mean(sum(rewards), len(rewards)), std: Mean(float(np.std(rewards)) if rewards else 0.0)}


def _samples(batch: RolloutBatch) -> list[Sample]:
    return [sample for group in batch.groups for sample in group.samples]


def split(sequences: Sequence[TrainingSequence], size: int, pad_id: int = 0) -> list[MicroBatch]:
    """Microbatches of at most `size` sequences of similar length: sorted, so that padding is little."""
    by_length = sorted(sequences, key=lambda sequence: len(sequence.tokens_T))
    return [_pad(by_length[start : start + size], pad_id) for start in range(0, len(by_length), size)]


def _pad(sequences: Sequence[TrainingSequence], pad_id: int) -> MicroBatch:
    longest = max(len(sequence.tokens_T) for sequence in sequences)
    tokens_BT = np.full((len(sequences), longest), pad_id, dtype=np.int64)
    for row, sequence in enumerate(sequences):
        tokens_BT[row, : len(sequence.tokens_T)] = sequence.tokens_T
    counts = [len(sequence.positions) for sequence in sequences]
    roll = [
        np.zeros(count, np.float32) if sequence.rollout_logprobs is None else sequence.rollout_logprobs
        for sequence, count in zip(sequences, counts, strict=True)
    ]
    teacher = _joined_teachers(sequences)

    def each(values: Sequence[float | bool | int], dtype: type) -> Tensor:
        return torch.from_numpy(np.repeat(np.asarray(values, dtype), counts))

    return MicroBatch(
        tokens_BT=torch.from_numpy(tokens_BT),
        rows_N=each(range(len(sequences)), np.int64),
        columns_N=torch.from_numpy(np.concatenate([sequence.positions for sequence in sequences])),
        advantages_N=torch.from_numpy(np.concatenate([sequence.advantages for sequence in sequences])),
        weights_N=each([sequence.weight for sequence in sequences], np.float32),
        rollout_logprobs_N=torch.from_numpy(np.concatenate(roll).astype(np.float32)),
        has_rollout_N=each([sequence.rollout_logprobs is not None for sequence in sequences], np.bool_),
        temperature_N=each([sequence.temperature for sequence in sequences], np.float32),
        supervised_N=each([sequence.supervised for sequence in sequences], np.bool_),
        teacher_ids_NK=torch.from_numpy(teacher.ids_TK),
        teacher_logprobs_NK=torch.from_numpy(teacher.logprobs_TK),
        versions_B=torch.tensor([-1 if sequence.version is None else sequence.version for sequence in sequences]),
    )


def _joined_teachers(sequences: Sequence[TrainingSequence]) -> Teacher:
    """One for all trained tokens of several sequences, as wide as the widest."""
    width = max((s.teacher.ids_TK.shape[1] for s in sequences if s.teacher is not None), default=0)
    count = sum(len(sequence.positions) for sequence in sequences)
    ids_NK, logprobs_NK = np.zeros((count, width), np.int64), np.full((count, width), -np.inf, np.float32)
    start = 0
    for sequence in sequences:
        rows = slice(start, start := start + len(sequence.positions))
        if sequence.teacher is not None:
            own = sequence.teacher.ids_TK.shape[1]
            ids_NK[rows, :own], logprobs_NK[rows, :own] = sequence.teacher.ids_TK, sequence.teacher.logprobs_TK
    return Teacher(ids_NK, logprobs_NK)
