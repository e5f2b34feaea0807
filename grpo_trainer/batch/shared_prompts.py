"""Shared prompts: a prompt of several sequences stands in a packed row once, and is computed once. Pure.

A group of G completions has one prompt. Trained one by one, each of them repeats it: with P prompt tokens and C tokens
of each completion these are G (P + C) tokens, and P + G C with a shared prompt. The result is the same, because a
prompt's hidden states do not depend on later tokens, and its gradient is the sum of those from all completions (as in
Prefix Grouper, arXiv 2506.05433). Attention then has two parts: each piece of the row attends to itself, and
completions also attend to their prompt (`engine/attention.py`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def families(prompts: Sequence[NDArray[np.int64]]) -> list[list[int]]:
    """Return families of sequences with the same prompt, as indices, in the order of their first members.

    Args:
        prompts: for each sequence, the tokens before its first trained one.
    """
    found: dict[bytes, list[int]] = {}
    for index, prompt in enumerate(prompts):
        found.setdefault(prompt.tobytes(), []).append(index)
    return list(found.values())


def by_family(kin: Sequence[Sequence[int]], lengths: Sequence[int]) -> list[int]:
    """Return all sequences, family by family: families with most tokens first, in each the longest sequence first."""
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
    """Return the indices of the sequences of each microbatch, with families kept together to share their prompts.

    A family that does not fit continues in the next microbatch, which repeats the prompt.

    Args:
        kin: result of `families`.
        prompts, lengths: tokens of each sequence's prompt, and of the whole sequence.
        size: sequences of a microbatch if `max_tokens` is None.
        max_tokens: most tokens of a microbatch; a single sequence may have more.
    """
    order = by_family(kin, lengths)
    if max_tokens is None:
        return [order[start : start + size] for start in range(0, len(order), size)]
    costs = _Costs(kin, prompts, lengths)
    full = costs.filled(order, max_tokens)
    # The same number of microbatches, but of similar size: a small pass leaves the device idle.
    load = sum(map(costs.of, full))
    longest = max(lengths, default=0)
    for limit in range(math.ceil(load / max(1, len(full))), max_tokens, max(1, longest // 4)):
        even = costs.filled(order, limit)
        if len(even) <= len(full):
            full = even
            break
    return sorted(full, key=lambda chosen: -costs.of(chosen))


class _Costs:
    """The tokens that sequences add to a row, with families kept together."""

    def __init__(self, kin: Sequence[Sequence[int]], prompts: Sequence[int], lengths: Sequence[int]) -> None:
        self._family_of = {index: number for number, family in enumerate(kin) for index in family}
        self._prompts = prompts
        self._lengths = lengths

    def after(self, index: int, before: int | None) -> int:
        """Return the tokens that a sequence adds after `before`: without its prompt if both are of one family."""
        goes_on = before is not None and self._family_of[before] == self._family_of[index]
        return self._lengths[index] - (self._prompts[index] if goes_on else 0)

    def each(self, order: Sequence[int]) -> list[int]:
        """Return the tokens that each sequence adds, all in one row."""
        return [self.after(index, before) for before, index in zip([None, *order], order, strict=False)]

    def of(self, chosen: Sequence[int]) -> int:
        """Return the tokens of a row."""
        return sum(self.each(chosen))

    def filled(self, order: Sequence[int], limit: int) -> list[list[int]]:
        """Fill one row after the other, each until the next sequence does not fit."""
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
    """Return shares with about the same number of tokens, as indices: the ordered list, split where a share is full."""
    order = by_family(kin, lengths)
    costs = _Costs(kin, prompts, lengths).each(order)
    shares: list[list[int]] = []
    place = 0
    for others in reversed(range(processes)):  # number of processes after this one
        began, load, target = place, 0.0, sum(costs[place:]) / (others + 1)
        while place < len(order) - others and (place == began or load + costs[place] / 2 <= target):
            load += lengths[order[place]] if place == began else costs[place]
            place += 1
        shares.append(order[began:place])
    shares[-1] += order[place:]
    return shares
