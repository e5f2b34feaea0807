"""The rollout queue: rules by small examples, what it says of itself, and all of them together by properties."""

from __future__ import annotations

import re
import time
from collections import Counter
from functools import partial
from itertools import combinations
from random import Random
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, precondition, rule
from msgspec.structs import replace

from environments.api import wire
from environments.api.batch import Pool, Reservation, choose, feasible_minima
from environments.api.errors import ApiError
from environments.api.overview import PACE_STEPS, SAMPLES, STEPS, Explainer, History
from environments.api.queue import Group, RolloutQueue
from environments.api.store import Table
from tests.stand_ins import registration

trainer = partial(registration, max_token_len=512, num_steps=100)


def env(group_size: int, share: float | None = None, weight: float = 1.0) -> wire.RegisterEnv:
    return wire.RegisterEnv(
        max_token_length=512, desired_name="env", weight=weight, group_size=group_size, min_batch_allocation=share
    )


def started(batch_size: int, *environments: wire.RegisterEnv) -> RolloutQueue:
    queue = RolloutQueue()
    queue.register(trainer(batch_size, uuid=7))
    assert queue.next_batch(0.0, 60.0) is None
    for each in environments:
        assert queue.register_environment(each, 0.0) is not None
    return queue


def offer(queue: RolloutQueue, size: int, env_id: int | None = None, now: float = 0.0) -> int:
    return queue.offer(env_id, size, 100, 0.5, now=now)[0].id


def batch(queue: RolloutQueue, now: float = 0.0) -> list[int] | None:
    granted = queue.next_batch(now, 60.0)
    return None if granted is None else list(granted.groups)


def test_a_larger_group_is_queued_and_a_smaller_one_when_its_environment_leaves() -> None:
    queue = started(8, env(4))
    assert queue.offer(0, 8, 100, 0.5)[1] is None and batch(queue) == [0]
    queue.register(trainer(3))
    assert queue.offer(0, 3, 100, 0.5)[1] == 3 and batch(queue) is None
    queue.disconnect(0)
    assert batch(queue) == [1]


def test_only_groups_that_may_complete_one_are_searched_in_a_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    candidates: list[int] = []

    def choose(target: int, pools: list[Pool]) -> None:
        candidates.append(len(pools[0].groups))

    queue = started(8, env(8))
    monkeypatch.setattr("environments.api.queue.choose", choose)
    for size in [6, 3] * 10:  # one of 6 or two of 3 may be in a group of 8
        offer(queue, size, env_id=0)
    assert (len(queue.buffered), max(candidates)) == (20, 3)


@pytest.mark.parametrize(
    ("queue", "sizes", "numbers"),
    [
        (started(12), [8], ["12", "8"]),
        (started(8), [5, 4], ["1", "5", "8"]),  # one group of 5: 8 - 5 = 3 is no sum of 4s and 5s
        (started(12, env(5, share=0.25), env(4)), [], ["3", "12", "0"]),  # a reservation that is dropped
    ],
)
def test_what_can_never_fit_is_said_with_its_numbers(queue: RolloutQueue, sizes: list[int], numbers: list[str]) -> None:
    for size in sizes:
        offer(queue, size)
    warnings = Explainer(queue).warnings()
    assert numbers in [re.findall(r"\b\d+", warning)[: len(numbers)] for warning in warnings]
    assert len(warnings) == 1 or not sizes


@pytest.mark.parametrize(
    ("batch_size", "environments", "minima"),
    [
        (8, [(2, 0.9), (2, 0.9)], {0: 4, 1: 4}),  # 7 each, 14 in all: 7 * 8 // 14 = 4
        (64, [(16, 0.4), (16, 0.4), (16, 0.2)], {0: 32, 1: 16, 2: 16}),  # 25, 25, 12: up to 80, the second one down
        (12, [(5, 0.25), (4, None)], {0: 0}),  # 12 - 5 = 7 and 12 - 10 = 2 are no sums of 4s
    ],
)
def test_reservations_are_scaled_rounded_and_dropped(
    batch_size: int, environments: list[tuple[int, float | None]], minima: dict[int, int]
) -> None:
    assert started(batch_size, *(env(*each) for each in environments)).minima() == minima


