"""Which whole groups make a batch of an exact number of sequences: pure arithmetic on sizes.

Groups cannot be split, so a batch is an exact subset sum with minima for some environments. Sets of sums are
bit sets (bit `n` set: `n` can be made): a whole row of the usual dynamic programme is one shift and one or.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from math import gcd


@dataclass(frozen=True)
class Pool:
    """Candidates of one environment with a reservation, or of all others together.

    Attributes:
        groups: (id, sequences) of each candidate, oldest (lowest id) first.
        minimum: sequences of the batch that must come from this pool.
    """

    groups: Sequence[tuple[int, int]]
    minimum: int = 0


@dataclass(frozen=True)
class Reservation:
    """What an environment asked for: `share` of the batch, in groups of one of `sizes`."""

    share: int
    sizes: frozenset[int]


def choose(target: int, pools: Sequence[Pool]) -> list[int] | None:
    """Ids of groups that hold exactly `target` sequences and each pool's minimum, or None where there are none.

    Of all such sets it is the oldest: the one whose sorted ids come first in dictionary order. Only the
    oldest `target // size` groups of each size need be candidates: no batch holds more of them.
    """
    if sum(size for pool in pools for _, size in pool.groups) < target:
        return None
    return _take_in_order(target, pools) or _search(target, pools)


def can_make(target: int, sizes: Iterable[int]) -> bool:
    """Whether any number of groups of these sizes holds exactly `target` sequences."""
    return bool(_multiples(target, sizes) >> target & 1)


def feasible_minima(target: int, reservations: Mapping[int, Reservation], others: frozenset[int]) -> dict[int, int]:
    """What each environment's reservation comes to (sequences, in whole groups) in a batch of `target`.

    Shares that sum to more than a batch are scaled down in proportion, shares are rounded up to whole groups
    (down where that would overrun the batch), and one that no combination of sizes can meet is dropped (0): a
    reservation delays a batch, it never makes one impossible.
    """
    shares = {env: reservation.share for env, reservation in reservations.items() if reservation.share > 0}
    asked = sum(shares.values())
    if asked > target:
        shares = {env: share * target // asked for env, share in shares.items()}
    unit = {env: min(reservations[env].sizes) for env in shares}
    minima = {env: -(-share // unit[env]) * unit[env] for env, share in shares.items()}
    while sum(minima.values()) > target:
        env = max(minima, key=lambda env: (minima[env] - shares[env], env))
        minima[env] -= unit[env]
    kept: dict[int, int] = {}
    for env in sorted(minima):
        trial = kept | {env: minima[env]}
        sums = [_from(_multiples(target, reservations[each].sizes), least) for each, least in trial.items()]
        free = others.union(*(reservations[each].sizes for each in reservations if each not in trial))
        if reduce(lambda a, b: _add(a, b, target), sums, _multiples(target, free)) >> target & 1:
            kept = trial
    return dict.fromkeys(reservations, 0) | kept


def _take_in_order(target: int, pools: Sequence[Pool]) -> list[int] | None:
    """The usual case in one pass: reservations, then the oldest. None where something must be skipped."""
    if any(len({size for _, size in pool.groups}) > 1 for pool in pools if pool.minimum):
        return None
    taken: list[int] = []
    left = target
    rest: list[tuple[int, int]] = []
    for pool in pools:
        need = pool.minimum
        for index, (group, size) in enumerate(pool.groups):
            if need <= 0:
                rest.extend(pool.groups[index:])
                break
            taken.append(group)
            need -= size
            left -= size
        if need > 0:
            return None
    if len(pools) > 1:
        rest.sort()
    for group, size in rest:
        if left <= 0:
            break
        taken.append(group)
        left -= size
    return sorted(taken) if left == 0 else None


def _search(target: int, pools: Sequence[Pool]) -> list[int] | None:
    """Oldest first, each group taken if the younger ones can still complete the batch."""
    unit = reduce(gcd, (size for pool in pools for _, size in pool.groups), target)
    pools = [Pool([(group, size // unit) for group, size in pool.groups], -(-pool.minimum // unit)) for pool in pools]
    left = target // unit
    later = [_suffix_sums(pool.groups, left) for pool in pools]
    need = [pool.minimum for pool in pools]
    position = [0] * len(pools)

    def completes(total: int) -> bool:
        sums = (_from(later[p][position[p]], need[p]) for p in range(len(pools)))
        return total >= 0 and bool(reduce(lambda a, b: _add(a, b, total), sums, 1) >> total & 1)

    if not completes(left):
        return None
    taken: list[int] = []
    in_order = sorted((group, size, p) for p, pool in enumerate(pools) for group, size in pool.groups)
    for group, size, p in in_order:
        if left == 0:
            break
        position[p] += 1
        need[p] -= size
        if completes(left - size):
            taken.append(group)
            left -= size
        else:
            need[p] += size
    return taken


def _suffix_sums(groups: Sequence[tuple[int, int]], limit: int) -> list[int]:
    """`result[i]`: the bit set of sums (up to `limit`) of any of `groups[i:]`."""
    mask = (2 << limit) - 1
    sums = [1]
    for _, size in reversed(groups):
        sums.append((sums[-1] | sums[-1] << size) & mask)
    return sums[::-1]


def _multiples(limit: int, sizes: Iterable[int]) -> int:
    """The bit set of sums up to `limit` of any number of groups of these sizes."""
    mask = (2 << limit) - 1
    sums = 1
    for size in sizes:
        step = size
        while step <= limit:  # doubling: after k rounds up to 2**k - 1 groups of this size
            sums = (sums | sums << step) & mask
            step *= 2
    return sums


def _from(sums: int, minimum: int) -> int:
    """Only the sums of at least `minimum`."""
    return sums >> minimum << minimum if minimum > 0 else sums


def _add(a: int, b: int, limit: int) -> int:
    """The bit set of every sum of one of `a` and one of `b`, up to `limit`."""
    if (a & ~(a << 1)).bit_count() > (b & ~(b << 1)).bit_count():
        a, b = b, a  # the one in fewer runs
    total = 0
    for start, length in _runs(a):
        if start > limit:
            break
        total |= _smear(b, length) << start
    return total & ((2 << limit) - 1)


def _runs(bits: int) -> Iterator[tuple[int, int]]:
    """(start, length) of each run of ones: sums are dense as a rule, and a run costs little more than a bit."""
    start = 0
    while bits:
        skip = (bits & -bits).bit_length() - 1
        bits >>= skip
        length = (~bits & (bits + 1)).bit_length() - 1
        yield start + skip, length
        bits >>= length
        start += skip + length


def _smear(bits: int, length: int) -> int:
    """`bits` shifted by each of 0 to `length - 1`, all together, by doubling."""
    done = 1
    while done < length:
        step = min(done, length - done)
        bits |= bits << step
        done += step
    return bits
