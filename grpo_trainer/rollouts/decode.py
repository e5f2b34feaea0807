"""Decodes groups of the wire protocol into the trainer's."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from environments.api import wire
from grpo_common.errors import Problem
from grpo_common.sampling import bends
from grpo_trainer.rollouts import routed_experts
from grpo_trainer.rollouts.types import Group, Sample, Teacher


def to_group(packed: wire.PackedGroup) -> Group:
    """Decode a group of the wire protocol without checking that it can be trained on (see `rollouts.filter`).

    A sequence's overrides take precedence over the group's: `sft`, `set_advantage_to_zero`, `unscored`, `temperature`.
    """
    ends = np.cumsum(packed.lengths)[:-1]
    tokens = np.split(np.frombuffer(packed.tokens, "<i4").astype(np.int64), ends)
    trained = np.split(np.frombuffer(packed.masks, "<i4") != wire.IGNORED, ends)
    advantages = _floats(packed.advantages, ends, sum(packed.lengths))
    logprobs = _floats(packed.inference_logprobs, ends, sum(packed.lengths))
    count = len(packed.lengths)
    overrides = [{**(packed.group_overrides or {}), **own} for own in packed.overrides or [{}] * count]
    requested = packed.generation_params or {}
    experts = [_experts(data) for data in packed.routed_experts or [b""] * count]
    versions = packed.policy_versions or [None] * count
    samples = tuple(
        Sample(
            tokens_T=tokens[i],
            trained_T=trained[i] & (not overrides[i].get(wire.UNSCORED)),
            reward=packed.scores[i],
            advantages_T=_advantages(advantages, i, packed.lengths[i], overrides[i]),
            rollout_logprobs_T=logprobs[i] if logprobs and _are_logprobs(logprobs[i], trained[i]) else None,
            policy_version=versions[i],
            temperature=_temperature(overrides[i].get("temperature"), requested.get("temperature")),
            supervised=bool(overrides[i].get("sft")),
            truncated=bool(overrides[i].get(wire.TRUNCATED)),
            unscored=bool(overrides[i].get(wire.UNSCORED)),
            teacher=_teacher(packed, i),
            experts=experts[i][0],
            bent=experts[i][1] or _bent({**requested, **overrides[i]}),
        )
        for i in range(count)
    )
    says = any("temperature" in params for params in (requested, *overrides))
    return Group(samples, packed.env_id, says_sampling=says)


def _experts(data: bytes) -> tuple[routed_experts.RoutedExperts | None, Problem | None]:
    """Return the experts of a sequence, if the server recorded them, or what is wrong with them."""
    try:
        return routed_experts.decode(data) if data else None, None
    except routed_experts.ExpertsError as error:
        return None, error.problems[0]


def _bent(params: dict[str, Any]) -> Problem | None:
    """Return with which parameter the sequence was sampled so that its probabilities can't be computed."""
    if params.get("sft"):  # not sampled by the policy
        return None
    return bends({name: value for name, value in params.items() if name != "temperature"})


def _temperature(*given: object) -> float:
    """Return the first given value, else 1; NaN if it is no number."""
    value = next((each for each in given if each is not None), 1.0)
    return float(value) if isinstance(value, int | float) else math.nan


def _advantages(
    given: list[NDArray[np.float32]] | None, i: int, length: int, override: dict[str, Any]
) -> NDArray[np.float32] | None:
    """Return the environment's advantages; 0 for a sequence of which only the reward counts."""
    if override.get("set_advantage_to_zero"):
        return np.zeros(length, np.float32)
    return given[i] if given else None


def _teacher(packed: wire.PackedGroup, i: int) -> Teacher | None:
    """Return a sequence's ragged lists as arrays; negative ids are the environment's padding."""
    if not packed.distill_token_ids or not packed.distill_logprobs:
        return None
    ids, logprobs = packed.distill_token_ids[i], packed.distill_logprobs[i]
    width = max(map(len, ids), default=0)
    ids_TK = np.zeros((len(ids), width), np.int64)
    logprobs_TK = np.full((len(ids), width), -np.inf, np.float32)
    for t, (some_ids, some_logprobs) in enumerate(zip(ids, logprobs, strict=True)):
        ids_TK[t, : len(some_ids)] = some_ids
        logprobs_TK[t, : len(some_ids)] = some_logprobs
    logprobs_TK[ids_TK < 0] = -np.inf
    teacher = Teacher(ids_TK.clip(min=0), logprobs_TK)
    return teacher if teacher.given_T.any() else None


def _floats(data: bytes | None, ends: NDArray[np.int64], total: int) -> list[NDArray[np.float32]] | None:
    if not data:
        return None
    width = "<f4" if len(data) == 4 * total else "<f8"
    return np.split(np.frombuffer(data, width).astype(np.float32), ends)


def _are_logprobs(values_T: NDArray[np.float32], trained_T: NDArray[np.bool_]) -> bool:
    """Return whether the values are logprobs: some environments fill unknown ones with the masked value (1.0)."""
    return bool((values_T[trained_T] <= 1e-3).all())
