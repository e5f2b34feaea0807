"""How far ahead of the trainer an environment works: by hand, and in runs of which time is simulated."""

from __future__ import annotations

import asyncio
import heapq
import json
import logging
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from environments.api import wire
from environments.api.overview import Explainer
from environments.api.queue import RolloutQueue
from environments.api.service import Service
from environments.base import BaseEnv
from environments.config import BaseEnvConfig
from environments.demo_model.model import build_tokenizer
from environments.items import Shuffled
from environments.running import cli, runner, state
from environments.running.cli import groups_page
from environments.running.pace import (
    OVERTAKEN,
    RECENT_GROUPS,
    InFlight,
    Limits,
    RunningShare,
    groups_to_start,
)
from environments.running.state import StateFiles
from environments.scoring import settled
from tests.stand_ins import local_api, registration, serving, trained
from tests.unit.test_environment_runner import started

STEPS = 12


def config(**changes: Any) -> BaseEnvConfig:
    return BaseEnvConfig(**({"tokenizer_name": "model", "group_size": 2} | changes))


def limits(batch_size: int = 8, last_step: int = -1, max_staleness: int | None = None) -> Limits:
    return Limits(batch_size, last_step, max_staleness)


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
THREE = {"max_batches_offpolicy": 3}
TEN = limits(last_step=10)
PACE: list[tuple[dict[str, Any], Limits, wire.StatusEnv, InFlight, int]] = [
    # By batches: one of 8 sequences is 4 groups of 2.
    (ONE, limits(), status(), InFlight(), 4),
    ({}, limits(), status(leased=0, weight=0.5), InFlight(), 2),  # another environment is there: half of a batch
    ({}, limits(), status(queue=2, own=2, weight=0.5), InFlight(), 0),
    (ONE, limits(), status(queue=3), InFlight(1, 0), 0),  # 4 - 3 queued - 1 in flight
    (ONE, limits(), status(queue=9), InFlight(), 0),
    (ONE, limits(), status(queue=2, own=0), InFlight(1, 0), 1),  # 4 - 2 queued by others - 1 in flight
    (THREE, limits(), status(queue=3), InFlight(1, 0), 8),  # 3 * 4 - 3 - 1
    (THREE, TEN, status(step=9, queue=1), InFlight(), 3),  # one step is left: 1 * 4 - 1
    (THREE, TEN, status(step=10), InFlight(), 0),
    ({"max_concurrent_groups": 3}, limits(), status(), InFlight(1, 0), 2),
    (ONE | {"min_batch_allocation": 0.5}, limits(), status(queue=9, own=0), InFlight(1, 0), 1),  # 4 / 2 is ours: 2 - 1
    ({"group_size": 3}, limits(), status(), InFlight(), 3),  # 8 / 3 groups, rounded up
    # One batch of completions is kept running.
    ({}, TEN, status(leased=0), InFlight(), 4),
    ({}, TEN, status(leased=4), InFlight(), 4),  # one is trained on, the next one is not complete
    ({}, TEN, status(leased=4, queue=3), InFlight(1, 0), 3),  # its last group is in flight: keep 4
    ({}, TEN, status(leased=4, queue=4), InFlight(0), 0),  # it is complete
    ({}, TEN, status(leased=8), InFlight(2, 0), 0),  # and the trainer has it already
    ({}, TEN, status(leased=6, queue=1), InFlight(1, 0), 3),  # 2 leased ahead and 1 queued are none
    ({}, TEN, status(leased=4), InFlight(1, 0, 0.8), 4),  # 5 groups, so that 4 groups' completions run
    ({}, TEN, status(leased=4), InFlight(1, 0, 0.1), 11),  # never more than three batches
    ({}, TEN, status(leased=4, queue=4), InFlight(0, None, 0.5), 0),  # the next batch is complete
    ({}, TEN, status(5, 3, leased=4), InFlight(1, 1), 0),  # four steps old: (5 + 1 - 4) * 4 - 4 - 3 - 1
    ({}, TEN, status(6, leased=0), InFlight(1, 1), 3),  # five: 1 * 4 - 1
    ({}, TEN, status(7, leased=0), InFlight(1, 1), 0),  # it goes first
    ({}, TEN, status(8, 2, leased=4), InFlight(1, 8), 1),  # two steps are left: 2 * 4 - 4 - 2 - 1
    # None is started that will be too old.
    ({}, limits(max_staleness=0), status(leased=0), InFlight(), 4),
    ({}, limits(max_staleness=0), status(leased=0, queue=1), InFlight(2, 0), 1),  # 1 * 4 - 1 - 2
    ({}, limits(max_staleness=0), status(leased=4), InFlight(), 0),  # what is sampled now would be a version old
    ({}, limits(max_staleness=1), status(leased=4), InFlight(), 4),  # 2 * 4 - 4
    ({}, limits(max_staleness=1), status(leased=4, queue=2), InFlight(1, 0), 1),  # 2 * 4 - 4 - 2 - 1
    ({}, limits(max_staleness=1), status(1, leased=0), InFlight(2, 0), 2),  # a version has passed: (2 - 1) * 4 - 2
    ({}, limits(max_staleness=1), status(2, leased=0), InFlight(1, 0), 0),
]


