"""Scored groups as the trainer has them, and their decoding from the wire protocol."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from environments.api import wire
from grpo_common.errors import Problem
from grpo_common.sampling import bends
from vllm_server.protocol.routed_experts import RoutedShape, unpack


@dataclass(frozen=True, eq=False)
class Teacher:
    """A teacher's up to K likeliest tokens at each trained token of a sequence."""

    ids_NK: NDArray[np.int64]  # 0 where the teacher gave fewer than K
    logprobs_NK: NDArray[np.float32]  # the teacher's logprobs of these tokens; -inf where it gave fewer

    @property
    def given_N(self) -> NDArray[np.bool_]:
        """Trained tokens at which the teacher gave tokens."""
        return np.asarray(np.isfinite(self.logprobs_NK).any(axis=-1))


@dataclass(frozen=True, eq=False)
class RoutedExperts:
    """The experts that the server chose for a sequence's first T tokens, in each layer of a mixture of experts."""

    shape: RoutedShape
    ids_TLK: NDArray[np.unsignedinteger]  # of 8 or 16 bits


@dataclass(frozen=True, eq=False)
class Sample:
    """One scored sequence, prompt and completion. Arrays without a suffix have one entry for each trained token."""

    tokens_T: NDArray[np.int64]
    positions: NDArray[np.int64]  # of trained tokens, ascending, each >= 1: a token is predicted from the one before
    reward: float = 0.0
    advantages: NDArray[np.float32] | None = None  # None: the environment gave none
    rollout_logprobs: NDArray[np.float32] | None = None  # that the server sampled with, at `temperature`; None: unknown
    version: int | None = None  # of the policy that sampled it; None: unknown
    temperature: float = 1.0  # of sampling; the trainer divides its logits by it
    supervised: bool = False  # it is imitated; the policy did not sample it
    truncated: bool = False  # it reached a limit of its tokens
    unscored: bool = False  # no reward applies to it: no token is trained, and its group's baseline leaves it out
    follows: bool = False  # it and the sample before are sequences of one episode, and have its reward together
    teacher: Teacher | None = None
    experts: RoutedExperts | None = None  # None: the server does not say
    bent: Problem | None = None  # why the probabilities that it was sampled with can't be computed
    start: int | None = None  # position of the answer's first token; None: that of the first trained one
    # What follows is known once the trainer has prepared the batch.
    share: float = 1.0  # factor of its loss; below 1 if it is stale
    weight: float = 0.0  # of each trained token in the loss of the whole batch, including `share`
    number: int = -1  # among all samples of the batch; -1: of none

    @property
    def prompt_len(self) -> int:
        """Number of tokens before the first trained one."""
        return int(self.positions[0])

    def cut(self, tokens: int, *, trained: bool = True) -> Sample:
        """Return its first tokens, with what it has for each trained one of them; none is if not `trained`."""
        if trained and tokens >= len(self.tokens_T):
            return self
        count = int(np.searchsorted(self.positions, tokens)) if trained else 0
        return replace(
            self,
            tokens_T=self.tokens_T[:tokens],
            positions=self.positions[:count],
            advantages=None if self.advantages is None else self.advantages[:count],
            rollout_logprobs=None if self.rollout_logprobs is None else self.rollout_logprobs[:count],
            teacher=self.teacher and Teacher(self.teacher.ids_NK[:count], self.teacher.logprobs_NK[:count]),
        )


@dataclass(frozen=True)
class Group:
    """Several samples of one prompt."""

    samples: tuple[Sample, ...]
    environment: int | None = None
    says_sampling: bool = True  # the environment says how it samples

    @property
    def rewards(self) -> list[float]:
        """Rewards that the baseline counts: of samples that the policy sampled, and that are scored; one an episode."""
        return [s.reward for s in self.samples if not (s.supervised or s.unscored or s.follows)]


@dataclass(frozen=True)
class RolloutBatch:
    """The leased groups of one step."""

    batch_id: str  # of the lease, which the acknowledgement ends
    groups: tuple[Group, ...]  # oldest first
    refused: int = 0  # number of groups that were left out as untrainable


