"""The waiting line: queued groups by age, with the counts that status questions are answered from."""

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Container, Iterable, Mapping
from typing import TypeVar

from environments.api.records import Group
from environments.api.selection import Pool

Lane = tuple[int | None, int]
K = TypeVar("K")


class Line:
    """Queued groups in lanes of one size each.

    An environment with a reservation has separate lanes, all others share theirs (environment None): choosing
    a batch looks at the heads of a few lanes, however long the line is. Counts are kept, none is computed by a
    walk over the line.
    """

    def __init__(self) -> None:
        self.groups: dict[int, Group] = {}
        self.nbytes = 0
        self.sequences = 0
        self.lanes: dict[Lane, list[int]] = {}
        self.groups_by_env: Counter[int | None] = Counter()
        self.sequences_by_env: Counter[int | None] = Counter()
        self.groups_by_size: Counter[int] = Counter()
        self.sizes_by_env: dict[int | None, Counter[int]] = {}
        self.groups_by_versions: Counter[tuple[int, int]] = Counter()

    def add(self, group: Group, reserved: bool) -> None:
        """Put a group at its place by age; `reserved`: its environment has asked for a minimum allocation."""
        self.groups[group.id] = group
        lane = self.lanes.setdefault((group.env_id if reserved else None, group.size), [])
        if lane and group.id < lane[-1]:
            insort(lane, group.id)
        else:
            lane.append(group.id)
        self._count(group, 1)

    def remove(self, ids: Iterable[int]) -> list[Group]:
        """Take groups out; they come from the heads of their lanes as a rule."""
        removed = [self.groups.pop(each) for each in ids]
        for group in removed:
            key = (group.env_id, group.size)
            key = key if self._at(key, group.id) is not None else (None, group.size)
            index = self._at(key, group.id)
            assert index is not None, f"group {group.id} is queued and in no lane"
            del self.lanes[key][index]
            if not self.lanes[key]:
                del self.lanes[key]
            self._count(group, -1)
        return removed

    def pools(self, target: int, minima: Mapping[int, int]) -> list[Pool]:
        """Candidates for a batch of `target` sequences: the first pool is of all without a reservation."""
        ids: dict[int | None, list[tuple[int, int]]] = {None: []}
        for (env, size), lane in self.lanes.items():
            owner = env if env is not None and minima.get(env) else None
            ids.setdefault(owner, []).extend((each, size) for each in lane[: target // size])
        for env, minimum in minima.items():
            if minimum:
                ids.setdefault(env, [])
        return [Pool(sorted(candidates), minima[env] if env is not None else 0) for env, candidates in ids.items()]

    def sizes(self, env_id: int) -> set[int]:
        """Sizes of an environment's queued groups."""
        return set(self.sizes_by_env.get(env_id, ()))

    def sizes_outside(self, environments: Container[int]) -> set[int]:
        """Sizes of all other environments' queued groups."""
        return {
            size for env, sizes in self.sizes_by_env.items() if env is None or env not in environments for size in sizes
        }

    @property
    def largest(self) -> int:
        """Sequences in the largest queued group, 1 for an empty line."""
        return max(self.groups_by_size, default=1)

    def _at(self, key: Lane, group: int) -> int | None:
        lane = self.lanes.get(key, [])
        index = bisect_left(lane, group)
        return index if index < len(lane) and lane[index] == group else None

    def _count(self, group: Group, sign: int) -> None:
        self.nbytes += sign * group.nbytes
        self.sequences += sign * group.size
        _add(self.groups_by_env, group.env_id, sign)
        _add(self.sequences_by_env, group.env_id, sign * group.size)
        _add(self.groups_by_size, group.size, sign)
        sizes = self.sizes_by_env.setdefault(group.env_id, Counter())
        _add(sizes, group.size, sign)
        if not sizes:
            del self.sizes_by_env[group.env_id]
        if group.oldest_version is not None and group.newest_version is not None:
            _add(self.groups_by_versions, (group.oldest_version, group.newest_version), sign)


def _add(counter: "Counter[K]", key: K, amount: int) -> None:
    """Count, and forget keys that count nothing: the keys themselves are asked for."""
    counter[key] += amount
    if not counter[key]:
        del counter[key]
