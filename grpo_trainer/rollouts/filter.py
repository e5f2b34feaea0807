"""Which groups of a batch are trained on: those that fit this model, and that are not too old.

The rollout API refuses groups that no model could be trained on. `GroupFilter` checks what the API can't know, such as
the vocabulary. It raises no error, because the API would serve the same group first after each restart. `judge` leaves
out groups that are too old at the version that is about to train on them, or lowers their weight.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from grpo_common.errors import Problem
from grpo_trainer.metrics.types import Max, Mean, Metric, Sum
from grpo_trainer.rollouts.groups import Group, RolloutBatch, Sample
from grpo_trainer.versions import NO_OFFSETS, VersionOffsets
from vllm_server.protocol import PROOF_VERSION
from vllm_server.protocol.routed_experts import RoutedShape

log = logging.getLogger(__name__)


@dataclass(eq=False, repr=False)
class GroupFilter:
    """Leaves out groups that can't be trained on, and logs that once for each environment."""

    vocabulary: int | None
    """Upper bound of token ids; None: not known."""
    name_of: Callable[[int | None], str]
    """Returns an environment's name for messages by its number."""
    longest: int | None = None
    """Number of a sequence's first tokens that are trained on, including its prompt; None: all."""
    routed: RoutedShape | None = None
    """What routed experts must be of, where they are replayed; None: they are not."""
    last: Problem = field(default_factory=Problem)
    """Why the last group was left out."""
    _told: set[tuple[str, int | None]] = field(default_factory=set)

    def sift(self, batch: RolloutBatch) -> RolloutBatch:
        """Return the batch without groups that can't be trained on; `refused` counts those."""
        kept = tuple(group for group in batch.groups if self._fits(group))
        return replace(batch, groups=kept, refused=len(batch.groups) - len(kept))

    def _fits(self, group: Group) -> bool:
        reason = misfit(group, self.vocabulary, self.longest, self.routed)
        if reason is not None:
            self.last = replace(reason, field=f"{self.name_of(group.environment)}: {reason.field}")
            if self._is_first("misfit", group):
                log.warning(
                    "a group can't be trained on and is left out, as others like it will be (rollout/refused_groups "
                    "counts them): %s",
                    self.last,
                )
            return False
        length = max(len(sample.tokens_T) for sample in group.samples)
        if self.longest is not None and length > self.longest and self._is_first("cut", group):
            log.warning(
                "%s: sequences are longer than --seq-len (batch/truncated counts them): got %d tokens, wanted %d at "
                "most",
                self.name_of(group.environment),
                length,
                self.longest,
            )
        sends_logprobs = any(sample.rollout_logprobs is not None for sample in group.samples)
        if sends_logprobs and not group.says_sampling and self._is_first("silent", group):
            log.warning(
                "%s: groups do not say how they were sampled: got inference_logprobs without generation_params, wanted "
                '{"temperature": …}; they count as sampled at temperature 1 from the whole vocabulary '
                "(docs/training.md)",
                self.name_of(group.environment),
            )
        return True

    def _is_first(self, what: str, group: Group) -> bool:
        """Return whether this happens to a group of its environment for the first time."""
        known = len(self._told)
        self._told.add((what, group.environment))
        return len(self._told) > known


def misfit(
    group: Group, vocabulary: int | None = None, longest: int | None = None, routed: RoutedShape | None = None
) -> Problem | None:
    """Return why a group can't be trained on; None if it can. The limits are those of `GroupFilter`."""
    # A group of truncated answers may be left out of the loss as a whole.
    teaches = any(_count(sample, longest) or sample.truncated for sample in group.samples)
    if not teaches:
        got = f"no trained token among the first {longest or max(len(sample.tokens_T) for sample in group.samples)}"
        return Problem("masks", got, "1 or more in a group", "look for empty completions and for prompts without end")
    for i, sample in enumerate(group.samples):
        if reason := _misfit(sample, vocabulary) or (routed and _wrong_experts(sample, routed, longest)):
            return replace(reason, field=f"sequence {i}: {reason.field}")
    return None