def to_group(packed: wire.PackedGroup) -> Group:
    """Decode a group of the wire protocol without checking that it can be trained on (see `rollouts.filter`).

    A sequence's overrides take precedence over the group's: `sft`, `set_advantage_to_zero`, `unscored`, `temperature`.
    `branches` has the lengths of an episode's sequences, each of which becomes a sample.
    """
    lengths, count = packed.lengths, len(packed.lengths)
    tokens, masks = (
        np.split(np.frombuffer(data, "<i4"), np.cumsum(lengths)[:-1]) for data in (packed.tokens, packed.masks)
    )
    advantages, logprobs = (_floats(data, lengths) for data in (packed.advantages, packed.inference_logprobs))
    overrides = [{**(packed.group_overrides or {}), **its} for its in packed.overrides or [{}] * count]
    versions, experts = packed.policy_versions or [None] * count, packed.routed_experts or [b""] * count
    asked = packed.generation_params or {}
    samples = []
    for i, override in enumerate(overrides):
        trained_T, unscored = masks[i] != wire.IGNORED, bool(override.get(wire.UNSCORED))
        sampling = {**asked, **override}
        bent = None if sampling.get("sft") else bends({**sampling, "temperature": None})  # the trainer divides by it
        temperatures = (override.get("temperature"), asked.get("temperature"))
        temperature = next((each for each in temperatures if each is not None), 1.0)
        logprobs_T = logprobs[i]
        if logprobs_T is not None and not (logprobs_T[trained_T] <= 1e-3).all():
            logprobs_T = None  # some environments fill unknown ones with the masked value (1.0)
        given = np.zeros(lengths[i], np.float32) if override.get("set_advantage_to_zero") else advantages[i]
        routed = _read_experts(experts[i]) if experts[i] else None
        wrong = routed if isinstance(routed, Problem) else None
        try:
            sizes = wire.branch_lengths(override, lengths[i])
        except ValueError as error:
            sizes, wrong = [lengths[i]], Problem(wire.BRANCHES, summary=str(error))
        for end, size in zip(accumulate(sizes), sizes, strict=True):
            part = slice(end - size, end)
            positions, own = np.flatnonzero(trained_T[part]), None if logprobs_T is None else logprobs_T[part]
            answer = positions
            if not len(answer) and own is not None:  # it was left out of the loss
                answer = np.flatnonzero(own <= 0.0)
            positions = positions[positions > 0][: 0 if unscored else None]  # nothing predicts the first token
            samples.append(
                Sample(
                    tokens_T=tokens[i][part].astype(np.int64),
                    positions=positions,
                    reward=packed.scores[i],
                    advantages=None if given is None else given[part][positions],
                    rollout_logprobs=None if own is None else own[positions],
                    version=versions[i],
                    temperature=float(temperature) if isinstance(temperature, int | float) else math.nan,
                    supervised=bool(override.get("sft")),
                    truncated=bool(override.get(wire.TRUNCATED)),
                    unscored=unscored,
                    follows=part.start > 0,
                    teacher=_teacher(packed, i, positions) if len(sizes) == 1 else None,
                    experts=routed if len(sizes) == 1 and not isinstance(routed, Problem) else None,
                    bent=wrong or bent,
                    start=int(answer[0]) if len(answer) else part.stop - part.start,
                )
            )
    says = any("temperature" in params for params in (asked, *overrides))
    return Group(tuple(samples), packed.env_id, says_sampling=says)


def _floats(data: bytes | None, lengths: list[int]) -> list[NDArray[np.float32]] | list[None]:
    """Return the values of each sequence, which an environment sends in 4 or 8 bytes each."""
    if not data:
        return [None] * len(lengths)
    values = np.frombuffer(data, "<f4" if len(data) == 4 * sum(lengths) else "<f8").astype(np.float32)
    return np.split(values, np.cumsum(lengths)[:-1])


def _teacher(packed: wire.PackedGroup, i: int, positions: NDArray[np.int64]) -> Teacher | None:
    """Return a sequence's ragged lists as arrays; negative ids are the environment's padding."""
    if not packed.distill_token_ids or not packed.distill_logprobs:
        return None
    ids, logprobs = packed.distill_token_ids[i], packed.distill_logprobs[i]
    width = max((len(ids[at]) for at in positions), default=0)
    ids_NK = np.zeros((len(positions), width), np.int64)
    logprobs_NK = np.full((len(positions), width), -np.inf, np.float32)
    for row, at in enumerate(positions):
        ids_NK[row, : len(ids[at])] = ids[at]
        logprobs_NK[row, : len(logprobs[at])] = logprobs[at]
    logprobs_NK[ids_NK < 0] = -np.inf
    teacher = Teacher(ids_NK.clip(min=0), logprobs_NK)
    return teacher if teacher.given_N.any() else None


def _read_experts(data: bytes) -> RoutedExperts | Problem:
    """Return the experts from bytes (the format: `vllm_server.protocol.routed_experts`), or what is wrong with them."""
    fix = "send those of grpo serve as they are"
    try:
        shape, rows = unpack(data)
    except ValueError as error:
        return Problem("routed_experts", str(error), "a header and whole rows", fix)
    ids = np.frombuffer(rows, "<u1" if shape.id_bytes == 1 else "<u2")
    if ids.size and ids.max() >= shape.experts:
        return Problem("routed_experts", f"expert {ids.max()}", f"less than {shape.experts}", fix)
    return RoutedExperts(shape, ids.reshape(-1, shape.layers, shape.top_k))
