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
    costs = _Costs(kin, prompts, lengths)
    full = costs.filled(order, max_tokens)
    # As few, but of about one size: a small pass wastes a device.
    load = sum(map(costs.of, full))
    longest = max(lengths, default=0)
    for limit in range(math.ceil(load / max(1, len(full))), max_tokens, max(1, longest // 4)):
        even = costs.filled(order, limit)
        if len(even) <= len(full):
            full = even
            break
    return sorted(full, key=lambda chosen: -costs.of(chosen))


class _Costs:
    """What sequences add to a row, families standing together."""

    def __init__(self, kin: Sequence[Sequence[int]], prompts: Sequence[int], lengths: Sequence[int]) -> None:
        self._family_of = {index: number for number, family in enumerate(kin) for index in family}
        self._prompts = prompts
        self._lengths = lengths

    def after(self, index: int, before: int | None) -> int:
        """Tokens of a sequence after another one in a row, or as its first: of a family, the first has the prompt."""
        goes_on = before is not None and self._family_of[before] == self._family_of[index]
        return self._lengths[index] - (self._prompts[index] if goes_on else 0)

    def each(self, order: Sequence[int]) -> list[int]:
        """Of all in one row."""
        return [self.after(index, before) for before, index in zip([None, *order], order, strict=False)]

    def of(self, chosen: Sequence[int]) -> int:
        """Tokens of a row."""
        return sum(self.each(chosen))

    def filled(self, order: Sequence[int], limit: int) -> list[list[int]]:
        """One row after the other, each until the next sequence does not fit."""
        made: list[list[int]] = []
        load = 0
        for index in order:
            own = self.after(index, made[-1][-1] if made else None)
            if not made or load + own > limit:
                made.append([])
                load, own = 0, self._lengths[index]
            made[-1].append(index)
            load += own
        return made


def deal_families(
    kin: Sequence[Sequence[int]], prompts: Sequence[int], lengths: Sequence[int], processes: int
) -> list[list[int]]:
    """Shares with about as many tokens each, by indices: one after the other, cut where a share is full."""
    order = by_family(kin, lengths)
    costs = _Costs(kin, prompts, lengths).each(order)
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
