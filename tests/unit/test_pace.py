"""How far ahead of the trainer an environment works: by hand, and in runs of which time is simulated."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import cycle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from environments.api import wire
from environments.config import BaseEnvConfig
from environments.running.pace import (
    OVERTAKEN,
    RECENT_GROUPS,
    InFlight,
    Registration,
    RunningShare,
    groups_to_start,
)

STEPS = 12


def config(**changes: Any) -> BaseEnvConfig:
    return BaseEnvConfig(**({"tokenizer_name": "model", "group_size": 2} | changes))


def registration(batch_size: int = 8, last_step: int = -1, max_staleness: int | None = None) -> Registration:
    return Registration(
        env_id=0,
        name="sums_0",
        batch_size=batch_size,
        max_token_len=-1,
        last_step=last_step,
        max_staleness=max_staleness,
    )


def status(
    step: int = 0, queue: int = 0, own: int | None = None, leased: int | None = None, weight: float = 1.0
) -> wire.StatusEnv:
    return wire.StatusEnv(
        current_step=step,
        queue_size=queue,
        unallocated_fraction=1.0,
        self_queue_size=queue if own is None else own,
        max_group_size=2,
        env_weight=weight,
        leased=leased,
    )


ONE = {"max_batches_offpolicy": 1}


@pytest.mark.parametrize(
    ("changes", "seen", "last_step", "in_flight", "wanted"),
    [
        (ONE, status(), -1, 0, 4),  # one batch of 8 sequences is 4 groups of 2
        ({}, status(), -1, 0, 4),  # nothing is known of leases: the same
        ({}, status(leased=0, weight=0.5), -1, 0, 2),  # another environment is there: half of a batch
        ({}, status(queue=2, own=2, weight=0.5), -1, 0, 0),
        (ONE, status(queue=3), -1, 1, 0),  # 4 - 3 queued - 1 in flight
        (ONE, status(queue=9), -1, 0, 0),
        (ONE, status(queue=2, own=0), -1, 1, 1),  # 4 - 2 queued by others - 1 in flight
        ({"max_batches_offpolicy": 3}, status(queue=3), -1, 1, 8),  # 3 * 4 - 3 - 1
        ({"max_batches_offpolicy": 3}, status(step=9, queue=1), 10, 0, 3),  # one step is left: 1 * 4 - 1
        ({"max_batches_offpolicy": 3}, status(step=10), 10, 0, 0),
        ({"max_concurrent_groups": 3}, status(), -1, 1, 2),
        (ONE | {"min_batch_allocation": 0.5}, status(queue=9, own=0), -1, 1, 1),  # half of 4 is ours: 2 - 0 - 1
        ({"group_size": 3}, status(), -1, 0, 3),  # 8 / 3 groups, rounded up
    ],
)
def test_within_so_many_batches(
    changes: dict[str, Any], seen: wire.StatusEnv, last_step: int, in_flight: int, wanted: int
) -> None:
    groups = InFlight(in_flight, seen.current_step if in_flight else None)
    assert groups_to_start(seen, registration(last_step=last_step), config(**changes), groups) == wanted


@pytest.mark.parametrize(
    ("seen", "in_flight", "wanted"),
    [
        (status(leased=0), InFlight(), 4),  # a batch of 8 sequences is 4 groups of 2
        (status(leased=4), InFlight(), 4),  # one is trained on, the next one is not complete
        (status(leased=4, queue=3), InFlight(1, 0), 3),  # its last group is in flight: keep 4 there
        (status(leased=4, queue=4), InFlight(0), 0),  # it is complete
        (status(leased=8), InFlight(2, 0), 0),  # and the trainer has it already
        (status(leased=6, queue=1), InFlight(1, 0), 3),  # 2 leased ahead and 1 queued are no batch
        (status(leased=4), InFlight(1, 0, running_share=0.8), 4),  # 5 groups, so that 4 groups' completions run
        (status(leased=4), InFlight(1, 0, running_share=0.1), 11),  # never more than three batches
        (status(leased=4, queue=4), InFlight(0, running_share=0.5), 0),  # the next batch is complete
        (status(step=5, leased=4, queue=3), InFlight(1, 1), 0),  # four steps old: (5 + 1 - 4) * 4 - 4 - 3 - 1
        (status(step=6, leased=0, queue=0), InFlight(1, 1), 3),  # five: 1 * 4 - 1
        (status(step=7, leased=0, queue=0), InFlight(1, 1), 0),  # it goes first
        (status(step=8, leased=4, queue=2), InFlight(1, 8), 1),  # two steps are left: 2 * 4 - 4 - 2 - 1
    ],
)
def test_one_batch_of_completions_is_kept_running(seen: wire.StatusEnv, in_flight: InFlight, wanted: int) -> None:
    assert groups_to_start(seen, registration(last_step=10), config(), in_flight) == wanted


@pytest.mark.parametrize(
    ("max_staleness", "seen", "in_flight", "wanted"),
    [
        (0, status(leased=0), InFlight(), 4),
        (0, status(leased=0, queue=1), InFlight(2, 0), 1),  # 1 * 4 - 1 - 2
        (0, status(leased=4), InFlight(), 0),  # what is sampled now would be a version old
        (1, status(leased=4), InFlight(), 4),  # 2 * 4 - 4
        (1, status(leased=4, queue=2), InFlight(1, 0), 1),  # 2 * 4 - 4 - 2 - 1
        (1, status(step=1, leased=0, queue=0), InFlight(2, 0), 2),  # a version has passed: (2 - 1) * 4 - 2
        (1, status(step=2, leased=0, queue=0), InFlight(1, 0), 0),
    ],
)
def test_no_group_is_started_that_would_be_too_old(
    max_staleness: int, seen: wire.StatusEnv, in_flight: InFlight, wanted: int
) -> None:
    assert groups_to_start(seen, registration(max_staleness=max_staleness), config(), in_flight) == wanted


@dataclass
class Run:
    """A trainer, the queue and one environment in simulated seconds; a group is the version that sampled it."""

    batch: int
    durations: Iterator[float]
    step_seconds: float
    prefetch: bool = True
    max_staleness: int | None = None
    now: float = 0.0
    step: int = 0
    started: int = 0
    generating: list[tuple[float, int]] = field(default_factory=list)
    queue: list[int] = field(default_factory=list)
    leased: list[list[int]] = field(default_factory=list)  # the first of them is trained on
    trained_at: float | None = None
    ages: list[int] = field(default_factory=list)

    def start_groups(self) -> None:
        ahead = registration(2 * self.batch, STEPS, self.max_staleness)
        in_flight = InFlight(len(self.generating), min((version for _, version in self.generating), default=None))
        seen = status(self.step, len(self.queue), leased=sum(map(len, self.leased)))
        for _ in range(groups_to_start(seen, ahead, config(), in_flight)):
            heapq.heappush(self.generating, (self.now + next(self.durations), self.step))
            self.started += 1

    def lease(self) -> None:
        while len(self.queue) >= self.batch and len(self.leased) < 1 + self.prefetch:
            self.leased.append(self.queue[: self.batch])
            del self.queue[: self.batch]
        if self.leased and self.trained_at is None:
            self.ages += [self.step - version for version in self.leased[0]]
            self.trained_at = self.now + self.step_seconds

    def to_the_end(self) -> Run:
        while self.step < STEPS:
            self.lease()
            self.start_groups()
            ends = [self.generating[0][0]] if self.generating else []
            self.now = min([*ends, *([] if self.trained_at is None else [self.trained_at])])  # nothing left: it hangs
            if self.now == self.trained_at:
                self.leased.pop(0)
                self.step, self.trained_at = self.step + 1, None
            else:
                self.queue.append(heapq.heappop(self.generating)[1])
        return self


def test_the_running_share_is_the_mean_of_mean_by_longest_length() -> None:
    share = RunningShare()
    assert share.value == 1.0
    share.add([0, 0])  # nothing was sampled: it says nothing
    assert share.value == 1.0
    share.add([10, 20, 30, 40])
    assert share.value == pytest.approx(25 / 40)
    share.add([7, 7])
    assert share.value == pytest.approx((25 / 40 + 1) / 2)
    for _ in range(RECENT_GROUPS):
        share.add([1, 3])
    assert share.value == pytest.approx(2 / 3)  # older groups are forgotten


durations = st.lists(st.floats(0.01, 50.0), min_size=1, max_size=200)


@given(st.integers(1, 9), durations, st.floats(0.01, 20.0), st.booleans(), st.none() | st.integers(0, 4))
def test_pace_keeps_a_limit_and_starts_as_many_groups_as_the_run_needs(
    batch: int, seconds: list[float], step_seconds: float, prefetch: bool, limit: int | None
) -> None:
    run = Run(batch, cycle(seconds), step_seconds, prefetch, limit).to_the_end()
    assert max(run.ages) <= (OVERTAKEN if limit is None else limit)
    assert run.started == STEPS * batch


def test_generation_goes_on_while_the_last_groups_of_a_batch_finish() -> None:
    """Four groups a batch, one of them three times as long as the others, and steps that take no time.

    One batch at a time is 3 s a step. With four always in flight, 4 groups are 6 s of generation: 1.5 s a step.
    """
    run = Run(4, cycle([1.0, 1.0, 1.0, 3.0]), 0.001)
    assert run.to_the_end().now < 2.0 * STEPS
