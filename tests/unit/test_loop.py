"""The loop's order of events: what is fenced, what is published, and what counts as a version."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from grpo_trainer.bridge_options import LoraOnly
from grpo_trainer.checkpoint import Progress
from grpo_trainer.config import ModelConfig, TrainConfig
from grpo_trainer.loop import run_steps
from grpo_trainer.trainer import StepResult
from grpo_trainer.weights.bridge import Published
from grpo_trainer.weights.lora_swap import LoraSwap
from tests.unit.factories import batch, sample
from tests.unit.tiny_lora import tiny_lora

BATCH = batch([sample([1], [2], 1.0), sample([1], [3], 0.0)])


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

    def register(self) -> None:
        self.events.append("register")

    def next_batch(self, version: int) -> Any:
        self.events.append(f"batch for {version}")
        return BATCH

    def ready(self, batch: Any) -> Any:
        return batch

    def step(self, _: Any, step: int, writing: Any) -> StepResult:
        if self.lands[step]:
            held: AbstractContextManager[None] = writing()
            with held:
                self.events.append("write")
        return StepResult(self.lands[step], {})

    def ack(self, _: Any, step: int) -> None:
        self.events.append(f"ack {step}")

    def log(self, step: int, *_: Any) -> None:
        self.metrics.append(step)

    def maybe_save(self, progress: Progress) -> None:
        self.events.append(f"save {progress.step}/{progress.policy_version}")

    def save(self, progress: Progress, *, final: bool) -> Path:
        return Path(f"final-{progress.step}-{progress.policy_version}-{final}")


def test_a_version_is_a_step_that_landed() -> None:
    told: Any = Told(True, False, True)
    config = TrainConfig(model=ModelConfig(name="m"), training_steps=3)
    run_steps(config, Progress(0, 5), told, told, told, told, told)
    assert told.events == [
        *("prove", "publish 5", "register"),
        *("batch for 5", "begin", "write", "end", "publish 6", "ack 1", "save 1/6"),
        *("batch for 6", "publish 6", "ack 2", "save 2/6"),
        *("batch for 6", "begin", "write", "end", "publish 7", "ack 3", "save 3/7"),
    ]
    assert told.metrics == [1, 2, 3]


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
