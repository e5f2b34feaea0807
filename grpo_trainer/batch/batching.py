"""Scored groups to the batch of a step: advantages, the whole batch's normaliser, microbatches. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from grpo_trainer import import_paths
from grpo_trainer.batch.advantages import estimator_of, group_advantages, is_zero_variance
from grpo_trainer.batch.microbatches import MicroBatch, TrainingSequence, kin_of, split
from grpo_trainer.batch.shared_prompts import deal_families
from grpo_trainer.config.train import LossConfig, TrainConfig
from grpo_trainer.losses import BatchCounts, loss_spec, token_weight
from grpo_trainer.metrics.types import Max, Mean, Metric, Sum
from grpo_trainer.rollouts.types import Group, RolloutBatch, Sample, Teacher

MOST_VALUES = 8
"""Limit of distinct rewards whose shares are logged one by one."""


@dataclass(frozen=True)
class ReadyBatch:
    """A batch in main memory, ready for a step; a thread may build it during the step before.

    Attributes:
        rollouts: the leased batch; without groups if this process has only its share.
        groups: those of the batch that the step trains on; stale ones are left out.
        sequences: sequences of the whole batch; empty if this process has only its share.
        counts: denominators of the whole batch's means.
        metrics: of the whole batch.
        largest_weight: largest weight of a token in the whole batch's loss; 0: no token is trained.
        microbatches: this process's microbatches.
        others: the microbatches of the trainer's other processes, by rank.
        policy_version: version of the weights that train on it; samples of this version are fresh. None: not known.
        shown: numbers of the samples whose logprobs the step returns.
    """

    rollouts: RolloutBatch
    sequences: tuple[TrainingSequence, ...]
    counts: BatchCounts
    metrics: dict[str, Metric]
    largest_weight: float
    microbatches: tuple[MicroBatch, ...] = ()
    others: tuple[tuple[MicroBatch, ...], ...] = ()
    policy_version: int | None = None
    groups: tuple[Group, ...] = ()
    shown: tuple[int, ...] = ()

    def shares_of_others(self) -> list[ReadyBatch]:
        """Return the share of each other process, by rank, without what concerns the whole batch."""
        part = replace(self, rollouts=replace(self.rollouts, groups=()), sequences=(), metrics={}, others=(), groups=())
        return [replace(part, microbatches=own) for own in self.others]


def ready(
    batch: RolloutBatch,
    config: TrainConfig,
    *,
    packed: bool = False,
    shared: bool = False,
    processes: int = 1,
    same_batch: bool = False,
) -> ReadyBatch:
    """Turn scored groups into tensors in main memory: `prepare`, `deal` to the processes, `split`.

    Args:
        packed, shared: see `microbatches.split`.
        same_batch: all processes train on the whole batch.
    """
    drop = config.compute.overlong == "drop"
    prepared = prepare(batch, config.loss, config.model.seq_len, drop_overlong=drop)
    budget = config.compute.max_tokens_per_microbatch
    own, *others = (
        tuple(split(share, config.batch_size, max_tokens=budget, packed=packed, shared=shared))
        for share in deal(prepared.sequences, 1 if same_batch else processes, shared=shared)
    )
    others = [own] * (processes - 1) if same_batch else others
    return replace(prepared, microbatches=own, others=tuple(others))


def deal(
    sequences: Sequence[TrainingSequence], processes: int, *, shared: bool = False
) -> list[list[TrainingSequence]]:
    """Return shares with about the same number of tokens: each sequence, longest first, joins the smallest share.

    Args:
        shared: shared prompts are computed once, so sequences with the same prompt stay together if possible.
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


def prepare(batch: RolloutBatch, config: LossConfig, seq_len: int, *, drop_overlong: bool = False) -> ReadyBatch:
    """Give every trained token its advantage and its weight; microbatches are still to be made.

    Weights are counted in the whole batch before any sequence is skipped, so neither skipping nor the split into
    microbatches changes the loss. A sequence without a trained token is in no denominator. Sequences without a
    gradient are skipped: all their advantages are 0, and no other term of the loss trains on them.

    Args:
        seq_len: longer sequences are truncated.
        drop_overlong: no token of a longer sequence is trained; its reward remains part of its group's mean.
    """
    samples = [sample for group in batch.groups for sample in group.samples]
    overlong = [len(sample.tokens_T) > seq_len for sample in samples]
    cut = [_cut(sample, seq_len, drop_overlong and over) for sample, over in zip(samples, overlong, strict=True)]
    positions = [np.flatnonzero(sample.trained_T) for sample in cut]
    teachers = [_teacher(sample, where) for sample, where in zip(cut, positions, strict=True)]
    counts = BatchCounts(
        sequences=sum(len(where) > 0 for where in positions),
        trained_tokens=sum(map(len, positions)),
        supervised_tokens=sum(len(where) for sample, where in zip(cut, positions, strict=True) if sample.supervised),
        teacher_tokens=sum(int(teacher.given_T.sum()) for teacher in teachers if teacher is not None),
    )
    advantages = [value for group in batch.groups for value in _advantages(group, config)]
    sequences = tuple(
        replace(
            _training_sequence(
                sample, where, advantage, teacher if config.distill_coef else None, counts, config, seq_len
            ),
            number=number,
        )
        for number, (sample, where, advantage, teacher) in enumerate(
            zip(cut, positions, advantages, teachers, strict=True)
        )
        if len(where)
    )
    all_teach = config.trains_without_advantage
    kept = tuple(one for one in sequences if all_teach or one.advantages.any() or one.teacher is not None)
    metrics = _batch_metrics(batch, cut, positions, counts, kept)
    dropped = sum(overlong) if drop_overlong else 0
    metrics |= {
        "batch/sequences": Sum(len(cut) - dropped),
        "batch/truncated": Sum(sum(overlong) - dropped),
        "batch/dropped_overlong": Sum(dropped),
    }
    largest = max((sequence.weight for sequence in kept), default=0.0)
    return ReadyBatch(batch, kept, counts, metrics, largest, groups=batch.groups)