def _misfit(sample: Sample, vocabulary: int | None) -> Problem | None:
    if sample.bent is not None:
        return sample.bent
    taught = sample.teacher.ids_NK[np.isfinite(sample.teacher.logprobs_NK)] if sample.teacher else np.empty(0, np.int64)
    for name, ids in (("tokens", sample.tokens_T), ("distill_token_ids", taught)):
        lowest, highest = (int(ids.min()), int(ids.max())) if ids.size else (0, 0)
        if lowest < 0 or (vocabulary is not None and highest >= vocabulary):
            got = lowest if lowest < 0 else highest
            wanted = "0 or more" if vocabulary is None else f"ids below {vocabulary}, which is all that the model knows"
            return Problem(name, str(got), wanted, "use the model's tokenizer in the environment")
    if not (math.isfinite(sample.temperature) and sample.temperature > 0.0):
        return Problem("temperature", f"{sample.temperature:g}", "a finite number above 0")
    numbers = {
        "scores": np.asarray([sample.reward], np.float64),
        "advantages": sample.advantages,
        "inference_logprobs": sample.rollout_logprobs,
    }
    for name, values in numbers.items():
        if values is not None and len(wild := values[~(np.abs(values) <= np.finfo(np.float32).max)]):
            return Problem(name, f"{wild[0]:g}", "numbers that are finite in float32")
    return None


def _wrong_experts(sample: Sample, routed: RoutedShape, longest: int | None) -> Problem | None:
    """Return why a sample's routed experts can't be replayed. A supervised one needs none: no server has sampled it."""
    count = _count(sample, longest)
    if sample.supervised or not count:
        return None
    needed = int(sample.positions[count - 1])  # tokens before the last that is trained
    if sample.experts is None:
        fix = "start grpo serve with --return-routed-experts, or leave out --routing-replay"
        return Problem("routed_experts", "none", "the experts of each token", fix)
    if sample.experts.shape != routed:
        got, wanted = (f"{s.top_k} of {s.experts} experts in {s.layers} layers" for s in (sample.experts.shape, routed))
        return Problem("routed_experts", got, wanted, "serve the trainer's model")
    if len(sample.experts.ids_TLK) < needed:
        got, fix = f"experts of {len(sample.experts.ids_TLK)} tokens", "send those of each turn with its tokens"
        return Problem("routed_experts", got, f"of {needed} or more", fix)
    return None


def _count(sample: Sample, longest: int | None) -> int:
    return len(sample.positions) if longest is None else int(np.searchsorted(sample.positions, longest))


@dataclass(frozen=True)
class Judged:
    """Groups to train on, and metrics of their age."""

    groups: tuple[Group, ...]
    shares: tuple[float, ...]  # of each group that was judged the factor of its loss; 0: it is left out
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

    `version` is that of the weights that are about to be trained. An age up to `limit` has no consequences; None:
    there is no limit. `numbering` has the jumps of version numbers, which are no updates.
    """
    shares: list[float] = []
    kept: list[Group] = []
    kept_ages: list[int] = []
    for group in groups:
        versions = [sample.version for sample in group.samples if sample.version is not None]
        ages = [max(0, numbering.updates(version) - numbering.updates(each)) for each in versions]
        excess = 0 if limit is None else max(0, max(ages, default=0) - limit)
        share = 1.0 / (1.0 + excess)
        if PROOF_VERSION in versions or (excess and on_stale == "drop"):
            share = 0.0
        shares.append(share)
        if share:
            samples = tuple(replace(sample, share=share) for sample in group.samples)
            kept.append(group if share == 1.0 else replace(group, samples=samples))
            kept_ages += ages
    metrics: dict[str, Metric] = {"rollout/dropped_stale_groups": Sum(shares.count(0.0))}
    if on_stale == "downweight":
        metrics["rollout/downweighted_groups"] = Sum(sum(0.0 < share < 1.0 for share in shares))
    if kept_ages:
        metrics |= {
            "rollout/staleness_mean": Mean(sum(kept_ages), len(kept_ages)),
            "rollout/staleness_max": Max(max(kept_ages)),
        }
    return Judged(tuple(kept), tuple(shares), metrics)
