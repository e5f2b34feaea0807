"""Filters out the groups of a batch that this model can't be trained on, counts them, and logs the first.

The rollout API refuses groups that no model could be trained on. This filter checks what the API can't know, such as
the vocabulary. It raises no error, because the API would serve the same group first after each restart.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from grpo_common.errors import Problem
from grpo_trainer.rollouts.types import Group, RolloutBatch, Sample
from vllm_server.protocol.routed_experts import RoutedShape

log = logging.getLogger(__name__)


class GroupFilter:
    """Leaves out groups that can't be trained on, and logs that once for each environment.

    Args:
        vocabulary: upper bound of token ids; None: not known.
        name_of: returns an environment's name for messages by its number.
        longest: number of a sequence's first tokens that are trained on, including its prompt; None: all.
        routed: what routed experts must be of, where they are replayed; None: they are not.

    Attributes:
        last: why the last group was left out.
    """

    def __init__(
        self,
        vocabulary: int | None,
        name_of: Callable[[int | None], str],
        longest: int | None = None,
        routed: RoutedShape | None = None,
    ) -> None:
        self.last = Problem()
        self._vocabulary = vocabulary
        self._name_of = name_of
        self._longest = longest
        self._routed = routed
        self._told: set[tuple[str, int | None]] = set()

    def sift(self, batch: RolloutBatch) -> RolloutBatch:
        """Return the batch without groups that can't be trained on; `refused` counts those."""
        kept = tuple(group for group in batch.groups if self._fits(group))
        return replace(batch, groups=kept, refused=len(batch.groups) - len(kept))

    def _fits(self, group: Group) -> bool:
        reason = misfit(group, self._vocabulary, self._longest, self._routed)
        if reason is None:
            self._note_cut(group)
            self._note_silent(group)
            return True
        self.last = replace(reason, field=f"{self._name_of(group.environment)}: {reason.field}")
        if self._is_first("misfit", group):
            log.warning(
                "a group can't be trained on and is left out, as others like it will be (rollout/refused_groups counts "
                "them): %s",
                self.last,
            )
        return False

    def _is_first(self, what: str, group: Group) -> bool:
        """Return whether this happens to a group of its environment for the first time."""
        known = len(self._told)
        self._told.add((what, group.environment))
        return len(self._told) > known

    def _note_cut(self, group: Group) -> None:
        """Log once for each environment that its sequences are too long; `batch/truncated` counts them."""
        length = max(len(sample.tokens_T) for sample in group.samples)
        if self._longest is None or length <= self._longest or not self._is_first("cut", group):
            return
        log.warning(
            "%s: sequences are longer than --seq-len (batch/truncated counts them): got %d tokens, wanted %d at most",
            self._name_of(group.environment),
            length,
            self._longest,
        )

    def _note_silent(self, group: Group) -> None:
        """Log once for each environment that it sends logprobs and does not say how it samples."""
        sends_none = all(sample.rollout_logprobs_T is None for sample in group.samples)
        if group.says_sampling or sends_none or not self._is_first("silent", group):
            return
        log.warning(
            "%s: groups do not say how they were sampled: got inference_logprobs without generation_params, wanted "
            '{"temperature": …}; they count as sampled at temperature 1 from the whole vocabulary (docs/sampling.md)',
            self._name_of(group.environment),
        )


def misfit(
    group: Group, vocabulary: int | None = None, longest: int | None = None, routed: RoutedShape | None = None
) -> Problem | None:
    """Return why a group can't be trained on; None if it can.

    Args:
        vocabulary: upper bound of token ids; None: not known.
        longest: number of a sequence's first tokens that are trained on; None: all.
        routed: what its routed experts must be of; None: they are not used.
    """
    # Nothing predicts the first token. A group of truncated answers may be left out of the loss as a whole.
    teaches = any(sample.trained_T[1:longest].any() or sample.truncated for sample in group.samples)
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
    for name, ids in (("tokens", sample.tokens_T), ("distill_token_ids", _taught(sample))):
        lowest, highest = (int(ids.min()), int(ids.max())) if ids.size else (0, 0)
        if lowest < 0 or (vocabulary is not None and highest >= vocabulary):
            got = lowest if lowest < 0 else highest
            wanted = "0 or more" if vocabulary is None else f"ids below {vocabulary}, which is all that the model knows"
            return Problem(name, str(got), wanted, "use the model's tokenizer in the environment")
    if not (math.isfinite(sample.temperature) and sample.temperature > 0.0):
        return Problem("temperature", f"{sample.temperature:g}", "a finite number above 0")
    trained_T = sample.trained_T
    numbers = {
        "scores": np.asarray([sample.reward], np.float64),
        "advantages": None if sample.advantages_T is None else sample.advantages_T[trained_T],
        "inference_logprobs": None if sample.rollout_logprobs_T is None else sample.rollout_logprobs_T[trained_T],
    }
    for name, values in numbers.items():
        if values is not None and len(wild := values[~(np.abs(values) <= np.finfo(np.float32).max)]):
            return Problem(name, f"{wild[0]:g}", "numbers that are finite in float32")
    return None


def _wrong_experts(sample: Sample, routed: RoutedShape, longest: int | None) -> Problem | None:
    """Return why a sample's routed experts can't be replayed. A supervised one needs none: no server has sampled it."""
    needed = int(np.flatnonzero(sample.trained_T[:longest])[-1:].sum())  # tokens before the last that is trained
    if sample.supervised or not needed:
        return None
    if sample.experts is None:
        fix = "start grpo serve with --return-routed-experts, or leave out --routing-replay"
        return Problem("routed_experts", "none", "the experts of each token", fix)
    if sample.experts.shape != routed:
        return Problem("routed_experts", _said(sample.experts.shape), _said(routed), "serve the trainer's model")
    if len(sample.experts.ids_TLK) < needed:
        got, fix = f"experts of {len(sample.experts.ids_TLK)} tokens", "send those of each turn with its tokens"
        return Problem("routed_experts", got, f"of {needed} or more", fix)
    return None


def _said(shape: RoutedShape) -> str:
    return f"{shape.top_k} of {shape.experts} experts in {shape.layers} layers"


def _taught(sample: Sample) -> np.ndarray:
    """Return the ids of a teacher's tokens."""
    if sample.teacher is None:
        return np.empty(0, np.int64)
    return sample.teacher.ids_TK[np.isfinite(sample.teacher.logprobs_TK)]