@pytest.mark.parametrize(("changes", "limit", "seen", "in_flight", "wanted"), PACE)
def test_pace_by_hand(
    changes: dict[str, Any], limit: Limits, seen: wire.StatusEnv, in_flight: InFlight, wanted: int
) -> None:
    assert groups_to_start(seen, limit, config(**changes), in_flight) == wanted


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
        ahead = limits(2 * self.batch, STEPS, self.max_staleness)
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
def test_pace_limit(batch: int, seconds: list[float], step_seconds: float, prefetch: bool, limit: int | None) -> None:
    run = Run(batch, cycle(seconds), step_seconds, prefetch, limit).to_the_end()
    assert max(run.ages) <= (OVERTAKEN if limit is None else limit)
    assert run.started == STEPS * batch


# mixtures of environments --------------------------------------------------------------------------------------------


MIXED_STEPS = 8


def trainer(folder: Path, starting_step: int = 0) -> wire.Register:
    return registration(16, checkpoint_dir=str(folder), starting_step=starting_step, num_steps=MIXED_STEPS)


class Numbers(BaseEnv[int]):
    """Groups whose tokens are the item and the environment's mark."""

    name = "numbers"

    def __init__(self, mark: int = 0, seconds: float = 0.0, **changes: Any) -> None:
        settings = {"tokenizer_name": "m", "group_size": 2, "retry_timeout": 5.0} | changes
        super().__init__(BaseEnvConfig(**settings), None, build_tokenizer())  # type: ignore[arg-type]
        self.mark, self.seconds = mark, seconds
        self.items = Shuffled(range(1000), seed=0)
        self.taken: list[int] = []

    async def get_next_item(self) -> int:
        self.taken.append(next(self.items))
        return self.taken[-1]

    async def collect_trajectories(self, item: int) -> wire.ScoredData | None:
        await asyncio.sleep(self.seconds)
        row = [item, self.mark]
        return wire.ScoredData(tokens=[row, row], masks=[[-100, self.mark]] * 2, scores=[1.0, 0.0])

    async def evaluate(self) -> dict[str, float]:
        return {}


class Stuck(Numbers):
    """Its ninth item never comes, so it asks for the trainer's step once."""

    async def get_next_item(self) -> int:
        if len(self.taken) == 8:
            await asyncio.Event().wait()
        return await settled(super().get_next_item())


async def train(service: Service, steps: int) -> list[Counter[int]]:
    """How many groups of each mark each batch had."""
    return [Counter(group.tokens[0][1] for group in groups) for groups in await trained(service, steps)]


async def test_batches_are_mixed_by_weight_however_fast_each_environment_is(tmp_path: Path) -> None:
    service = await started(trainer(tmp_path))
    slow, fast = Numbers(1, seconds=0.05, inference_weight=3.0), Numbers(2, inference_weight=1.0)
    async with local_api(service) as api:
        tasks = [asyncio.create_task(serving(env, api)) for env in (slow, fast)]
        mixtures = await train(service, MIXED_STEPS)
        await asyncio.wait_for(asyncio.gather(*tasks), 20)
    assert all(mixture.total() == 8 for mixture in mixtures)
    # A weight of 3 to 1: six groups of eight. The first batch may have been begun before both were there.
    later = sum(mixtures[2:], Counter[int]())
    assert later[1] / later.total() == pytest.approx(0.75, abs=0.1), mixtures


@pytest.mark.parametrize(("batch", "sizes"), [(24, (8, 12)), (64, (16, 24)), (60, (12, 20)), (64, (8, 8))])
def test_environments_with_groups_of_several_sizes_fill_batches(batch: int, sizes: tuple[int, int]) -> None:
    """Two groups of 8 and one of 12 are each environment's part of 24 by its weight, and make no batch of 24."""
    queue = RolloutQueue()
    explainer = Explainer(queue)
    queue.register(registration(batch))
    queue.next_batch(0.0, 60.0)
    kinds = [
        wire.RegisterEnv(max_token_length=64, desired_name=str(size), weight=1.0, group_size=size) for size in sizes
    ]
    environments = [queue.register_environment(kind, 0.0) for kind in kinds]
    grants = most = 0
    for _ in range(100):
        for environment, size in zip(environments, sizes, strict=True):
            assert environment is not None
            seen = explainer.status_env(environment.id, seen="")
            if groups_to_start(seen, Limits(batch), Numbers(group_size=size).config, InFlight()):
                queue.offer(environment.id, size, 10, 0.5)
        most = max(most, queue.sequences)
        if (grant := queue.next_batch(0.0, 60.0)) is not None:
            queue.acknowledge(grant.batch_id)
            grants += 1
    assert grants >= 20 and most <= 2 * batch


