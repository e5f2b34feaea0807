"""Which whole groups make a batch of exactly `target` sequences, with places kept for some environments.

Groups can't be split, so a batch is an exact subset sum with minima. A set of sums is an int: bit n is set if n
sequences can be made.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import reduce
from math import gcd
from typing import NamedTuple


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
    """Oldest first; each group is taken if the younger ones can still complete the batch."""
    groups = sorted((group, size, p) for p, pool in enumerate(pools) for group, size in pool.groups)
    unit = reduce(gcd, (size for _, size, _ in groups), target)
    left, need = target // unit, [-(-pool.minimum // unit) for pool in pools]
    later = [[1] for _ in pools]  # sums of each pool's last 0, 1, … groups
    for _, size, p in reversed(groups):
        later[p].append((later[p][-1] | later[p][-1] << size // unit) & ((2 << left) - 1))

    def completes(rest: int) -> bool:
        sums = (later[p][-1] >> max(0, n) << max(0, n) for p, n in enumerate(need))
        return rest >= 0 and bool(reduce(lambda a, b: _sum(a, b, rest), sums, 1) >> rest & 1)

    if not completes(left):
        return None
    taken: list[int] = []
    for group, size, p in groups:
        if left == 0:
            break
        later[p].pop()
        need[p] -= size // unit
        if completes(left - size // unit):
            taken.append(group)
            left -= size // unit
        else:
            need[p] += size // unit
    return taken


def can_make(target: int, sizes: Iterable[int]) -> bool:
    """Return whether any number of groups of these sizes holds exactly `target` sequences."""
    return bool(_multiples(sizes, target) >> target & 1)


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
        trial = _sum(held, _multiples(reservations[env].sizes, target) >> minimum << minimum, target)
        if minimum > 0 and _sum(trial, _multiples(free, target), target) >> target & 1:
            kept[env], held = minimum, trial
    return dict.fromkeys(reservations, 0) | kept


def _multiples(sizes: Iterable[int], limit: int) -> int:
    """Return the sums up to `limit` of any number of groups of these sizes."""
    sums = 1
    for size in sizes:
        step = size
        while step <= limit:  # doubling: after k rounds up to 2**k - 1 groups of this size
            sums = (sums | sums << step) & ((2 << limit) - 1)
            step *= 2
    return sums


def _sum(a: int, b: int, limit: int) -> int:
    """Return every sum of one of `a` and one of `b`, up to `limit`."""
    few, many = sorted((a, b), key=int.bit_count)
    total = 0
    while few:
        lowest = few & -few
        total |= many << lowest.bit_length() - 1
        few ^= lowest
    return total & ((2 << limit) - 1)
