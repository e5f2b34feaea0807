"""The staleness of a batch's samples at the version that is about to train on them, and its consequences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from grpo_trainer.metrics.types import Max, Mean, Metric, Sum
from grpo_trainer.rollouts.types import Group
from grpo_trainer.versions import NO_OFFSETS, VersionOffsets
from vllm_server.protocol import PROOF_VERSION


@dataclass(frozen=True)
class Judged:
    """Groups to train on, and metrics of their age."""

    groups: tuple[Group, ...]
    metrics: dict[str, Metric]


def judge(
    groups: Sequence[Group],
    version: int,
    limit: int | None,
    on_stale: Literal["drop", "downweight"] = "drop",
    numbering: VersionOffsets = NO_OFFSETS,
) -> Judged:
    """Leave out groups that are too old, or lower their weight.

    A group's age is that of its oldest sample: the number of updates from the version that sampled it to `version`.
    A sample of a later version, which a former process published before a resume, has age 0. `downweight` multiplies
    the loss of a group that is `excess` versions above the limit by `1 / (1 + excess)`; the batch's normaliser does not
    change. A group that a proof's synthetic weights have sampled, while a trainer started again, is always left out.

    Args:
        version: version of the weights that are about to be trained.
        limit: largest age without consequences; None: no limit.
        numbering: jumps of the version numbers.
    """
    kept: list[Group] = []
    dropped = lowered = 0
    for group in groups:
        ages = _ages(group, version, numbering)
        excess = 0 if limit is None else max(0, max(ages, default=0) - limit)
        if any(sample.policy_version == PROOF_VERSION for sample in group.samples):
            dropped += 1
        elif not excess:
            kept.append(group)
        elif on_stale == "drop":
            dropped += 1
        else:
            lowered += 1
            weight = 1.0 / (1.0 + excess)
            kept.append(replace(group, samples=tuple(replace(sample, weight=weight) for sample in group.samples)))
    metrics: dict[str, Metric] = {"rollout/dropped_stale_groups": Sum(dropped)}
    if on_stale == "downweight":
        metrics["rollout/downweighted_groups"] = Sum(lowered)
    if ages := [age for group in kept for age in _ages(group, version, numbering)]:
        metrics |= {"rollout/staleness_mean": Mean(sum(ages), len(ages)), "rollout/staleness_max": Max(max(ages))}
    return Judged(tuple(kept), metrics)


def same_judgement(one: Sequence[Group], other: Sequence[Group]) -> bool:
    """Return whether two judgements of the same groups keep the same samples with the same weights."""
    return [(id(sample.tokens_T), sample.weight) for group in one for sample in group.samples] == [
        (id(sample.tokens_T), sample.weight) for group in other for sample in group.samples
    ]


def _ages(group: Group, version: int, numbering: VersionOffsets) -> list[int]:
    """Return the ages of a group's samples whose version is known."""
    known = [sample.policy_version for sample in group.samples if sample.policy_version is not None]
    return [max(0, numbering.updates(version) - numbering.updates(own)) for own in known]
