"""The loop's order of events: what is fenced, what is published, and what counts as a version."""

from __future__ import annotations

import logging
import re
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from grpo_trainer import loop
from grpo_trainer.batch.batching import ReadyBatch
from grpo_trainer.config.options import build
from grpo_trainer.config.train import TrainConfig
from grpo_trainer.errors import (
    BridgeError,
    ConfigError,
    DriftError,
    GrpoError,
    HungError,
    PeerGoneError,
    ProcessFailedError,
    ServerError,
    StoppedError,
    TrainingError,
    WeightsError,
)
from grpo_trainer.files import METRICS_FILE
from grpo_trainer.loop import Desk, run_steps
from grpo_trainer.losses import BatchCounts
from grpo_trainer.parallel.world import World
from grpo_trainer.rollouts.groups import RolloutBatch
from grpo_trainer.saving.checkpoint import Progress
from grpo_trainer.shutdown import RunState, save_on_exit
from grpo_trainer.signals import StepWatch
from grpo_trainer.trainer import StepResult
from grpo_trainer.versions import VersionOffset, VersionOffsets
from grpo_trainer.weights.bridge import Published
from tests.unit.factories import TinyModel


class Fakes:
    """Trainer, bridge, rollouts, checkpoints and metrics in one: each says what it is asked to do.

    Args:
        lands: whether each step is one, or is skipped.
        faults: what a call of a method raises: by the method's name and the call's number, from 1.
    """

    model = TinyModel()
    optimizer = SimpleNamespace(wait_for_copy=lambda: None)

    def __init__(self, *lands: bool, faults: Mapping[tuple[str, int], Exception] | None = None) -> None:
        self.lands = lands
        self.faults = faults or {}
        self.calls: Counter[str] = Counter()
        self.events: list[str] = []
        self.metrics: list[int] = []
        self.held: list[str] = []

    def meet(self, method: str) -> None:
        """Raise what is planned for this call."""
        self.calls[method] += 1
        if (fault := self.faults.get((method, self.calls[method]))) is not None:
            raise fault

    def connect(self, version: int) -> int:
        return version

    def prove(self) -> float | None:
        self.meet("prove")
        self.events.append("prove")
        return None

    def check_finite(self) -> None:
        self.meet("check_finite")

    @contextmanager
    def updating(self) -> Iterator[None]:
        self.events.append("begin")
        yield
        self.events.append("end")

    def publish(self, version: int) -> Published:
        self.meet("publish")
        self.events.append(f"publish {version}")
        return Published(version, "m", {})

    def begin(self, progress: Progress) -> None:
        self.events.append(f"begin at {progress.step}")

    def next(self, version: int, *, last: bool) -> Any:
        self.meet("next")
        self.events.append(f"{'last ' if last else ''}batch {version}")
        return ReadyBatch(RolloutBatch(f"b{version}", ()), (), BatchCounts(0, 0), {}, 0.0)

    def step(self, batch: Any, step: int, writing: Any) -> StepResult:
        self.meet("step")
        if self.lands[step]:
            held: AbstractContextManager[None] = writing()
            with held:
                self.events.append("write")
        return StepResult(self.lands[step], {})

    def trained(self, batch: ReadyBatch) -> tuple[str, ...]:
        self.held.append(batch.rollouts.batch_id)
        return tuple(self.held)

    def release(self, batch: ReadyBatch) -> None:
        self.events.append(f"release {batch.rollouts.batch_id}")

    def report(self, step: int, *, last: bool) -> dict[str, Any]:
        self.events.append(f"report {'last ' if last else ''}{step}")
        return {}

    safe_path: Path | None = None

    def settle(self, batches: tuple[str, ...], *, patient: bool = True) -> None:
        self.events.append(f"settle {','.join(batches)}")

    def start(self) -> None:
        self.events.append("clock")

    @property
    def newest(self) -> int:
        return max(self.metrics, default=0)

    def log(self, step: int, *_: Any) -> None:
        self.meet("log")
        self.metrics.append(step)

    def maybe_save(self, progress: Progress) -> dict[str, Any]:
        self.meet("maybe_save")
        self.events.append(f"save {progress.step}/{progress.policy_version} {','.join(progress.batches)}")
        return {}

    def settled(self, progress: Progress) -> tuple[str, ...]:
        return progress.batches[:-1]  # the newest is still being written

    def save(self, progress: Progress, *, final: bool = False) -> Path:
        self.meet("save")
        self.events.append(f"{'final' if final else 'stop'} {progress.step}/{progress.policy_version}")
        return Path("checkpoint")


