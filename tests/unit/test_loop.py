"""The loop's order of events: what is fenced, what is published, and what counts as a version."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from grpo_trainer import loop
from grpo_trainer.bench.step import measure
from grpo_trainer.bench.step.options import StepOptions
from grpo_trainer.bridge_options import LoraOnly
from grpo_trainer.checkpoint import Progress
from grpo_trainer.config import ModelConfig, TrainConfig
from grpo_trainer.distributed import Order, World
from grpo_trainer.errors import ConfigError, HungError, StoppedError
from grpo_trainer.files import METRICS_FILE
from grpo_trainer.loop import run_steps
from grpo_trainer.options import build
from grpo_trainer.rollouts.feed import FedBatch
from grpo_trainer.rollouts.types import Leased
from grpo_trainer.trainer import StepResult
from grpo_trainer.watchdog import StepWatch
from grpo_trainer.weights.bridge import Published
from grpo_trainer.weights.lora_swap import LoraSwap
from tests.unit.tiny_lora import tiny_lora


class Told:
    """Trainer, bridge, rollouts, checkpoints and metrics in one: each says what it is asked to do.

    Args:
        lands: whether each step is one, or is skipped.
    """

    model = None

    def __init__(self, *lands: bool) -> None:
        self.lands = lands
        self.events: list[str] = []
        self.metrics: list[int] = []
        self.held: list[str] = []

    def connect(self, version: int) -> int:
        return version

    def prove(self) -> float | None:
        self.events.append("prove")
        return None

    @contextmanager
    def updating(self) -> Iterator[None]:
        self.events.append("begin")
        yield
        self.events.append("end")

    def publish(self, version: int) -> Published:
        self.events.append(f"publish {version}")
        return Published(version, "m", {})

    def begin(self, progress: Progress) -> None:
        self.events.append(f"begin at {progress.step}")

    def next(self, version: int, *, last: bool) -> Any:
        self.events.append(f"{'last ' if last else ''}batch for {version}")
        return FedBatch(Leased(f"b{version}", ()), self.ready, {})

    ready: Any = None

    def step(self, _: Any, step: int, writing: Any) -> StepResult:
        if self.lands[step]:
            held: AbstractContextManager[None] = writing()
            with held:
                self.events.append("write")
        return StepResult(self.lands[step], {})

    def trained(self, batch: FedBatch) -> tuple[str, ...]:
        self.held.append(batch.leased.batch_id)
        return tuple(self.held)

    def release(self, batch: FedBatch) -> None:
        self.events.append(f"release {batch.leased.batch_id}")

    def report(self, step: int) -> dict[str, Any]:
        self.events.append(f"report {step}")
        return {}

    def settle(self, batches: tuple[str, ...]) -> None:
        self.events.append(f"settle {','.join(batches)}")

    def log(self, step: int, *_: Any) -> None:
        self.metrics.append(step)

    def maybe_save(self, progress: Progress) -> dict[str, Any]:
        self.events.append(f"save {progress.step}/{progress.policy_version} {','.join(progress.batches)}")
        return {}

    def settled(self, progress: Progress) -> tuple[str, ...]:
        return progress.batches[:-1]  # the newest is still being written

    def save(self, progress: Progress, *, final: bool = False) -> Path:
        self.events.append(f"{'final' if final else 'stop'} {progress.step}/{progress.policy_version}")
        return Path("checkpoint")


def run(told: Any, steps: int) -> None:
    config = TrainConfig(model=ModelConfig(name="m"), training_steps=steps)
    run_steps(config, Progress(0, 5), told, told, told, told, told)


def test_a_version_is_a_step_that_landed_and_a_batch_is_settled_when_it_is_on_the_disk() -> None:
    told: Any = Told(True, False, True)
    run(told, 3)
    assert told.events == [
        *("prove", "publish 5", "begin at 0"),
        *("batch for 5", "begin", "write", "end", "publish 6", "report 1", "save 1/6 b5", "settle "),
        *("batch for 6", "publish 6", "report 2", "save 2/6 b5,b6", "settle b5"),
        *("last batch for 6", "begin", "write", "end", "publish 7", "report 3", "save 3/7 b5,b6,b6", "settle b5,b6"),
        *("final 3/7", "settle b5,b6,b6"),
    ]
    assert told.metrics == [1, 2, 3]


def test_a_stop_while_publishing_keeps_the_step_and_its_batch_together(monkeypatch: pytest.MonkeyPatch) -> None:
    told: Any = Told(True, True)

    def publish(version: int) -> Published:
        if version == 7:
            raise StoppedError("stopped", 15)
        return Published(version, "m", {})

    monkeypatch.setattr(told, "publish", publish)
    with pytest.raises(StoppedError, match="stopped at step 2; saved checkpoint, go on with --resume auto"):
        run(told, 2)
    assert told.events[-3:] == ["end", "stop 2/7", "settle b5,b6"]


def test_a_step_that_hangs_gives_its_batch_back_and_saves_what_was_before(monkeypatch: pytest.MonkeyPatch) -> None:
    told: Any = Told(True, True)
    dumped = threading.Event()
    watch = StepWatch(0.05, grace=600.0, dump=dumped.set)
    step = told.step

    def hang(batch: Any, number: int, writing: Any) -> StepResult:
        if number == 0:
            return step(batch, number, writing)
        assert dumped.wait(60)
        while True:
            watch.check()
            time.sleep(0.001)

    monkeypatch.setattr(told, "step", hang)
    config = TrainConfig(model=ModelConfig(name="m"), training_steps=2)
    with pytest.raises(HungError, match=r"step 2 took more than .*Stopped at step 1; saved checkpoint, go on"):
        run_steps(config, Progress(0, 5), told, told, told, told, told, watch=watch)
    watch.close()
    assert told.events[-3:] == ["release b6", "stop 1/6", "settle b5"]


def test_an_adapter_is_not_sent_again_under_a_name_that_was_used(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[int] = []
    server: Any = None
    swap = LoraSwap(LoraOnly(r=8), tiny_lora(), server, Path(), 64)

    def send(name: str, version: int, *, activate: bool) -> Any:
        sent.append(version)
        answer = type("Answer", (), {"load_seconds": 0.1, "stall_seconds": 0.1})
        return type("Sent", (), {"pack_seconds": 0.1, "answer": answer})

    monkeypatch.setattr(swap, "send", send)
    names = [swap.publish(version).name for version in (0, 0, 1, 1, 1, 2)]
    assert names == [f"policy-v{version}" for version in (0, 0, 1, 1, 1, 2)]
    assert sent == [0, 1, 2]


class Leader(World):
    """Rank 0 of two, whose orders nobody hears."""

    def __init__(self) -> None:
        super().__init__(0, 2)
        self.given: list[Order] = []

    def give(self, orders: Sequence[Order]) -> None:
        self.given += orders


def out_of_memory(*_: Any) -> None:
    raise MemoryError("no room for the model")


def test_a_first_process_that_fails_in_building_leaves_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others may be within what takes all processes, where they hear no order."""
    leader, measuring = Leader(), Leader()
    monkeypatch.setattr(loop, "join_others", lambda _: leader)
    monkeypatch.setattr(loop, "build_policy", out_of_memory)
    with pytest.raises(MemoryError):
        loop.train(build(TrainConfig, {"model": "x", "log_dir": str(tmp_path)}))
    monkeypatch.setattr(measure, "join", lambda *_, **__: measuring)
    monkeypatch.setattr(measure, "build_trainer", out_of_memory)
    with pytest.raises(MemoryError):
        measure.measure(StepOptions())
    assert not leader.given and not measuring.given


def test_a_folder_that_holds_a_run_is_refused_before_the_others_are_met(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / METRICS_FILE).touch()
    monkeypatch.setattr(loop, "join_others", lambda _: pytest.fail("it has met them"))
    with pytest.raises(ConfigError, match=r"--log-dir .*: holds a run already"):
        loop.train(build(TrainConfig, {"model": "x", "log_dir": str(tmp_path)}))
