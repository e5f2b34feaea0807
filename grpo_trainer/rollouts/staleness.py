"""How old the samples of a batch are at the version that is about to train on them, and what that means for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from grpo_trainer.metrics.types import Max, Mean, Metric, Sum
from grpo_trainer.rollouts.types import Group


@dataclass(frozen=True)
class Judged:
    """Groups that are trained on, and what was seen of their age."""

    groups: tuple[Group, ...]
    metrics: dict[str, Metric]


def judge(
    groups: Sequence[Group], version: int, limit: int | None, on_stale: Literal["drop", "downweight"] = "drop"
) -> Judged:
    """Leave out the groups that are too old, or let them count less.

    A group is as old as its oldest sample: `version` less the version that sampled it. `downweight` multiplies the loss
    of a group that is `excess` versions above the limit by `1 / (1 + excess)`; the batch's normaliser stays.

    Args:
        version: of the weights that are about to be trained.
        limit: age that is no matter; None: none is.
    """
    kept: list[Group] = []
    dropped = lowered = 0
    for group in groups:
        excess = 0 if limit is None else max(0, _age(group, version) - limit)
        if not excess:
            kept.append(group)
        elif on_stale == "drop":
            dropped += 1
        else:
            lowered += 1
            kept.append(_weighted(group, 1.0 / (1.0 + excess)))
    metrics: dict[str, Metric] = {"rollout/dropped_stale_groups": Sum(dropped)}
    if on_stale == "downweight":
        metrics["rollout/downweighted_groups"] = Sum(lowered)
    return Judged(tuple(kept), _ages(kept, version) | metrics)


def same_judgement(one: Sequence[Group], other: Sequence[Group]) -> bool:
    """Whether two judgements of the same groups let the same ones count for the same."""
    return [(id(sample.tokens_T), sample.weight) for group in one for sample in group.samples] == [
        (id(sample.tokens_T), sample.weight) for group in other for sample in group.samples
    ]


def _age(group: Group, version: int) -> int:
    versions = [sample.policy_version for sample in group.samples if sample.policy_version is not None]
    return version - min(versions) if versions else 0


def _weighted(group: Group, weight: float) -> Group:
    return replace(group, samples=tuple(replace(sample, weight=weight) for sample in group.samples))


def _ages(groups: Sequence[Group], version: int) -> dict[str, Metric]:
    ages = [
        version - sample.policy_version
        for group in groups
        for sample in group.samples
        if sample.policy_version is not None
    ]
    if not ages:
        return {}
    return {"rollout/staleness_mean": Mean(sum(ages), len(ages)), "rollout/staleness_max": Max(max(ages))}
