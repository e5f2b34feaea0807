"""Which whole groups make a batch of exactly `target` sequences, with places kept for some environments.

Groups can't be split, so a batch is an exact subset sum with minima. A set of sums is an int: bit n is set if n
sequences can be made.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import reduce
from itertools import chain
from math import gcd
from typing import NamedTuple

import numpy as np


class Pool(NamedTuple):
    """Candidates (group id, sequences), oldest first, and how many sequences of a batch must be theirs."""

    groups: Sequence[tuple[int, int]]
    minimum: int = 0


class Reservation(NamedTuple):
    """An environment asked for `share` sequences of a batch, in groups of one of `sizes`."""

    share: int
    sizes: frozenset[int]


def choose(target: int, pools: Sequence[Pool]) -> list[int] | None:
    """Return ids of groups that hold exactly `target` sequences and each pool's minimum, or None if there are none.

    Of all such sets it is the oldest: the one whose sorted ids come first in dictionary order. Only the
    oldest `target // size` groups of each size need be candidates: no batch holds more of them.
    """
    if sum(size for pool in pools for _, size in pool.groups) < target:
        return None
    return _take_in_order(target, pools) or _search(target, pools)


def _take_in_order(target: int, pools: Sequence[Pool]) -> list[int] | None:
    """The usual case in one pass: each minimum, then the oldest. None if a group would have to be left out."""
    taken: list[tuple[int, int]] = []
    rest: list[tuple[int, int]] = []
    for groups, minimum in pools:
        if minimum > sum(size for _, size in groups) or (minimum and len({size for _, size in groups}) > 1):
            return None
        count = -(-minimum // groups[0][1]) if minimum else 0
        taken += groups[:count]
        rest += groups[count:]
    left = target - sum(size for _, size in taken)
    for group, size in sorted(rest):
        if left <= 0:
            break
        taken.append((group, size))
        left -= size
    return sorted(group for group, _ in taken) if left == 0 else None


def _search(target: int, pools: Sequence[Pool]) -> list[int] | None:
    """Take the oldest groups, as long as the younger ones can complete the batch.

    If they can complete it after the first m groups, then also after fewer: so m is found by bisection. Once a
    group cannot be taken, no younger one of its kind (pool and size) can: the older could stand in its place. So there
    are no more rounds than kinds.
    """
    line = sorted((group, size, p) for p, pool in enumerate(pools) for group, size in pool.groups)
    unit = reduce(gcd, (size for _, size, _ in line), target)
    taken: list[tuple[int, int, int]] = []

    def fails(count: int) -> bool:
        left, need = target, [pool.minimum for pool in pools]
        for _, size, p in chain(taken, line[:count]):
            left -= size
            need[p] -= size
        rest: list[Counter[int]] = [Counter() for _ in pools]
        for _, size, p in line[count:]:
            rest[p][size // unit] += 1
        return left < 0 or not _completes(left // unit, [-(-each // unit) for each in need], rest)

    if fails(0):
        return None
    while line and sum(size for _, size, _ in taken) < target:
        count = bisect_left(range(1, len(line) + 1), True, key=fails)
        taken += line[:count]
        line = [each for each in line[count:] if each[1:] != line[count][1:]]
    return [group for group, _, _ in taken]


def _completes(left: int, need: Sequence[int], rest: Sequence[Mapping[int, int]]) -> bool:
    """Return whether some groups of `rest`, which has each pool's number by size, hold exactly `left` sequences, and of
    each pool no fewer than it needs."""
    sums = 1
    for minimum, counts in zip(need, rest, strict=True):
        sums = _with_sums(sums, counts, left, minimum)
    return bool(sums >> left & 1)


def can_make(target: int, sizes: Iterable[int]) -> bool:
    """Return whether any number of groups of these sizes holds exactly `target` sequences."""
    return bool(_with_sums(1, dict.fromkeys(sizes, target), target) >> target & 1)


def feasible_minima(target: int, reservations: Mapping[int, Reservation], others: frozenset[int]) -> dict[int, int]:
    """Return how many sequences of a batch of `target` each environment's reservation keeps, in whole groups.

    Shares that sum to more than a batch are scaled down in proportion. Shares are rounded up to whole groups, and those
    that gain most by it down where all together would overrun the batch. A share that no combination of sizes can meet
    is dropped (0): a reservation delays a batch, it never makes one impossible.
    """
    asked = max(target, sum(share for share, _ in reservations.values()))
    shares = {env: share * target // asked for env, (share, _) in sorted(reservations.items())}
    units = {env: min(sizes) for env, (_, sizes) in reservations.items()}
    minima = {env: -(-share // units[env]) * units[env] for env, share in shares.items()}
    over = sum(minima.values()) - target
    for env in sorted(minima, key=lambda env: (minima[env] - shares[env], env), reverse=True):
        if over > 0:
            minima[env] -= units[env]
            over -= units[env]
    kept: dict[int, int] = {}
    held = 1  # sums of the kept ones
    for env, minimum in minima.items():
        free = others.union(*(each.sizes for other, each in reservations.items() if other not in kept and other != env))
        trial = _with_sums(held, dict.fromkeys(reservations[env].sizes, target), target, minimum)
        if minimum > 0 and _with_sums(trial, dict.fromkeys(free, target), target) >> target & 1:
            kept[env], held = minimum, trial
    return dict.fromkeys(reservations, 0) | kept


def _with_sums(sums: int, counts: Mapping[int, int], limit: int, minimum: int = 0) -> int:
    """Return every sum up to `limit` of one of `sums` and of some groups that hold `minimum` or more.

    Args:
        counts: the number of groups by size.
    """
    if minimum > 0 and len(counts) != 1:
        own = _with_sums(1, counts, limit) >> minimum << minimum
        # Polynomials with these powers: those of their product are the sums.
        width = 1 << (2 * limit + 1).bit_length()
        powers = (np.frombuffer(each.to_bytes(limit // 8 + 1, "little"), "u1") for each in (sums, own))
        first, second = (np.fft.rfft(np.unpackbits(each, bitorder="little"), width) for each in powers)
        found = np.packbits(np.fft.irfft(first * second, width)[: limit + 1] > 0.5, bitorder="little")
        return int.from_bytes(found.tobytes(), "little")
    for size, count in counts.items():
        least, many = max(0, -(-minimum // size)), 1
        left = count - least
        sums = sums << least * size if left >= 0 else 0
        while left > 0 and many * size <= limit:  # doubling: after k rounds up to 2**k - 1 groups of this size
            many = min(many, left)
            sums |= sums << many * size & (2 << limit) - 1
            left -= many
            many *= 2
    return sums & (2 << limit) - 1