START = Progress(0, 5)


def run(fakes: Any, steps: int, interval: str = "10m", start: Progress = START, **others: Any) -> None:
    config = TrainConfig(model_name="m", training_steps=steps, checkpoint_interval=interval)
    run_steps(config, start, fakes, fakes, Desk(fakes, fakes), fakes, **others)


def test_a_version_is_a_step_that_landed_and_a_batch_is_settled_when_it_is_on_the_disk() -> None:
    fakes: Any = Fakes(True, False, True)
    run(fakes, 3)
    assert fakes.events == [
        *("prove", "publish 5", "begin at 0", "clock"),
        *("batch 5", "begin", "write", "end", "publish 6", "report 1", "save 1/6 b5", "settle "),
        *("batch 6", "publish 6", "report 2", "save 2/6 b5,b6", "settle b5"),
        *("last batch 6", "begin", "write", "end", "publish 7", "report last 3", "save 3/7 b5,b6,b6", "settle b5,b6"),
        *("final 3/7", "settle b5,b6,b6"),
    ]
    assert fakes.metrics == [1, 2, 3]


def test_servers_that_come_are_let_in_while_a_batch_is_waited_for() -> None:
    """After the copy of weights for a checkpoint: the proof of a server changes them."""

    class News(Fakes):
        def next(self, version: int, *, last: bool) -> Any:
            self.meet("wait")
            return None if self.calls["wait"] == 1 else super().next(version, last=last)

        def welcome(self) -> None:
            self.events.append("welcome")

    fakes: Any = News(False)  # a skipped step waits for no copy, and its publish may let a server in
    fakes.optimizer = SimpleNamespace(wait_for_copy=lambda: fakes.events.append("copied"))
    run(fakes, 1)
    assert fakes.events[3:9] == ["clock", "copied", "welcome", "last batch 5", "copied", "publish 5"]


def said_of(end: BaseException) -> set[str]:
    """The words that reach the user."""
    return set(re.findall(r"[^\s;,.:]+", " ".join([str(end), *getattr(end, "__notes__", ())])))


def test_run_that_never_saves_ends_and_stops_without_a_checkpoint() -> None:
    fakes: Any = Fakes(True)
    run(fakes, 1, interval="never")
    assert fakes.events[-1] == "settle b5" and not any(event.startswith("final") for event in fakes.events)
    stopped: Any = Fakes(True, True, faults={("publish", 3): StoppedError(15)})
    with pytest.raises(StoppedError) as ended:
        run(stopped, 2, interval="never")
    assert said_of(ended.value) >= {"(--checkpoint-interval", "never)"}
    assert not any(event.startswith("stop") for event in stopped.events)


SAVED = {"checkpoint", "--resume"}
"""Named by every end that left a checkpoint: its path, and how to continue."""


def test_a_step_that_hangs_gives_its_batch_back_and_saves_what_was_before() -> None:
    watch = StepWatch(0.05, grace=600.0)

    class Hanging(Fakes):
        def step(self, batch: Any, step: int, writing: Any) -> StepResult:
            if step == 0:
                return super().step(batch, step, writing)
            while True:
                watch.check()
                time.sleep(0.001)

    fakes: Any = Hanging(True, True)
    with pytest.raises(HungError) as ended:
        run(fakes, 2, watch=watch)
    assert said_of(ended.value) >= SAVED | {"1", "2"}  # the second step hung, the first is saved
    assert fakes.events[-3:] == ["release b6", "stop 1/6", "settle b5"]


