"""Scored groups to microbatches: advantages, the whole batch's normaliser, length-sorted right-padded tensors. Pure.

Right padding needs no attention mask: attention is causal, so no trained token ever sees padding. What the loss needs
lies flat, one entry per trained token (suffix `_N`), so that padding can't enter it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from grpo_trainer.advantages import group_advantages, is_zero_variance
from grpo_trainer.config import LossConfig
from grpo_trainer.losses import token_weight
from grpo_trainer.metrics.types import Max, Mean, Metric, Sum
from grpo_trainer.rollouts.types import Group, RolloutBatch, Sample


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


@dataclass(frozen=True)
class PreparedBatch:
    """What one step trains on, and what was seen while preparing it."""

    sequences: tuple[TrainingSequence, ...]
    metrics: dict[str, Metric]


@dataclass(frozen=True)
class MicroBatch:
    """Tensors of one forward and backward pass. B sequences, T tokens, N trained tokens.

    Attributes:
        tokens_BT: token ids, right-padded.
        rows_N, columns_N: where the trained tokens stand in `tokens_BT`; columns are >= 1.
        advantages_N: of each trained token.
        weights_N: of each trained token in the loss of the whole batch.
        rollout_logprobs_N: what the server sampled with; 0 where `has_rollout_N` is False.
        temperature_N: of sampling.
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
    versions_B: Tensor

    def to(self, device: torch.device) -> MicroBatch:
        """The same on a device."""
        return MicroBatch(*(tensor.to(device, non_blocking=True) for tensor in self.__dict__.values()))


def prepare(batch: RolloutBatch, config: LossConfig, seq_len: int) -> PreparedBatch:
    """Give every trained token its advantage and its weight.

    The weights are those of the whole batch, counted before anything is left out, so neither the split into
    microbatches nor skipping changes the loss. Sequences whose advantages are all 0 have neither loss nor gradient and
    are skipped.
    """
    cut = [_cut(sample, seq_len) for group in batch.groups for sample in group.samples]
    lengths = [int(sample.trained_T.sum()) for sample in cut]
    trained_tokens = sum(lengths)
    advantages = [value for group in batch.groups for value in _advantages(group, config)]
    sequences = []
    for sample, length, advantage in zip(cut, lengths, advantages, strict=True):
        positions = np.flatnonzero(sample.trained_T)
        per_token = (
            np.broadcast_to(np.asarray(advantage, np.float32), sample.tokens_T.shape)[positions] if length else None
        )
        if per_token is None or not per_token.any():
            continue
        roll = sample.rollout_logprobs_T
        sequences.append(
            TrainingSequence(
                tokens_T=sample.tokens_T,
                positions=positions,
                advantages=per_token,
                rollout_logprobs=None if roll is None else roll[positions],
                weight=token_weight(
                    config.loss,
                    length=length,
                    sequences=len(cut),
                    trained_tokens=trained_tokens,
                    max_completion_len=config.max_completion_len or seq_len,
                ),
                temperature=sample.temperature,
                version=sample.policy_version,
            )
        )
    return PreparedBatch(tuple(sequences), _batch_metrics(batch, cut, lengths, sequences))


def _cut(sample: Sample, seq_len: int) -> Sample:
    """The sample within `seq_len` tokens, its first token untrained: nothing predicts it."""
    trained_T = sample.trained_T[:seq_len].copy()
    trained_T[0] = False
    cut = slice(0, seq_len)
    return Sample(
        tokens_T=sample.tokens_T[cut],
        trained_T=trained_T,
        reward=sample.reward,
        advantages_T=None if sample.advantages_T is None else sample.advantages_T[cut],
        rollout_logprobs_T=None if sample.rollout_logprobs_T is None else sample.rollout_logprobs_T[cut],
        policy_version=sample.policy_version,
        temperature=sample.temperature,
    )


def _advantages(group: Group, config: LossConfig) -> list[float | NDArray[np.float32]]:
    """The environment's own advantages (per token) where it gave them, else the group's (per sequence)."""
    own = group_advantages(group.rewards, config.advantage_scale)
    return [
        value if sample.advantages_T is None else sample.advantages_T[: len(sample.tokens_T)]
        for sample, value in zip(group.samples, own, strict=True)
    ]


def _batch_metrics(
    batch: RolloutBatch, cut: Sequence[Sample], lengths: Sequence[int], kept: Sequence[TrainingSequence]
) -> dict[str, Metric]:
    rewards = [reward for group in batch.groups for reward in group.rewards]
    metrics: dict[str, Metric] = {
        "reward/mean": Mean(sum(rewards), len(rewards)),
        "reward/std": Mean(float(np.std(rewards))),
        "batch/zero_variance_share": Mean(
            sum(is_zero_variance(group.rewards) for group in batch.groups), len(batch.groups)
        ),
        "batch/sequences": Sum(len(cut)),
        "batch/sequences_trained": Sum(len(kept)),
        "batch/truncated": Sum(
            sum(len(s.tokens_T) > len(c.tokens_T) for s, c in zip(_samples(batch), cut, strict=True))
        ),
        "batch/trained_tokens": Sum(sum(lengths)),
        "batch/tokens": Sum(sum(len(sample.tokens_T) for sample in cut)),
        "length/completion_mean": Mean(sum(lengths), len(lengths)),
        "length/completion_max": Max(max(lengths)),
    }
    for group in batch.groups:
        if group.environment is not None:
            key = f"reward/env_{group.environment}"
            mean = Mean(sum(group.rewards), len(group.rewards))
            before = metrics.get(key)
            metrics[key] = before.merge(mean) if isinstance(before, Mean) else mean
    return metrics


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
        versions_B=torch.tensor([-1 if sequence.version is None else sequence.version for sequence in sequences]),
    )