def test_a_resumed_run_goes_on_with_the_items_that_were_next(tmp_path: Path) -> None:
    async def run(starting_step: int, steps: int) -> Numbers:
        service = await started(trainer(tmp_path, starting_step))
        env = Numbers(total_steps=starting_step + steps)
        task = asyncio.create_task(serving(env, service))
        await train(service, steps)
        await asyncio.wait_for(task, 20)
        return env

    first = asyncio.run(run(0, 4))
    saved = sorted(path.name for path in (tmp_path / "environments" / "numbers").iterdir())
    assert saved == ["step-3.json", "step-4.json"]  # as often as the trainer saves, and at the end
    again = asyncio.run(run(4, 2))
    assert not set(first.taken) & set(again.taken)
    order = Shuffled(range(1000), seed=0)
    assert first.taken + again.taken == [next(order) for _ in range(len(first.taken + again.taken))]
    afresh = asyncio.run(run(0, 2))
    assert afresh.taken == first.taken[: len(afresh.taken)]


async def test_state_saved_at_the_end_is_of_the_step_that_the_trainer_has_reached_by_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "GOODBYE_S", 60.0)  # a busy machine takes longer for an answer
    service, stop = await started(trainer(tmp_path)), asyncio.Event()
    task = asyncio.create_task(serving(Stuck(), service, stop))
    await train(service, 1)
    stop.set()
    await asyncio.wait_for(task, 20)
    saved = tmp_path / "environments" / "numbers" / "step-1.json"
    assert json.loads(saved.read_text()) == {"position": 8}


def test_the_state_of_an_earlier_checkpoint_is_that_checkpoints(
    tmp_path: Path, caplog: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = StateFiles(tmp_path, "a/b")
    assert files.newest(9) is None
    for step in (3, 6, 12):
        files.save(step, {"position": step * 10})
    assert files.newest(9) == {"position": 60} and files.newest(12) == {"position": 120} and files.newest(2) is None
    assert {path.name for path in tmp_path.iterdir()} == {"a_b"}
    monkeypatch.setattr(state, "KEPT", 2)
    files.save(13, {})
    assert {path.name for path in (tmp_path / "a_b").iterdir()} == {"step-12.json", "step-13.json"}
    (tmp_path / "file").write_text("")
    StateFiles(tmp_path / "file", "x").save(1, {"a": 1})
    (warning,) = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert warning.args[0] == 1 and str(tmp_path / "file") in warning.message and "--env.state_dir" in warning.message


def test_the_page_of_groups_stands_alone_and_shows_them_as_they_are() -> None:
    talk = [{"role": "user", "content": "<script>alert(1)</script>"}, {"role": "assistant", "content": "one & two"}]
    group = wire.ScoredData(
        tokens=[[1, 2], [1, 3]],
        masks=[[-100, 2], [-100, 3]],
        scores=[0.25, 1.0],
        messages=[talk, [talk[0], {"role": "assistant", "content": "three"}]],
        policy_versions=[4, 4],
    )
    page = groups_page("sums: <a>", [group] * 3)
    assert not re.search(r"<script|@import|url\(|\bsrc=|\bhref=\"(?!data:,)", page)
    assert page.count("&lt;script&gt;alert(1)") == 6  # once as the title of each group, once as its prompt
    assert "one &amp; two" in page and page.index("three") < page.index("one &amp; two")  # the better answer first
    assert (
        "answers</small><b>6</b>" in page
        and "mean score</small><b>0.625</b>" in page
        and "1 of 2" in page
        and "policy 4" in page
    )
    assert "<h1>none" in groups_page("none", [])
    assert "<details" in groups_page("no text", [msgspec.structs.replace(group, messages=None)])


def test_process_keeps_groups_in_a_file_that_is_named_like_a_page(tmp_path: Path) -> None:
    path = tmp_path / "groups.html"
    asyncio.run(cli.process(Numbers(7, data_path_to_save_groups=path), 2))
    assert [len(json.loads(line)["tokens"]) for line in path.read_text().splitlines()] == [2, 2]
    assert "answers</small><b>4</b>" in (tmp_path / "groups.page.html").read_text()
