"""Scored groups to the batch of a step: advantages, the whole batch's normaliser, microbatches. Pure.

Advantages are relative to a baseline of the group's rewards r:

| estimate | definition | source |
|---|---|---|
| group | (r - mean) / (std + 1e-4) | DeepSeekMath, arXiv 2402.03300 |
| group, unscaled | r - mean | Dr. GRPO, arXiv 2503.20783 |
| rloo | r - mean of the others | RLOO, arXiv 2402.14740 |
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from grpo_trainer import import_paths
from grpo_trainer.batch.microbatches import MicroBatch, deal, split
from grpo_trainer.config.loss import LossConfig
from grpo_trainer.config.train import TrainConfig
from grpo_trainer.errors import ConfigError
from grpo_trainer.losses import BatchCounts, loss_spec, token_weight
from grpo_trainer.metrics.types import Max, Mean, Metric, Sum
from grpo_trainer.rollouts.groups import Group, RolloutBatch, Sample

MOST_VALUES = 8
"""Limit of distinct rewards whose shares are logged one by one."""


@dataclass(frozen=True)
class ReadyBatch:
    """A batch in main memory, ready for a step; a thread may build it during the step before.

    A process that has only its share of the batch has neither groups, sequences nor metrics.
    """

    rollouts: RolloutBatch  # the lease, with the groups that the step trains on
    sequences: tuple[Sample, ...]  # of the whole batch those with a gradient
    counts: BatchCounts  # denominators of the whole batch's means
    metrics: dict[str, Metric]  # of the whole batch
    largest_weight: float  # of a token in the whole batch's loss; 0: no token is trained
    microbatches: tuple[MicroBatch, ...] = ()  # this process's
    others: tuple[tuple[MicroBatch, ...], ...] = ()  # of the trainer's other processes, by rank
    policy_version: int | None = None  # of the weights that train on it; samples of it are fresh. None: not known
    shown: tuple[int, ...] = ()  # numbers of the samples whose logprobs the step returns

    def shares(self) -> list[ReadyBatch]:
        """Return each process's share, by rank. Only the first, this batch itself, has the groups and their metrics."""
        part = replace(self, rollouts=replace(self.rollouts, groups=()), sequences=(), metrics={}, others=())
        return [self, *(replace(part, microbatches=theirs) for theirs in self.others)]


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

    With `same_batch`, all processes train on the whole batch.
    """
    prepared = prepare(batch, config, config.seq_len, drop_overlong=config.overlong == "drop")
    budget = config.max_tokens_per_microbatch
    own, *others = (
        tuple(split(share, config.batch_size, max_tokens=budget, packed=packed, shared=shared))
        for share in deal(prepared.sequences, 1 if same_batch else processes, shared=shared)
    )
    others = [own] * (processes - 1) if same_batch else others
    return replace(prepared, microbatches=own, others=tuple(others))


def prepare(batch: RolloutBatch, config: LossConfig, seq_len: int, *, drop_overlong: bool = False) -> ReadyBatch:
    """Give every trained token its advantage and its weight; microbatches are still to be made.

    Weights are counted in the whole batch before any sequence is skipped, so neither skipping nor the split into
    microbatches changes the loss. A sequence without a trained token is in no denominator. Sequences without a
    gradient are skipped: all their advantages are 0, and no other term of the loss trains on them.

    Sequences longer than `seq_len` are truncated. With `drop_overlong` none of their tokens is trained; their reward
    remains part of their group's mean.
    """
    samples = [sample for group in batch.groups for sample in group.samples]
    overlong = [len(sample.tokens_T) > seq_len for sample in samples]
    samples = [
        sample.cut(seq_len, trained=not (drop_overlong and over))
        for sample, over in zip(samples, overlong, strict=True)
    ]
    counts = BatchCounts(
        sequences=sum(len(sample.positions) > 0 for sample in samples),
        trained_tokens=sum(len(sample.positions) for sample in samples),
        supervised_tokens=sum(len(sample.positions) for sample in samples if sample.supervised),
        teacher_tokens=sum(int(sample.teacher.given_N.sum()) for sample in samples if sample.teacher is not None),
    )
    advantages = [value for group in batch.groups for value in advantages_of(group, config)]
    sequences = tuple(
        replace(_prepared(sample, advantage, counts, config, seq_len), number=number)
        for number, (sample, advantage) in enumerate(zip(samples, advantages, strict=True))
        if len(sample.positions)
    )
    if not config.trains_without_advantage:
        sequences = tuple(one for one in sequences if np.any(one.advantages) or one.teacher is not None)
    dropped = sum(overlong) if drop_overlong else 0
    metrics = _batch_metrics(batch, samples, counts) | {
        "batch/sequences_trained": Sum(len(sequences)),
        "batch/sequences": Sum(len(samples) - dropped),
        "batch/truncated": Sum(sum(overlong) - dropped),
        "batch/dropped_overlong": Sum(dropped),
    }
    largest = max((sequence.weight for sequence in sequences), default=0.0)
    return ReadyBatch(batch, sequences, counts, metrics, largest)


def _prepared(sample: Sample, advantage: float, counts: BatchCounts, config: LossConfig, seq_len: int) -> Sample:
    """Return a sample with what it is trained with: the environment's own advantages, if given, and its weight.

    A supervised one has no part in what concerns the policy's samples, and the environment's 0 leaves it out.
    """
    length, given, teacher = len(sample.positions), sample.advantages, sample.teacher
    uses_own = given is not None and not (sample.supervised and given.any())
    weight = token_weight(
        config.loss, length=length, counts=counts, max_completion_len=config.max_completion_len or seq_len
    )
    sampled = not sample.supervised
    return replace(
        sample,
        advantages=given if uses_own else np.full(length, advantage, np.float32),
        weight=sample.share * weight,
        rollout_logprobs=sample.rollout_logprobs if sampled else None,
        version=sample.version if sampled else None,
        experts=sample.experts if sampled and config.routing_replay == "server" else None,
        teacher=teacher if config.distill_coef and teacher is not None and teacher.given_N.any() else None,
    )


def import_own_parts(config: LossConfig) -> None:
    """Import the user's own loss and advantage estimator, if the options name any.

    Raises:
        ConfigError: one of them can't be imported, or has a wrong type.
    """
    loss_spec(config.loss)
    if import_paths.is_import_path(config.advantage_estimator):
        estimator_of(config.advantage_estimator)


# ---------------------------------------------------------------- advantages

FLAG = "--advantage-estimator"
STD_FLOOR = 1e-4
"""Added to the standard deviation; a smaller one would amplify the noise of nearly equal floating-point rewards."""


def group_advantages(
    rewards: Sequence[float],
    scale: Literal["group", "none"] = "group",
    estimator: str = "group",
) -> list[float]:
    """Return the advantages of a group's sequences over a baseline of their rewards, one for each.

    They sum to 0 unless the user's own function gave them; a group whose rewards are all equal gets exactly 0.

    Args:
        scale: "group" divides by the group's sample standard deviation (n - 1) plus `STD_FLOOR`.
        estimator: the baseline is the mean of the group ("group"), or for each sequence that of the others ("rloo");
            or the import path of a function from the rewards to the advantages, which `scale` does not change.

    Raises:
        ConfigError: the user's own function did not return one finite number for each reward.
    """
    if is_zero_variance(rewards):
        return [0.0] * len(rewards)
    if import_paths.is_import_path(estimator):
        advantages = [float(value) for value in estimator_of(estimator)(list(rewards))]
        if len(advantages) != len(rewards) or not all(map(math.isfinite, advantages)):
            got = f"{advantages} from {estimator} for the rewards {list(rewards)}"
            raise ConfigError(field=FLAG, got=got, wanted="one finite number for each reward")
        return advantages
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


def is_zero_variance(rewards: Sequence[float]) -> bool:
    """Return whether all rewards of a group are the same, so that its advantages are 0."""
    return len(set(rewards)) <= 1


def advantages_of(group: Group, config: LossConfig) -> list[float]:
    """Return one advantage for each sample of a group: 1 if supervised, 0 if unscored, else by the rewards.

    The sequences of one episode have the same.
    """
    judged = iter(group_advantages(group.rewards, config.advantage_scale, config.advantage_estimator))
    found: list[float] = []
    for s in group.samples:
        found.append(found[-1] if s.follows else 1.0 if s.supervised else 0.0 if s.unscored else next(judged))
    return found


# ---------------------------------------------------------------- metrics


def _batch_metrics(batch: RolloutBatch, cut: Sequence[Sample], counts: BatchCounts) -> dict[str, Metric]:
    """Return metrics of the rewards as they came, and of the sequences as they are trained on."""
    judged = [group for group in batch.groups if group.rewards]
    rewards = [reward for group in judged for reward in group.rewards]
    lengths = [len(sample.positions) for sample in cut]
    shares = Counter(f"{reward:.4g}" for reward in rewards)
    if len(shares) > min(MOST_VALUES, len(rewards) // 4):  # too many for a histogram
        shares.clear()
    metrics: dict[str, Metric] = {
        "batch/zero_variance_share": Mean(sum(is_zero_variance(group.rewards) for group in judged), len(judged)),
        "batch/supervised": Sum(sum(sample.supervised for sample in cut)),
        "batch/unscored": Sum(sum(sample.unscored for sample in cut)),
        "batch/trained_tokens": Sum(counts.trained_tokens),
        "batch/teacher_tokens": Sum(counts.teacher_tokens),
        "batch/tokens": Sum(sum(len(sample.tokens_T) for sample in cut)),
        "length/truncated_share": Mean(sum(sample.truncated for sample in cut), len(cut)),
        "length/completion_mean": Mean(counts.trained_tokens, counts.sequences),
        "length/completion_max": Max(max(lengths)),
        **_quantiles("length/completion_", lengths, {"min": 0.0, "p10": 0.1, "p90": 0.9}),
        **_mean_and_std("reward/mean", "reward/std", rewards),
        **{f"reward/share/{reward}": Mean(count, len(rewards)) for reward, count in shares.items()},
        **_same_answers(judged),
        **_quantiles("reward/", rewards, {"min": 0.0, "p25": 0.25, "median": 0.5, "p75": 0.75, "max": 1.0}),
    }
    for environment in sorted({group.environment for group in judged if group.environment is not None}):
        its = [reward for group in judged if group.environment == environment for reward in group.rewards]
        metrics |= _mean_and_std(f"reward/env_{environment}", f"reward/env_{environment}_std", its)
    return metrics


def _same_answers(groups: Sequence[Group]) -> dict[str, Metric]:
    """Return the share of equal answers among pairs of answers to different prompts, and among those to one prompt.

    A policy that answers without regard to the prompt has both alike.
    """
    by_group = [
        Counter(s.tokens_T[s.positions].tobytes() for s in group.samples if len(s.positions) and not s.supervised)
        for group in groups
    ]
    together = Counter[bytes]()
    for answers in by_group:
        together.update(answers)

    def pairs(numbers: Iterable[int]) -> int:
        return sum(number * (number - 1) // 2 for number in numbers)

    equal_in_groups = sum(pairs(answers.values()) for answers in by_group)
    in_groups = pairs(answers.total() for answers in by_group)
    equal, across = pairs(together.values()) - equal_in_groups, pairs([together.total()]) - in_groups
    return {"batch/same_answers": Mean(equal, across), "batch/same_answers_in_group": Mean(equal_in_groups, in_groups)}


def _quantiles(prefix: str, values: Sequence[float], shares: Mapping[str, float]) -> dict[str, Metric]:
    """Return the values below which these shares of all values lie."""
    at = np.quantile(values, [*shares.values()]) if values else []
    return {f"{prefix}{name}": Mean(float(value)) for name, value in zip(shares, at, strict=False)}


def _mean_and_std(mean: str, std: str, rewards: Sequence[float]) -> dict[str, Metric]:
    return {mean: Mean(sum(rewards), len(rewards)), std: Mean(float(np.std(rewards)) if rewards else 0.0)}
