"""Sequences that begin with the same prompt: in a packed row it stands once, and is computed once for all. Pure.

A group of G completions has one prompt. Trained one by one, all of them carry it along; with P prompt tokens and C of
each completion that is G (P + C) tokens, shared it is P + G C. Nothing is lost: a prompt's hidden states do not depend
on what follows, and its gradient is the sum of what comes back from all that read it (as in Prefix Grouper,
arXiv 2506.05433). Attention has two parts for this: each piece of the row sees itself, and completions see their prompt
as well (`model/attention.py`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def families(prompts: Sequence[NDArray[np.int64]]) -> list[list[int]]:
    """Which sequences have the same prompt, by their indices; families in the order of their first members.

    Args:
        prompts: of each sequence, the tokens before its first trained one.
    """
    found: dict[bytes, list[int]] = {}
    for index, prompt in enumerate(prompts):
        found.setdefault(prompt.tobytes(), []).append(index)
    return list(found.values())


def by_family(kin: Sequence[Sequence[int]], lengths: Sequence[int]) -> list[int]:
    """All sequences, families together: those with most tokens first, and in each the longest first."""
    largest_first = sorted(kin, key=lambda family: -sum(lengths[index] for index in family))
    return [index for family in largest_first for index in sorted(family, key=lambda index: -lengths[index])]


def plan_shared(
    kin: Sequence[Sequence[int]],
    prompts: Sequence[int],
    lengths: Sequence[int],
    *,
    size: int,
    max_tokens: int | None,
) -> list[list[int]]:
    """Which sequences make up each microbatch, by their indices: families together, so that prompts stand there once.

    A family that does not fit goes on in the next microbatch, which has the prompt once more.

    Args:
        kin: `families`.
        prompts, lengths: tokens of each sequence's prompt, and of all of it.
        size: sequences of a microbatch, where `max_tokens` does not decide.
        max_tokens: most tokens of a microbatch; one sequence alone may have more.
    """
    order = by_family(kin, lengths)
    if max_tokens is None:
        return [order[start : start + size] for start in range(0, len(order), size)]
    family_of = {index: number for number, family in enumerate(kin) for index in family}
    full = _filled(order, family_of, prompts, lengths, max_tokens)
    # As few, but of about one size: a small pass wastes a device.
    load = sum(_load(chosen, family_of, prompts, lengths) for chosen in full)
    longest = max(lengths, default=0)
    for limit in range(math.ceil(load / max(1, len(full))), max_tokens, max(1, longest // 4)):
        even = _filled(order, family_of, prompts, lengths, limit)
        if len(even) <= len(full):
            full = even
            break
    return sorted(full, key=lambda chosen: -_load(chosen, family_of, prompts, lengths))


def _filled(
    order: Sequence[int], family_of: dict[int, int], prompts: Sequence[int], lengths: Sequence[int], limit: int
) -> list[list[int]]:
    """One microbatch after the other, each until the next sequence does not fit."""
    made: list[list[int]] = []
    load, present = 0, set[int]()
    for index in order:
        own = lengths[index] - (prompts[index] if family_of[index] in present else 0)
        if not made or load + own > limit:
            made.append([])
            load, present, own = 0, set(), lengths[index]
        made[-1].append(index)
        load += own
        present.add(family_of[index])
    return made


def _load(chosen: Sequence[int], family_of: dict[int, int], prompts: Sequence[int], lengths: Sequence[int]) -> int:
    """Tokens of a microbatch: its prompts', each once, and its completions'."""
    once = {family_of[index]: prompts[index] for index in chosen}
    return sum(once.values()) + sum(lengths[index] - prompts[index] for index in chosen)


def deal_families(
    kin: Sequence[Sequence[int]], prompts: Sequence[int], lengths: Sequence[int], processes: int
) -> list[list[int]]:
    """Shares with about as many tokens each, by indices: one after the other, cut where a share is full."""
    order = by_family(kin, lengths)
    family_of = {index: number for number, family in enumerate(kin) for index in family}
    costs: list[int] = []
    for place, index in enumerate(order):
        begins = place == 0 or family_of[order[place - 1]] != family_of[index]
        costs.append(lengths[index] - (0 if begins else prompts[index]))
    shares: list[list[int]] = []
    place = 0
    for others in reversed(range(processes)):  # that are still to have something
        began, load, target = place, 0.0, sum(costs[place:]) / (others + 1)
        while place < len(order) - others and (place == began or load + costs[place] / 2 <= target):
            load += lengths[order[place]] if place == began else costs[place]
            place += 1
        shares.append(order[began:place])
    shares[-1] += order[place:]
    return shares
