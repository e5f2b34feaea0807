"""Scored groups to what a step trains on: advantages, the whole batch's normaliser, microbatches. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from grpo_trainer.batch.advantages import group_advantages, is_zero_variance
from grpo_trainer.batch.microbatches import MicroBatch, TrainingSequence, kin_of, split
from grpo_trainer.batch.shared_prompts import deal_families
from grpo_trainer.config.train import LossConfig, TrainConfig
from grpo_trainer.losses import BatchCounts, token_weight
from grpo_trainer.metrics.types import Max, Mean, Metric, Sum
from grpo_trainer.rollouts.types import Group, RolloutBatch, Sample, Teacher


@dataclass(frozen=True)
class PreparedBatch:
    """What one step trains on, what its means are taken over, and what was seen while preparing it.

    Attributes:
        sequences: of the whole batch; none where a process has but its share.
        largest_weight: of a token in the whole batch's loss; 0: there is nothing to learn from.
    """

    sequences: tuple[TrainingSequence, ...]
    counts: BatchCounts
    metrics: dict[str, Metric]
    largest_weight: float


@dataclass(frozen=True)
class ReadyBatch:
    """All that a step needs of a batch but the device: a thread may make it while the step before it runs.

    Attributes:
        prepared: of the whole batch.
        microbatches: this process's.
        policy_version: the trainer's when the batch came, as in `RolloutBatch`.
        others: the microbatches of the trainer's other processes, if there are any.
    """

    prepared: PreparedBatch
    microbatches: tuple[MicroBatch, ...]
    policy_version: int | None
    others: tuple[tuple[MicroBatch, ...], ...] = ()

    def shares_of_others(self) -> list[ReadyBatch]:
        """What each process but this one is to have, by rank, and no more than that."""
        prepared = replace(self.prepared, sequences=())
        return [ReadyBatch(prepared, part, self.policy_version) for part in self.others]


def ready(
    batch: RolloutBatch, config: TrainConfig, *, packed: bool = False, shared: bool = False, processes: int = 1
) -> ReadyBatch:
    """Scored groups to tensors in main memory: `prepare`, `deal` to the processes, `split`.

    Args:
        packed, shared: see `microbatches.split`.
    """
    drop = config.compute.overlong == "drop"
    prepared = prepare(batch, config.loss, config.model.seq_len, drop_overlong=drop)
    budget = config.compute.max_tokens_per_microbatch
    own, *others = (
        tuple(split(share, config.batch_size, max_tokens=budget, packed=packed, shared=shared))
        for share in deal(prepared.sequences, processes, shared=shared)
    )
    return ReadyBatch(prepared, own, batch.policy_version, tuple(others))


def deal(
    sequences: Sequence[TrainingSequence], processes: int, *, shared: bool = False
) -> list[list[TrainingSequence]]:
    """Shares with about as many tokens each: the longest first, each to whoever has least so far.

    Args:
        shared: prompts are computed once, so sequences with the same one stay together as far as that goes.
    """
    if processes == 1:
        return [list(sequences)]
    if shared and sequences:
        prompts, lengths = zip(*((one.prompt_len, len(one.tokens_T)) for one in sequences), strict=True)
        dealt = deal_families(kin_of(sequences), prompts, lengths, processes)
        return [[sequences[index] for index in share] for share in dealt]
    shares: list[list[TrainingSequence]] = [[] for _ in range(processes)]
    loads = [0] * processes
    for sequence in sorted(sequences, key=lambda sequence: -len(sequence.tokens_T)):
        least = loads.index(min(loads))
        shares[least].append(sequence)
        loads[least] += len(sequence.tokens_T)
    return shares


def prepare(batch: RolloutBatch, config: LossConfig, seq_len: int, *, drop_overlong: bool = False) -> PreparedBatch:
    """Give every trained token its advantage and its weight.

    The weights are those of the whole batch, counted before anything is left out, so neither the split into
    microbatches nor skipping changes the loss. Sequences that have neither loss nor gradient are skipped: those whose
    advantages are all 0, where nothing else is to be learnt from them.

    Args:
        seq_len: longer sequences are cut.
        drop_overlong: they are left out instead, as if the batch had been without them; their rewards remain part of
            their groups' means.
    """
    samples = [sample for group in batch.groups for sample in group.samples]
    overlong = [len(sample.tokens_T) > seq_len for sample in samples]
    cut = [_cut(sample, seq_len, drop_overlong and over) for sample, over in zip(samples, overlong, strict=True)]
    positions = [np.flatnonzero(sample.trained_T) for sample in cut]
    teachers = [_teacher(sample, where) for sample, where in zip(cut, positions, strict=True)]
    counts = BatchCounts(
        sequences=len(cut) - (sum(overlong) if drop_overlong else 0),
        trained_tokens=sum(map(len, positions)),
        supervised_tokens=sum(len(where) for sample, where in zip(cut, positions, strict=True) if sample.supervised),
        teacher_tokens=sum(int(teacher.given_T.sum()) for teacher in teachers if teacher is not None),
    )
    advantages = [value for group in batch.groups for value in _advantages(group, config)]
    sequences = tuple(
        _training_sequence(sample, where, advantage, teacher if config.distill_coef else None, counts, config, seq_len)
        for sample, where, advantage, teacher in zip(cut, positions, advantages, teachers, strict=True)
        if len(where)
    )
    kept = tuple(sequence for sequence in sequences if _teaches(sequence, config))
    metrics = _batch_metrics(batch, cut, positions, counts, kept)
    metrics |= {
        "batch/truncated": Sum(0 if drop_overlong else sum(overlong)),
        "batch/dropped_overlong": Sum(sum(overlong) if drop_overlong else 0),
    }
    return PreparedBatch(kept, counts, metrics, max((sequence.weight for sequence in kept), default=0.0))


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
        weight=sample.weight
        * token_weight(
            config.loss,
            length=len(positions),
            counts=counts,
            max_completion_len=config.max_completion_len or seq_len,
        ),
        temperature=sample.temperature,
        version=None if sample.supervised else sample.policy_version,
        supervised=sample.supervised,
        teacher=teacher,
        share=sample.weight,
    )


def _teaches(sequence: TrainingSequence, config: LossConfig) -> bool:
    return bool(sequence.advantages.any()) or config.trains_without_advantage or sequence.teacher is not None


def _cut(sample: Sample, seq_len: int, dropped: bool) -> Sample:
    """The sample within `seq_len` tokens, its first token untrained: nothing predicts it. Dropped: all untrained."""
    trained_T = sample.trained_T[:seq_len].copy()
    trained_T[: None if dropped else 1] = False
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
        "batch/trained_tokens": Sum(counts.trained_tokens),
        "batch/teacher_tokens": Sum(counts.teacher_tokens),
        "batch/tokens": Sum(sum(len(sample.tokens_T) for sample in cut)),
        "length/completion_mean": Mean(counts.trained_tokens, counts.sequences),
        "length/completion_max": Max(max(map(len, positions))),
        **_quantiles("length/completion_", [*map(len, positions)], {"min": 0.0, "p10": 0.1, "p90": 0.9}),
        **_reward_metrics("reward/mean", "reward/std", rewards),
        **_quantiles("reward/", rewards, {"min": 0.0, "p25": 0.25, "median": 0.5, "p75": 0.75, "max": 1.0}),
    }
    for environment in sorted({group.environment for group in judged if group.environment is not None}):
        own = [reward for group in judged if group.environment == environment for reward in group.rewards]
        metrics |= _reward_metrics(f"reward/env_{environment}", f"reward/env_{environment}_std", own)
    return metrics


def _quantiles(prefix: str, values: Sequence[float], shares: Mapping[str, float]) -> dict[str, Metric]:
    """Of the batch: below each of them lies that share of the values."""
    if not values:
        return {}
    found = np.quantile(values, [*shares.values()])
    return {f"{prefix}{name}": Mean(float(value)) for name, value in zip(shares, found, strict=True)}


def _reward_metrics(mean: str, std: str, rewards: Sequence[float]) -> dict[str, Metric]:
    return {mean: Mean(sum(rewards), len(rewards)), std: Mean(float(np.std(rewards)) if rewards else 0.0)}