def test_the_wait_for_the_last_evaluation_is_no_step_that_hangs() -> None:
    class Watch(StepWatch):
        @contextmanager
        def over(self, what: str) -> Iterator[None]:
            fakes.events.append("watched")
            yield
            fakes.events.append("unwatched")

    fakes: Any = Fakes(False)
    run(fakes, 1, watch=Watch(60.0))
    step = ["watched", "publish 5", "unwatched", "report last 1", "watched", "save 1/5 b5", "settle ", "unwatched"]
    assert fakes.events[-10:-2] == step


@pytest.mark.parametrize(
    ("method", "error", "call", "saved"),
    [
        ("next", TrainingError("waited 1800 s for a batch"), 3, "stop 2/7"),  # two steps were trained
        ("step", RuntimeError("CUDA out of memory"), 3, "stop 2/7"),  # before the third has written
        ("step", DriftError("base model"), 3, "stop 2/7"),
        ("publish", ServerError("no answer"), 3, "stop 2/7"),  # the first call is before any step
        ("publish", ProcessFailedError("the server did not start"), 2, "stop 1/6"),
        ("maybe_save", OSError("disk full"), 2, "stop 2/7"),
        ("publish", StoppedError(15), 3, "stop 2/7"),  # the step, its batch and its row stay together
    ],
)
def test_run_that_ends_between_steps_saves_what_was_learnt(
    method: str, error: Exception, call: int, saved: str, caplog: pytest.LogCaptureFixture
) -> None:
    words = said_of(error)
    fakes: Any = Fakes(True, True, True, True, faults={(method, call): error})
    with pytest.raises(type(error)) as ended:
        run(fakes, 4)
    assert ended.value is error and said_of(error) >= words | SAVED | {saved[5]}
    if not isinstance(error, StoppedError):
        (event,) = [record for record in caplog.records if record.levelno == logging.ERROR]
        assert said_of(Exception(*event.args or ())) == said_of(error)
    last = "settle b5" if saved == "stop 1/6" else "settle b5,b6"
    assert saved in fakes.events and fakes.events[-1] == last
    assert fakes.metrics == list(range(1, int(saved[5]) + 1))  # a resumed run has a row of each step
    assert ("release b7" in fakes.events) == (method == "step")


@pytest.mark.parametrize(
    ("has_written", "prepared", "counts"), [(True, False, True), (False, True, True), (False, False, False)]
)
def test_a_step_counts_though_its_fence_failed_once_it_was_written_or_prepared(
    has_written: bool, prepared: bool, counts: bool
) -> None:
    class Failing(Fakes):
        optimizer = SimpleNamespace(prepared=prepared)

        @contextmanager
        def updating(self) -> Iterator[None]:
            if has_written:
                yield
            raise ServerError("no answer")

    fakes: Any = Failing(True)
    with pytest.raises(ServerError) as ended:
        run(fakes, 1)
    assert (said_of(ended.value) >= SAVED | {"1"}) is counts
    assert fakes.events[-2:] == (["stop 1/6", "settle b5"] if counts else ["last batch 5", "release b5"])
    assert fakes.metrics == ([1] if counts else [])


@pytest.mark.parametrize(
    "spoilt_by", ["bad weights", "a torn write", "an error of one process", "a process that ended"]
)
def test_weights_that_nobody_vouches_for_are_not_saved(spoilt_by: str) -> None:
    world = World()

    class Spoiling(Fakes):
        safe_path = Path("step_3")

        def step(self, batch: Any, step: int, writing: Any) -> StepResult:
            match spoilt_by:
                case "bad weights":
                    raise WeightsError("the loss is not finite")
                case "a torn write":
                    with writing():
                        raise ServerError("gone")
                case "a process that ended":
                    raise PeerGoneError("gone")
            world.size = 2
            raise ServerError("gone")

    fakes: Any = Spoiling(True, True)
    with pytest.raises(GrpoError) as ended:
        run(fakes, 5, start=Progress(3, 5), world=world)
    assert said_of(ended.value) >= {"step_3", "--resume"}
    assert not [event for event in fakes.events if event.startswith(("stop", "settle"))]


