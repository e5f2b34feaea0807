"""The rollout queue by properties: whatever happens in whatever order, no group is lost, doubled or overtaken."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, precondition, rule

from environments.api.line import Pool, Reservation, choose, feasible_minima
from environments.api.queue import RolloutQueue
from environments.api.records import Group, Journal, LeaseError, R
from tests.unit.test_queue import env, trainer

SIZES = st.sampled_from([1, 2, 3, 4, 6, 8])
LEASE_S = 30.0


def every_batch(target: int, pools: list[Pool]) -> list[list[int]]:
    """All sets of groups that make a batch, by trying them all."""
    groups = sorted((each, size, number) for number, pool in enumerate(pools) for each, size in pool.groups)
    return [
        [each for each, _, _ in chosen]
        for count in range(len(groups) + 1)
        for chosen in combinations(groups, count)
        if sum(size for _, size, _ in chosen) == target
        and all(
            sum(size for _, size, owner in chosen if owner == number) >= pool.minimum
            for number, pool in enumerate(pools)
        )
    ]


@settings(max_examples=400)
@given(
    st.integers(1, 16),
    st.lists(st.tuples(st.integers(0, 2), SIZES), max_size=9),
    st.tuples(st.just(0), st.integers(0, 6), st.integers(0, 6)),
)
def test_choose_finds_the_oldest_batch_that_there_is(target, groups, minima):
    pools = [
        Pool([(i, size) for i, (pool, size) in enumerate(groups) if pool == number], minimum)
        for number, minimum in enumerate(minima)
    ]
    assert choose(target, pools) == min(every_batch(target, pools), default=None)


@given(
    st.integers(1, 32),
    st.dictionaries(
        st.integers(0, 3), st.builds(Reservation, st.integers(0, 32), st.frozensets(SIZES, min_size=1, max_size=2))
    ),
    st.frozensets(SIZES, max_size=2),
)
def test_reservations_never_make_a_batch_impossible(target, reservations, others):
    minima = feasible_minima(target, reservations, others)
    enough = [
        size for size in {*others, *(s for each in reservations.values() for s in each.sizes)} for _ in range(target)
    ]

    def reachable(sizes: list[int], least: int) -> set[int]:
        sums = {0}
        for size in sizes:
            sums |= {total + size for total in sums if total + size <= target}
        return {total for total in sums if total >= least}

    totals = reachable([size for size in others for _ in range(target)], 0)
    for each, reservation in reservations.items():
        own = reachable([size for size in reservation.sizes for _ in range(target)], minima[each])
        totals = {a + b for a in totals for b in own if a + b <= target}
    assert sum(minima.values()) <= target
    assert target in totals or target not in reachable(enough, 0)


class Notebook(Journal):
    """What a queue writes down, in memory."""

    def __init__(self) -> None:
        self.records: dict[str, dict[Any, bytes]] = {}

    def all(self, kind: str, record: type[R]) -> dict[Any, R]:
        return {key: msgspec.msgpack.decode(body, type=record) for key, body in self.records.get(kind, {}).items()}

    def put(self, kind: str, key: object, record: object) -> None:
        kept = self.records.setdefault(kind, {})
        kept.pop(key, None)
        kept[key] = msgspec.msgpack.encode(record)

    def delete(self, kind: str, key: object) -> None:
        del self.records[kind][key]


class Life(RuleBasedStateMachine):
    """A run with everything that may happen in it, against a plain account of where each group is.

    The trainer, by name or without one, may be out of reach for longer than its leases last, and come back; the server
    may be killed, and continues from what was written down.
    """

    leases = Bundle("leases")

    def __init__(self) -> None:
        super().__init__()
        self.notebook = Notebook()
        self.queue = RolloutQueue(self.notebook, env_timeout=60.0)
        self.now = 0.0
        self.trainers = 0
        self.named: set[str] = set()
        self.ran_out: dict[str, tuple[int, ...]] = {}
        self.waiting: dict[int, Group] = {}
        self.held: dict[str, tuple[int, ...]] = {}
        self.deadlines: dict[str, float] = {}
        self.done: list[int] = []
        self.given_back: list[tuple[int, ...]] = []

    @initialize(batch_size=st.sampled_from([4, 8, 12]))
    def begin(self, batch_size: int) -> None:
        self.queue.register(trainer(batch_size, uuid=self.trainers))

    @rule(batch_size=st.sampled_from([4, 8, 12]))
    def register(self, batch_size: int) -> None:
        self.trainers += 1
        self.queue.register(trainer(batch_size, uuid=self.trainers))
        self.given_back += self.held.values()
        self.put_back(list(self.held))

    @rule(group_size=SIZES, share=st.sampled_from([None, 0.0, 0.25, 0.5, 1.0]))
    def register_environment(self, group_size: int, share: float | None) -> None:
        self.queue.register_environment(env(group_size, share), self.now)

    @rule(sizes=st.lists(SIZES, min_size=1, max_size=6), data=st.data())
    def offer(self, sizes: list[int], data: st.DataObject) -> None:
        known = len(self.queue.environments)
        env_id = data.draw(st.sampled_from([None, *range(known)]))
        for size in sizes:
            group, _ = self.queue.offer(env_id, size, size, 0.0, now=self.now)
            self.waiting[group.id] = group

    @precondition(lambda self: self.queue.run is not None)
    @rule(target=leases, by_name=st.booleans())
    def next_batch(self, by_name: bool) -> str:
        before = self.possible()
        again = self.fitting()
        grant = self.queue.next_batch(self.now, LEASE_S, uuid=self.trainers if by_name else None)
        if grant is None:
            assert not before, f"whole groups fit and no batch came: {before[0]}"
            return ""
        ids = grant.lease.groups
        if again:
            assert ids == min(again), "not the oldest batch that was given back"
        else:
            assert list(ids) == min(before), "not the oldest batch"
        self.given_back = [each for each in self.given_back if not set(each) & set(ids)]
        assert self.queue.run is not None
        assert sum(group.size for group in grant.groups) == self.queue.run.trainer.batch_size
        for each in ids:
            del self.waiting[each]
        mine = [each for lease in self.named & {*self.held} for each in self.held[lease]]
        assert not by_name or not set(ids) & set(mine), "the trainer may still be training on these"
        self.held[grant.lease.batch_id] = ids
        self.named |= {grant.lease.batch_id} if by_name else set()
        self.deadlines[grant.lease.batch_id] = self.now + LEASE_S
        return grant.lease.batch_id

    @rule(lease=consumes(leases))
    def acknowledge(self, lease: str) -> None:
        try:
            ids = self.queue.acknowledge(lease)
        except LeaseError:
            assert lease not in self.held
            return
        self.given_back = [each for each in self.given_back if not set(each) & set(ids)]
        for each in ids:
            self.waiting.pop(each, None)
            self.done.append(each)
        self.held.pop(lease, None)

    @rule(lease=leases)
    def extend(self, lease: str) -> None:
        ran_out = self.ran_out.get(lease)
        try:
            self.queue.extend(lease, self.now, LEASE_S)
        except LeaseError as error:
            assert lease not in self.held
            assert ran_out is None or not set(ran_out) <= set(self.waiting), "nobody else has it"
            assert error.status == 404 or error.reason is not None
            return
        if lease not in self.held:  # it had run out, and nobody has its groups: it begins again, without a name
            assert ran_out is not None
            self.held[lease] = self.ran_out.pop(lease)
            self.given_back = [each for each in self.given_back if not set(each) & set(ran_out)]
            for each in ran_out:
                del self.waiting[each]
        self.deadlines[lease] = self.now + LEASE_S

    @rule()
    def the_server_is_killed_and_goes_on(self) -> None:
        self.now += 1000.0  # on another clock; leases have all their time again
        self.queue = RolloutQueue(self.notebook, env_timeout=60.0, now=self.now)
        self.deadlines = dict.fromkeys(self.held, self.now + LEASE_S)
        self.given_back = []

    @rule(lease=leases)
    def release(self, lease: str) -> None:
        try:
            self.queue.release(lease)
        except LeaseError:
            assert lease not in self.held
        else:
            self.ran_out.pop(lease, None)
        self.given_back += [self.held[lease]] if lease in self.held else []
        self.put_back([lease])

    @rule(seconds=st.sampled_from([1.0, 20.0, 61.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.queue.tick(self.now)
        late = [each for each in self.held if self.deadlines[each] <= self.now and each not in self.named]
        self.ran_out |= {each: self.held[each] for each in late}
        self.put_back(late)

    @rule(data=st.data())
    def hear_or_disconnect(self, data: st.DataObject) -> None:
        if self.queue.environments:
            env_id = data.draw(st.sampled_from(range(len(self.queue.environments))))
            if data.draw(st.booleans()):
                self.queue.hear(env_id, self.now)
            else:
                self.queue.disconnect(env_id)

    def put_back(self, leases: list[str]) -> None:
        for lease in leases:
            for each in self.held.pop(lease, ()):
                self.waiting[each] = self.queue.line.groups[each]

    def fitting(self) -> list[tuple[int, ...]]:
        """Batches that were given back and have the size that is wanted now."""
        assert self.queue.run is not None
        target = self.queue.run.trainer.batch_size
        return [ids for ids in self.given_back if sum(self.waiting[each].size for each in ids) == target]

    def possible(self) -> list[list[int]]:
        """Every batch that could be made of the queue, on the few oldest groups of each lane."""
        assert self.queue.run is not None
        target = self.queue.run.trainer.batch_size
        minima = self.queue.minima()
        pools: dict[int | None, list[tuple[int, int]]] = {None: [], **{each: [] for each in minima if minima[each]}}
        for group in sorted(self.queue.line.groups.values(), key=lambda group: group.id):
            pool = pools[group.env_id if group.env_id in pools else None]
            if sum(size == group.size for _, size in pool) < target // group.size and len(pool) < 5:
                pool.append((group.id, group.size))
        found = every_batch(
            target, [Pool(groups, minima.get(each, 0) if each is not None else 0) for each, groups in pools.items()]
        )
        truncated = any(len(pool) == 5 for pool in pools.values())
        if truncated:  # too many to try them all: ask for an independent answer on the whole line
            whole = self.queue.line.pools(target, minima)
            oldest = choose(target, whole)
            return [*found, oldest] if oldest is not None else found
        return found

    @invariant()
    def nothing_lost_and_nothing_twice(self) -> None:
        buffered = [group.id for buffer in self.queue.buffers.values() for group in buffer]
        held = [each for ids in self.held.values() for each in ids]
        assert sorted([*self.queue.line.groups, *buffered]) == sorted(self.waiting)
        assert sorted(self.queue.leased) == sorted(held)
        everywhere = [*self.waiting, *held, *self.done]
        assert sorted(everywhere) == list(range(self.queue.next_group))

    @invariant()
    def counts_agree_with_the_groups(self) -> None:
        line = self.queue.line
        assert line.sequences == sum(group.size for group in line.groups.values())
        assert sorted(each for lane in line.lanes.values() for each in lane) == sorted(line.groups)
        assert all(lane == sorted(lane) for lane in line.lanes.values())
        assert line.groups_by_size.total() == len(line.groups)
        assert line.nbytes == sum(group.nbytes for group in line.groups.values())

    @invariant()
    def buffers_hold_nothing_that_is_complete(self) -> None:
        for env_id, buffer in self.queue.buffers.items():
            target = self.queue.environments[env_id].request.group_size
            assert not every_batch(target, [Pool([(group.id, group.size) for group in buffer])])


TestLife = Life.TestCase
TestLife.settings = settings(max_examples=60, stateful_step_count=40)
