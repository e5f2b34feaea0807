"""Which whole groups make a batch of exactly `target` sequences, with places kept for some environments.

Groups can't be split, so a batch is an exact subset sum with minima. A set of sums is an int: bit n is set if n
sequences can be made.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache, reduce
from itertools import chain
from math import gcd
from typing import NamedTuple

import numpy as np

MOST_RUNS = 64
"""Up to this many runs of bits are added one by one. Sums of many sizes have few runs: only the ends have gaps."""


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

    If they can complete it after the first m groups, then also after fewer: so m is found by steps that double, and
    bisection. Once a group cannot be taken, no younger one of its kind (pool and size) can: the older could stand in
    its place. So there are no more rounds than kinds.
    """
    line = sorted((group, size, p) for p, pool in enumerate(pools) for group, size in pool.groups)
    unit = reduce(gcd, (size for _, size, _ in line), target)
    taken: list[tuple[int, int, int]] = []
    # From one group to the next most pools have the same groups left.
    sums_of = lru_cache(4 * len(pools))(lambda counts: _with_sums(1, dict(counts), target // unit))

    def fails(count: int) -> bool:
        """Return whether no batch holds the groups taken and the next `count`."""
        left, need = target, [pool.minimum for pool in pools]
        for _, size, p in chain(taken, line[:count]):
            left -= size
            need[p] -= size
        rest: list[Counter[int]] = [Counter() for _ in pools]
        for _, size, p in line[count:]:
            rest[p][size // unit] += 1
        left, sums = left // unit, 1
        for minimum, counts in zip(need, rest, strict=True):
            least = max(0, -(-minimum // unit))
            own = sums_of(tuple(counts.items())) & (2 << left) - 1 if left >= 0 else 0
            sums = _added(sums, own >> least << least, left)
        return left < 0 or not sums >> left & 1

    if fails(0):
        return None
    while line and sum(size for _, size, _ in taken) < target:
        most = 1
        while most <= len(line) and not fails(most):
            most *= 2
        count = bisect_left(range(min(most, len(line) + 1)), True, lo=most // 2 + 1, key=fails) - 1
        taken += line[:count]
        line = [each for each in line[count:] if each[1:] != line[count][1:]]
    return [group for group, _, _ in taken]


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
    for env, minimum in ((env, minimum) for env, minimum in minima.items() if minimum > 0):
        free = others.union(*(each.sizes for other, each in reservations.items() if other not in kept and other != env))
        own = _with_sums(1, dict.fromkeys(reservations[env].sizes, target), target) >> minimum << minimum
        trial = _added(held, own, target)
        if _with_sums(trial, dict.fromkeys(free, target), target) >> target & 1:
            kept[env], held = minimum, trial
    return dict.fromkeys(reservations, 0) | kept


def _with_sums(sums: int, counts: Mapping[int, int], limit: int) -> int:
    """Return every sum up to `limit` of one of `sums` and of some groups, whose number `counts` has by size."""
    for size, left in counts.items():
        many = 1
        while left > 0 and many * size <= limit:  # doubling: after k rounds up to 2**k - 1 groups of this size
            many = min(many, left)
            sums |= sums << many * size & (2 << limit) - 1
            left -= many
            many *= 2
    return sums


def _added(first: int, second: int, limit: int) -> int:
    """Return every sum up to `limit` of one of `first` and one of `second`."""
    runs = [(each & ~(each << 1)).bit_count() for each in (first, second)]
    if min(runs) > MOST_RUNS:
        # Polynomials with these powers: those of their product are the sums.
        width = 1 << (2 * limit + 1).bit_length()
        powers = (np.frombuffer(each.to_bytes(limit // 8 + 1, "little"), "u1") for each in (first, second))
        one, other = (np.fft.rfft(np.unpackbits(each, bitorder="little"), width) for each in powers)
        found = np.packbits(np.fft.irfft(one * other, width)[: limit + 1] > 0.5, bitorder="little")
        return int.from_bytes(found.tobytes(), "little")
    few, many = (first, second) if runs[0] <= runs[1] else (second, first)
    sums = 0
    while few:
        start = (few & -few).bit_length() - 1
        beyond = few + (1 << start)  # the lowest run of bits becomes one bit behind it
        length, few = (beyond & -beyond).bit_length() - 1 - start, few & beyond
        run, done = many, 1
        while done < length:
            step = min(done, length - done)
            run |= run << step & (2 << limit) - 1
            done += step
        sums |= run << start & (2 << limit) - 1
    return sums
