"""The waiting line, which of its groups make a batch, and how many places of it are kept for an environment.

Groups can't be split, so a batch is an exact subset sum with minima. A set of sums is an int: bit n is set if n
sequences can be made.
"""

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import reduce
from math import gcd
from typing import NamedTuple

from environments.api.records import Group


class Pool(NamedTuple):
    """Candidates (group id, sequences), oldest first, and how many sequences of a batch must be theirs."""

    groups: Sequence[tuple[int, int]]
    minimum: int = 0


class Reservation(NamedTuple):
    """An environment asked for `share` sequences of a batch, in groups of one of `sizes`."""

    share: int
    sizes: frozenset[int]


class Line:
    """Queued groups in lanes of one size each.

    An environment with a reservation owns separate lanes, all others share theirs (owner None): choosing a batch looks
    at the heads of a few lanes, however long the line is. Counts are kept, none is computed by a walk over the line.

    Attributes:
        sizes: how many groups of each size an environment has here, by env_id.
        sequences, nbytes: of all groups.
    """

    def __init__(self) -> None:
        self.groups: dict[int, Group] = {}
        self.lanes: dict[tuple[int | None, int], list[int]] = {}
        self.sizes: dict[int | None, Counter[int]] = {}
        self.sequences = 0
        self.nbytes = 0

    def add(self, group: Group, owner: int | None) -> None:
        """Put a group at its place by age in a lane of its owner."""
        self.groups[group.id] = group
        insort(self.lanes.setdefault((owner, group.size), []), group.id)
        self.sizes.setdefault(group.env_id, Counter())[group.size] += 1
        self.sequences += group.size
        self.nbytes += group.nbytes

    def remove(self, group_id: int, owner: int | None) -> Group:
        """Take a group out, as a rule from the head of its lane."""
        group = self.groups.pop(group_id)
        lane, sizes = self.lanes[owner, group.size], self.sizes[group.env_id]
        del lane[bisect_left(lane, group_id)]
        if not lane:
            del self.lanes[owner, group.size]
        sizes[group.size] -= 1
        if not sizes[group.size]:
            del sizes[group.size]
        if not sizes:
            del self.sizes[group.env_id]
        self.sequences -= group.size
        self.nbytes -= group.nbytes
        return group

    def pools(self, target: int, minima: Mapping[int, int]) -> list[Pool]:
        """Candidates for a batch of `target` sequences: the first pool is of all without a reservation."""
        kept = {env_id: minimum for env_id, minimum in minima.items() if minimum}
        ids: dict[int | None, list[tuple[int, int]]] = {None: [], **{env_id: [] for env_id in kept}}
        for (owner, size), lane in self.lanes.items():
            ids[owner if owner in kept else None].extend((each, size) for each in lane[: target // size])
        return [Pool(sorted(candidates), kept[env] if env is not None else 0) for env, candidates in ids.items()]

    def sequences_of(self, env_id: int | None) -> int:
        """Sequences that an environment has here."""
        return sum(size * count for size, count in self.sizes.get(env_id, {}).items())

    @property
    def groups_by_size(self) -> Counter[int]:
        """How many groups of each size there are."""
        total: Counter[int] = Counter()
        for sizes in self.sizes.values():
            total.update(sizes)
        return total


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
    taken, rest, left = [], [], target
    for groups, minimum in pools:
        if minimum > sum(size for _, size in groups) or (minimum and len({size for _, size in groups}) > 1):
            return None
        count = -(-minimum // groups[0][1]) if minimum else 0
        taken += groups[:count]
        rest += groups[count:]
    left -= sum(size for _, size in taken)
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
    """Return what each environment's reservation comes to (sequences, in whole groups) in a batch of `target`.

    Shares that sum to more than a batch are scaled down in proportion. Shares are rounded up to whole groups, and those
    that gain most by it down where all together would overrun the batch. One that no combination of sizes can meet is
    dropped (0): a reservation delays a batch, it never makes one impossible.
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
    """The sums up to `limit` of any number of groups of these sizes."""
    sums = 1
    for size in sizes:
        step = size
        while step <= limit:  # doubling: after k rounds up to 2**k - 1 groups of this size
            sums = (sums | sums << step) & ((2 << limit) - 1)
            step *= 2
    return sums


def _sum(a: int, b: int, limit: int) -> int:
    """Every sum of one of `a` and one of `b`, up to `limit`.

    Sums are dense as a rule: a run of ones costs little more than a single one.
    """
    few, many = sorted((a, b), key=lambda sums: (sums & ~(sums << 1)).bit_count())
    total = 0
    while few:
        lowest = few & -few
        run = few & ~(few + lowest)
        few ^= run
        smeared, done, length = many, 1, run.bit_count()
        while done < length:
            step = min(done, length - done)
            smeared |= smeared << step
            done += step
        total |= smeared << lowest.bit_length() - 1
    return total & ((2 << limit) - 1)