def test_a_large_batch_of_mixed_sizes_is_chosen_within_seconds() -> None:
    began = time.process_time()
    sizes = [(3, 5, 7, 8)[i % 4] for i in range(20000)]
    pools = [Pool([(8 * i + p, size) for i, size in enumerate(sizes[:2500])], 256 if p else 0) for p in range(8)]
    chosen = choose(4096, pools)
    assert chosen is not None and sum(sizes[each // 8] for each in chosen) == 4096
    mixed = Random(1).sample([size for size in (3, 5, 7) for _ in range(4 * 8192 // size)], 4 * (2730 + 1638 + 1170))
    pools = [Pool([*enumerate(mixed)][p::4], 1638 if p else 0) for p in range(4)]
    chosen = choose(8192, pools)
    assert chosen is not None and sum(mixed[each] for each in chosen) == 8192
    sizes = Random(1).choices(range(3, 100, 2), k=8000)  # of nine environments, most of which post late
    owners = [i % 3 if i < 2700 else i % 9 for i in range(8000)]
    lanes = [[(i, size) for i, size in enumerate(sizes) if owners[i] == p] for p in range(9)]
    chosen = choose(1 << 16, [Pool(lane, 6553 if p else 0) for p, lane in enumerate(lanes)])
    assert chosen is not None and sum(sizes[each] for each in chosen) == 1 << 16
    shares = {each: Reservation(64, frozenset({3, 5, 8})) for each in range(64)}
    assert sum(feasible_minima(4096, shares, frozenset({8})).values()) == 4095  # 43 of 64 round 66 down to 63
    assert time.process_time() - began < 8


def test_a_silent_environment_loses_its_reservation_and_gets_it_back() -> None:
    queue = started(4, env(2, share=0.5), env(2))
    for _ in range(2):
        offer(queue, 2, env_id=1, now=50.0)
    queue.tick(60.0)
    assert batch(queue, 60.0) is None
    queue.tick(60.5)
    assert [each.id for each in queue.alive] == [1] and batch(queue, 60.5) == [0, 1]
    queue.hear(0, 70.0)
    assert queue.minima() == {0: 2}


def test_an_environment_that_comes_back_keeps_its_id_and_name() -> None:
    queue = started(8, env(4), env(4))
    offer(queue, 3, env_id=0)
    queue.disconnect(0)
    back = queue.register_environment(env(2, share=0.5), 1.0)
    assert back is not None and (back.id, back.name, back.connected) == (0, "env_0", True)
    assert back.request.group_size == 2 and len(queue.alive) == 2 and not queue.buffered
    other = queue.register_environment(env(4), 2.0)
    assert other is not None and (other.id, other.name) == (2, "env_2")  # nobody has left
    queue = started(4, *(replace(env(2, share=0.5), process=each) for each in "ab"))
    again = queue.register_environment(replace(env(2, share=0.5), process="b"), 1.0)  # after it was killed
    assert again is not None and again.id == 1 and queue.minima() == {0: 2, 1: 2}


def test_environments_wait_for_a_trainer_that_is_not_done() -> None:
    queue = started(4)
    offer(queue, 4)
    granted = queue.next_batch(0.0, 60.0)
    assert granted is not None
    queue.acknowledge(granted.batch_id, 100)  # the last of its 100 steps
    for steps, waits in ((100, True), (150, False), (-1, False)):  # -1: of unknown length
        queue.register(trainer(4, starting_step=100, num_steps=steps))
        assert (queue.register_environment(env(4), 0.0) is None) == waits


def test_room_is_made_by_what_leaves_and_not_by_what_comes() -> None:
    queue = started(4, env(2))
    seen = [queue.news]

    def is_news() -> bool:
        seen.append(queue.news)
        return seen[-1] != seen[-2]

    for _ in range(6):
        offer(queue, 2, 0)
    assert not is_news() and queue.untrained == 0
    leased = queue.next_batch(0.0, 60.0)
    assert leased is not None and is_news() and queue.untrained == 4
    queue.extend(leased.batch_id, 0.0, 60.0, step=1)
    assert is_news() and queue.untrained == 0 and queue.leases  # a checkpoint is to hold it yet
    offer(queue, 1, 0)  # it waits for others of its kind: its place is free again
    assert is_news()
    skipped = queue.next_batch(0.0, 60.0)
    assert skipped is not None and is_news()
    queue.acknowledge(skipped.batch_id, step=1)  # no step of the trainer
    assert is_news()
    queue.disconnect(0)
    assert is_news()


def test_status_env_counts_as_the_original_does() -> None:
    queue = started(8, env(2, share=0.25, weight=3.0), env(4, weight=1.0), env(2, weight=0.0))
    for env_id, size, count in ((0, 2, 3), (1, 4, 2)):
        for _ in range(count):
            offer(queue, size, env_id=env_id)
    explain = Explainer(queue)
    answer = partial(wire.StatusEnv, current_step=0, unallocated_fraction=0.75, max_group_size=4)
    # Weights: 512 * 3 of 512 * (3 + 1 + 0). The largest group has 4.
    # To 0: its own 6, and of 1's 8 all (it reserves nothing): 14 // 2 = 7; its own 6 // 2 = 3.
    assert explain.status_env(0) == answer(queue_size=7, self_queue_size=3, env_weight=0.75)
    # To 1: its own 8, and of 0's 6, rounded up to 8 in groups of 4, 8 - int(8 * 0.25) = 6: 14 // 4 = 3.
    assert explain.status_env(1) == answer(queue_size=3, self_queue_size=2, env_weight=0.25)
    assert explain.status_env(2).env_weight == 0.01  # nobody starves


def test_after_a_reset_no_earlier_answer_is_given() -> None:
    queue = RolloutQueue()
    explain = Explainer(queue)
    answers = []
    for weight in (1.0, 3.0):
        queue.register(trainer(8))
        queue.next_batch(0.0, 60.0)
        for each in (weight, 1.0):
            queue.register_environment(env(4, weight=each), 0.0)
        answers.append(explain.status_env(0).env_weight)
        queue.reset()
    assert answers == [0.5, 0.75]  # 1 of 1 + 1, then 3 of 3 + 1, after the same number of changes


def test_waiting_for_says_what_is_missing() -> None:
    queue = started(8)
    explain = Explainer(queue)
    assert "no environment" in (explain.waiting_for(0.0) or "")
    for each in (env(2, share=0.5), env(2)):
        queue.register_environment(each, 0.0)
    for _ in range(2):
        offer(queue, 2, env_id=1)
    # 4 more of any environment, with 4 of 8 queued; and 4 more of env_0, with 0 of 4
    assert re.findall(r"env_\d|\d", explain.waiting_for(0.0) or "") == ["4", "4", "8", "4", "env_0", "4", "0"]
    for _ in range(2):
        offer(queue, 2, env_id=0)
    assert explain.waiting_for(0.0) is None and explain.status(0.0).batch_ready


def test_waiting_for_names_environments_that_are_silent_for_half_a_minute() -> None:
    queue = started(8, env(4), env(4))

    def silent(now: float) -> list[tuple[str, str]]:
        return re.findall(r"(env_\d)\b.*?\b(\d+) s\b", Explainer(queue).waiting_for(now) or "")

    queue.hear(0, 29.0)
    offer(queue, 4, env_id=1, now=20.0)
    assert silent(29.0) == []
    assert silent(31.0) == [("env_0", "31")]  # env_1 posted 11 s ago
    queue.hear(1, 50.0)
    assert silent(65.0) == [("env_0", "36"), ("env_1", "45")]  # not heard of for 65 - 29; posted at 20
    offer(queue, 4, env_id=1, now=66.0)
    assert batch(queue, 100.0) == [0, 1]
    queue.hear(0, 120.0)
    queue.hear(1, 120.0)
    assert silent(129.0) == []  # of the next batch nothing was wanted before 100
    assert silent(131.0) == [("env_0", "31"), ("env_1", "31")]


def add(history: History, number: int, score: float, **fields: object) -> None:
    group = wire.ScoredData(tokens=[[1]], masks=[[1]], scores=[score], **fields)  # type: ignore[arg-type]
    history.add(Group(number, None, 1, 1, score), wire.pack(group), now=float(number))


def test_history_points_are_the_last_steps_in_which_groups_came() -> None:
    history = History(start=10.0)
    history.reached(3, now=12.0)
    for now, score in ((12.0, 0.5), (13.0, 0.0), (14.0, 1.0)):
        add(history, int(now), score)
    history.reached(4, now=15.0)
    history.reached(5, now=16.0)
    add(history, 18, 2.0)
    # Step 3 from 12 - 10 = 2 s on for 3 s, with a mean of 1.5 / 3; no group came in step 4.
    shown = [msgspec.structs.astuple(point) for point in history.points(20.0)]
    assert shown == [(3, 2.0, 3.0, 3, 3, 0.5, 0.0, 1.0), (5, 6.0, 4.0, 1, 1, 2.0, 2.0, 2.0)]
    history.reached(4, now=21.0)  # resumed: step 5 comes again
    assert [point.step for point in history.points(21.0)] == [3]
    for step in range(4, 2 * STEPS):
        history.reached(step, now=30.0 + step)
        add(history, 30 + step, 0.0)
    assert [point.step for point in history.points(900.0)] == list(range(STEPS, 2 * STEPS))


def test_history_pace_is_that_of_the_last_steps() -> None:
    history = History(start=0.0)
    for step, now in ((6, 0.0), (7, 100.0)):
        history.reached(step, now)
        assert history.seconds_per_step is None, "the first step has the start in it"
    for step, now in ((8, 110.0), (8, 115.0), (10, 130.0)):
        history.reached(step, now)
    assert history.seconds_per_step == 10.0  # from step 7 to step 10 in 30 s
    history.reached(3, now=200.0)
    assert history.seconds_per_step is None, "another trainer has begun"
    for step in range(4, 4 + 2 * PACE_STEPS):
        history.reached(step, now=200.0 + (step - 3) ** 2)
    # The last 50 of 100 steps end at 100 ** 2 = 10000 and begin at 50 ** 2 = 2500; 7500 / 50 = 150.
    assert history.seconds_per_step == 150.0


def test_history_keeps_the_newest_groups_and_cuts_their_text() -> None:
    history = History(start=0.0)
    for number in range(SAMPLES + 3):
        add(history, number, 0.0, messages=[[{"role": "assistant", "content": f"{number}" + "x" * 10**6}]])
    assert [sample["id"] for sample in history.samples] == list(range(3, SAMPLES + 3))
    assert all(len(text) < 2000 for sample in history.samples for text in sample["texts"])
    add(history, 0, 0.0, messages=[[{"role": "user", "content": [{"type": "image"}]}]])
    assert history.samples[-1]["texts"] == ["user: (list)"]


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


class Notebook:
    """What a queue writes down, in memory."""

    def __init__(self) -> None:
        self.records: dict[str, dict[Any, bytes]] = {}

    def table(self, kind: str, record: type[Any]) -> Table[Any]:
        kept = self.records.setdefault(kind, {})

        def put(key: object, value: object) -> None:
            kept.pop(key, None)
            kept[key] = msgspec.msgpack.encode(value)

        known = {key: msgspec.msgpack.decode(body, type=record) for key, body in kept.items()}
        return Table(known, put, kept.__delitem__)


class Life(RuleBasedStateMachine):
    """A run with everything that may happen in it, against a plain account of where each group is.

    The trainer, by name or without one, may be out of reach for longer than its leases last, and come back; the server
    may be killed, and continues from what was written down.
    """

    leases = Bundle("leases")

    def __init__(self) -> None:
        super().__init__()
        self.notebook = Notebook()
        self.queue = RolloutQueue(self.notebook.table, env_timeout=60.0)
        self.now = 0.0
        self.trainers = 0
        self.named: set[str] = set()
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
        oldest = self.oldest()
        again = self.fitting()
        grant = self.queue.next_batch(self.now, LEASE_S, uuid=self.trainers if by_name else None)
        if grant is None:
            assert oldest is None, f"whole groups fit and no batch came: {oldest}"
            return ""
        ids = grant.groups
        if again:
            assert ids == min(again), "not the oldest batch that was given back"
        else:
            assert list(ids) == oldest, "not the oldest batch"
        self.given_back = [each for each in self.given_back if not set(each) & set(ids)]
        assert self.queue.run is not None
        assert sum(self.queue.groups[each].size for each in ids) == self.queue.run.trainer.batch_size
        for each in ids:
            del self.waiting[each]
        mine = [each for lease in self.named & {*self.held} for each in self.held[lease]]
        assert not by_name or not set(ids) & set(mine), "the trainer may still be training on these"
        self.held[grant.batch_id] = ids
        self.named |= {grant.batch_id} if by_name else set()
        self.deadlines[grant.batch_id] = self.now + LEASE_S
        return grant.batch_id

    @rule(lease=consumes(leases))
    def acknowledge(self, lease: str) -> None:
        try:
            ids = self.queue.acknowledge(lease)
        except ApiError as error:
            assert lease not in self.held and (error.status == 404 or error.reason is not None)
        else:
            assert ids == self.held.pop(lease)
            self.done += ids

    @rule(lease=leases)
    def extend(self, lease: str) -> None:
        try:
            self.queue.extend(lease, self.now, LEASE_S)
        except ApiError:
            assert lease not in self.held
        else:
            self.deadlines[lease] = self.now + LEASE_S

    @rule()
    def the_server_is_killed_and_goes_on(self) -> None:
        self.now += 1000.0  # on another clock; leases have all their time again
        self.queue = RolloutQueue(self.notebook.table, env_timeout=60.0, now=self.now)
        self.deadlines = dict.fromkeys(self.held, self.now + LEASE_S)
        self.given_back = []

    @rule(lease=leases)
    def release(self, lease: str) -> None:
        try:
            self.queue.release(lease)
        except ApiError:
            assert lease not in self.held
        self.given_back += [self.held[lease]] if lease in self.held else []
        self.put_back([lease])

    @rule(seconds=st.sampled_from([1.0, 20.0, 61.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.queue.tick(self.now)
        late = [each for each in self.held if self.deadlines[each] <= self.now and each not in self.named]
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
                self.waiting[each] = self.queue.line[each]

    def fitting(self) -> list[tuple[int, ...]]:
        """Batches that were given back and have the size that is wanted now."""
        assert self.queue.run is not None
        target = self.queue.run.trainer.batch_size
        return [ids for ids in self.given_back if sum(self.waiting[each].size for each in ids) == target]

    def oldest(self) -> list[int] | None:
        """The oldest batch that could be made of the queue."""
        assert self.queue.run is not None
        minima = self.queue.minima()
        pools: dict[int | None, list[tuple[int, int]]] = {None: [], **{each: [] for each in minima if minima[each]}}
        for group in self.queue.line.values():
            pools[group.env_id if group.env_id in pools else None].append((group.id, group.size))
        wanted = [Pool(groups, 0 if each is None else minima[each]) for each, groups in pools.items()]
        return choose(self.queue.run.trainer.batch_size, wanted)

    @invariant()
    def nothing_lost_and_nothing_twice(self) -> None:
        buffered = [*self.queue.buffered]
        held = [each for ids in self.held.values() for each in ids]
        assert sorted([*self.queue.line, *buffered]) == sorted(self.waiting)
        assert sorted({*self.queue.groups} - {*self.queue.line}) == sorted(held)
        everywhere = [*self.waiting, *held, *self.done]
        assert sorted(everywhere) == list(range(self.queue.next_group))

    @invariant()
    def counts_agree_with_the_groups(self) -> None:
        queue, groups = self.queue, [*self.queue.line.values()]
        assert [*queue.line] == sorted(queue.line)
        assert queue.sequences == sum(group.size for group in groups)
        assert queue.groups_by_size == Counter(group.size for group in groups)
        assert queue.queued_bytes == sum(group.nbytes for group in groups)

    @invariant()
    def buffers_hold_nothing_that_is_complete(self) -> None:
        for env_id, buffer in self.queue.buffers.items():
            assert env_id is not None
            target = self.queue.environments[env_id].request.group_size
            assert not every_batch(target, [Pool([(group.id, group.size) for group in buffer])])


TestLife = Life.TestCase
TestLife.settings = settings(max_examples=60, stateful_step_count=40)