def import_own_parts(config: LossConfig) -> None:
    """Import the user's own loss and advantage estimator, if the options name any.

    Raises:
        ConfigError: one of them can't be imported, or has a wrong type.
    """
    loss_spec(config.loss)
    if import_paths.is_import_path(config.advantage_estimator):
        estimator_of(config.advantage_estimator)


def _teacher(sample: Sample, positions: NDArray[np.int64]) -> Teacher | None:
    """Return the teacher's logprobs at the trained tokens, or None."""
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
        experts=sample.experts if config.routing_replay == "server" and not sample.supervised else None,
    )


def _cut(sample: Sample, seq_len: int, dropped: bool) -> Sample:
    """Truncate a sample to `seq_len` tokens. The first is untrained, as no token predicts it; if dropped, all are."""
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
    """Return each sequence's advantage: 1 if supervised, the environment's per token if given, else the group's."""
    own = group.advantages(group_advantages(group.rewards, config.advantage_scale, config.advantage_estimator))
    values: list[float | NDArray[np.float32]] = []
    for sample, value in zip(group.samples, own, strict=True):
        given = sample.advantages_T
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
        "batch/sequences_trained": Sum(len(kept)),
        "batch/supervised": Sum(sum(sample.supervised for sample in cut)),
        "batch/unscored": Sum(sum(sample.unscored for sample in cut)),
        "batch/trained_tokens": Sum(counts.trained_tokens),
        "batch/teacher_tokens": Sum(counts.teacher_tokens),
        "batch/tokens": Sum(sum(len(sample.tokens_T) for sample in cut)),
        "length/truncated_share": Mean(sum(sample.truncated for sample in cut), len(cut)),
        "length/completion_mean": Mean(counts.trained_tokens, counts.sequences),
        "length/completion_max": Max(max(map(len, positions))),
        **_quantiles("length/completion_", [*map(len, positions)], {"min": 0.0, "p10": 0.1, "p90": 0.9}),
        **_reward_metrics("reward/mean", "reward/std", rewards),
        **_shares("reward/share/", rewards),
        **_same_answers(judged),
        **_quantiles("reward/", rewards, {"min": 0.0, "p25": 0.25, "median": 0.5, "p75": 0.75, "max": 1.0}),
    }
    for environment in sorted({group.environment for group in judged if group.environment is not None}):
        own = [reward for group in judged if group.environment == environment for reward in group.rewards]
        metrics |= _reward_metrics(f"reward/env_{environment}", f"reward/env_{environment}_std", own)
    return metrics


def _same_answers(groups: Sequence[Group]) -> dict[str, Metric]:
    """Return the share of equal answers among pairs of answers to different prompts, and among those to one prompt.

    A policy that answers without regard to the prompt has both alike.
    """
    counts = [
        Counter(
            sample.tokens_T[sample.trained_T].tobytes()
            for sample in group.samples
            if sample.trained_T.any() and not sample.supervised
        )
        for group in groups
    ]

    def pairs(numbers: Iterable[int]) -> int:
        return sum(number * (number - 1) // 2 for number in numbers)

    in_groups, pairs_in_groups = sum(pairs(own.values()) for own in counts), pairs(own.total() for own in counts)
    together = Counter[bytes]()
    for own in counts:
        together.update(own)
    equal, of = pairs(together.values()) - in_groups, pairs([together.total()]) - pairs_in_groups
    return {"batch/same_answers": Mean(equal, of), "batch/same_answers_in_group": Mean(in_groups, pairs_in_groups)}


def _shares(prefix: str, values: Sequence[float]) -> dict[str, Metric]:
    """Return the share of each distinct value, a histogram; nothing where they are many."""
    counts = Counter(f"{value:.4g}" for value in values)
    if len(counts) > min(MOST_VALUES, len(values) // 4):
        return {}
    return {f"{prefix}{value}": Mean(count, len(values)) for value, count in counts.items()}


def _quantiles(prefix: str, values: Sequence[float], shares: Mapping[str, float]) -> dict[str, Metric]:
    """Of the batch: below each of them lies that share of the values."""
    if not values:
        return {}
    found = np.quantile(values, [*shares.values()])
    return {f"{prefix}{name}": Mean(float(value)) for name, value in zip(shares, found, strict=True)}


def _reward_metrics(mean: str, std: str, rewards: Sequence[float]) -> dict[str, Metric]:
    return {mean: Mean(sum(rewards), len(rewards)), std: Mean(float(np.std(rewards)) if rewards else 0.0)}