def test_a_step_that_can_not_be_logged_at_the_end_is_saved() -> None:
    fakes: Any = Fakes(True, faults={("publish", 2): ServerError("gone"), ("log", 1): OSError("disk full")})
    with pytest.raises(ServerError) as ended:
        run(fakes, 1)
    assert said_of(ended.value) >= SAVED and fakes.events[-2:] == ["stop 1/6", "settle b5"]


def test_run_that_ends_before_anything_was_learnt_leaves_no_checkpoint() -> None:
    fakes: Any = Fakes(True, faults={("prove", 1): BridgeError("unproved")})
    with pytest.raises(BridgeError, match=r"^unproved$"):
        run(fakes, 1)
    assert not fakes.events
    faults = {("next", 2): TrainingError("batchless"), ("save", 1): OSError("disk full")}
    with pytest.raises(TrainingError, match=r"^batchless\b.*\b1\b.*\bOSError: disk full\b"):
        run(Fakes(True, True, faults=faults), 2)


@pytest.mark.parametrize("is_common", [True, False])
def test_a_save_that_failed_in_one_process_is_told_and_none_waits(is_common: bool, caplog: Any) -> None:
    world, end = World(1, 2), StoppedError(15)
    error = OSError("disk full") if is_common else MemoryError("no room")

    def fail(_: Progress) -> None:
        raise world.common(error) if is_common else error

    checkpoints: Any = SimpleNamespace(save=fail, safe_path=None)
    state = RunState(Progress(), Progress(1, 1), None)
    save_on_exit(world.common(end), state, checkpoints, lambda _: None, world)
    assert world.is_common(end) == is_common
    assert ("MemoryError: no room" in caplog.text) != is_common  # else the first process says it


def test_a_resumed_run_tells_the_feed_and_the_checkpoints_where_versions_jumped() -> None:
    begun: list[Progress] = []
    saved: list[Progress] = []

    class Resumed(Fakes):
        def connect(self, version: int) -> int:
            return version + 11

        def begin(self, progress: Progress) -> None:
            begun.append(progress)

        def maybe_save(self, progress: Progress) -> dict[str, Any]:
            saved.append(progress)
            return {}

    fakes: Any = Resumed(True, True, True, True)
    run(fakes, 4, start=Progress(3, 90, ("a",)))
    assert begun == [Progress(3, 101, ("a",), VersionOffsets((VersionOffset(101, 11),)))]
    assert saved == [Progress(4, 102, ("b101",), begun[0].numbering)]


def test_train_refuses_a_folder_that_holds_a_run_before_the_others_are_met(tmp_path: Path) -> None:
    (tmp_path / METRICS_FILE).touch()
    config = build(TrainConfig, {"model": "x", "log_dir": str(tmp_path)})
    with pytest.raises(ConfigError, match=rf"--log-dir\b.* {tmp_path}\b.*--resume auto"):
        loop.train(config, lambda _: pytest.fail("it has met them"))


def test_a_thread_that_prepares_a_batch_keeps_the_interpreter_for_a_short_time(tmp_path: Path) -> None:
    """Requests that hold generation wait for it."""
    before = sys.getswitchinterval()
    try:
        sys.setswitchinterval(0.005)
        with pytest.raises(InterruptedError):
            loop.train(build(TrainConfig, {"model": "x", "log_dir": str(tmp_path)}), Mock(side_effect=InterruptedError))
        assert sys.getswitchinterval() == pytest.approx(0.0005)
    finally:
        sys.setswitchinterval(before)


def test_registration_has_an_interval_in_steps() -> None:
    """By time a checkpoint may be of any step, so environments save their state at each."""
    config = build(TrainConfig, {"model": "x", "checkpoint_interval": "10m"})
    assert loop.registration(config, Progress()).save_checkpoint_interval == 1
