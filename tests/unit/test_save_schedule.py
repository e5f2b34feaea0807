"""When checkpoints are begun: due by steps or by time, put off while one is written, none lost."""

from __future__ import annotations

import struct
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from grpo_trainer.config.train import CheckpointConfig
from grpo_trainer.errors import ConfigError
from grpo_trainer.optim import FusedAdamW
from grpo_trainer.saving.checkpoint import Checkpoints, Progress
from grpo_trainer.saving.manifest import check_files, read_state
from grpo_trainer.saving.schedule import SHARE, Schedule


class Clock:
    """Seconds that a test sets."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


# ---------------------------------------------------------------- the option


@pytest.mark.parametrize(
    ("written", "steps", "seconds", "expected"),
    [
        ("20", 20, 0.0, 20),
        (20, 20, 0.0, 20),
        ("90s", 0, 90.0, 1),
        ("10m", 0, 600.0, 1),
        ("1.5h", 0, 5400.0, 1),
        ("0", 0, 0.0, 0),
        ("0m", 0, 0.0, 0),
        ("never", 0, 0.0, 0),
    ],
)
def test_an_interval_is_a_number_of_steps_or_a_time(written: Any, steps: int, seconds: float, expected: int) -> None:
    config = CheckpointConfig(checkpoint_interval=written)
    assert (config.interval_steps, config.interval_seconds, config.environment_interval) == (steps, seconds, expected)
    assert CheckpointConfig.model_validate(config.model_dump(mode="json")) == config
    assert config.saves is (written != "never")


@pytest.mark.parametrize("written", ["-1", "10 minutes", "m", "1.5", "10d", "", True])
def test_what_is_no_interval_is_refused(written: Any) -> None:
    with pytest.raises(ValueError, match="10m") as error:
        CheckpointConfig(checkpoint_interval=written)
    (found,) = error.value.errors()  # type: ignore[attr-defined]
    assert isinstance(found["ctx"]["error"], ConfigError) and found["loc"] == ("checkpoint_interval",)


# ---------------------------------------------------------------- the schedule


def test_by_steps_each_multiple_is_due_until_a_checkpoint_is_begun() -> None:
    schedule = Schedule(3, 0.0)
    assert [schedule.is_due(step) for step in (1, 2, 3)] == [False, False, True]
    schedule.begun(3)
    assert [schedule.is_due(step) for step in (4, 5, 6, 7)] == [False, False, True, True]
    schedule.begun(7)  # that of step 6, put off
    assert [schedule.is_due(step) for step in (8, 9)] == [False, True]


def test_by_steps_a_resumed_run_goes_on_from_its_step() -> None:
    schedule = Schedule(3, 0.0)
    schedule.begun(7)
    assert [schedule.is_due(step) for step in (8, 9)] == [False, True]


def test_by_time_the_next_is_due_so_long_after_the_last() -> None:
    clock = Clock(100.0)
    schedule = Schedule(0, 600.0, clock)

    def due_at(*times: float) -> list[bool]:
        found = []
        for clock.now in times:
            found.append(schedule.is_due(5))
        return found

    assert due_at(100.0, 699.0, 700.0, 712.0) == [False, False, True, True]
    schedule.begun(5, waited=0.5)  # 0.5 s are 2 % of 25 s, which is less than 600 s
    assert due_at(1311.0, 1312.0) == [False, True]
    schedule.begun(6, waited=26.0)  # 26 s are 2 % of 1300 s
    assert due_at(1312.0 + 1299.0, 1312.0 + 1301.0) == [False, True]


@given(st.lists(st.floats(0.0, 100.0), min_size=1, max_size=8))
def test_by_time_checkpoints_take_no_more_than_their_share(waits: list[float]) -> None:
    """However long training waits for each of them, once the time after the last has passed as well."""
    clock = Clock()
    schedule = Schedule(0, 10.0, clock)
    for step, wait in enumerate(waits):
        while not schedule.is_due(step):
            clock.now += 1.0
        clock.now += wait
        schedule.begun(step, wait)
    while not schedule.is_due(len(waits)):
        clock.now += 1.0
    assert sum(waits) <= SHARE * clock.now


def test_with_neither_none_is_ever_due() -> None:
    clock = Clock()
    schedule = Schedule(0, 0.0, clock)
    clock.now = 1e9
    assert not schedule.is_due(1_000_000)


# ---------------------------------------------------------------- checkpoints on that schedule


class OneWeight:
    """A policy of one number. Each write waits until the test lets it end.

    Attributes:
        most: how many writes there were at one time.
    """

    kind, step_prefix, final_name, marker = "a weight", "step_", "model_final", "weight"

    def __init__(self) -> None:
        self.model: Any = nn.Linear(1, 1, bias=False)
        self.may_end = threading.Semaphore(0)
        self._under_way = self.most = 0

    def become(self, value: float) -> None:
        with torch.no_grad():
            self.model.weight.fill_(value)

    def tensors(self) -> dict[str, Tensor]:
        return {"weight": self.model.weight.detach()}

    def write(self, folder: Path, tensors: Mapping[str, Tensor]) -> None:
        self._under_way += 1
        self.most = max(self.most, self._under_way)
        assert self.may_end.acquire(timeout=60)
        (folder / "weight").write_bytes(struct.pack("<f", tensors["weight"].item()))
        self._under_way -= 1

    def exact(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {}

    def load(self, path: Path, exact: Mapping[str, Tensor]) -> None:
        raise AssertionError("nothing is loaded here")


def is_due(interval: str | int, step: int, last_step: int, now: float, last_at: float) -> bool:
    """Whether one is due, from the definition."""
    if isinstance(interval, int):
        return any(each % interval == 0 for each in range(last_step + 1, step + 1))
    return now - last_at >= 600.0


@given(
    st.sampled_from(["10m", 1, 3]),
    st.lists(st.tuples(st.integers(0, 700), st.booleans()), min_size=1, max_size=12),
)
def test_one_write_at_a_time_and_none_is_lost(interval: str | int, steps: list[tuple[int, bool]]) -> None:
    """Each step takes a given number of seconds; a write that has begun ends during the step or later."""
    with tempfile.TemporaryDirectory() as name:
        folder, clock, policy = Path(name), Clock(), OneWeight()
        config = CheckpointConfig(save_path=folder, checkpoint_interval=interval, keep_checkpoints=0)
        optimizer = FusedAdamW(policy.model.parameters())
        checkpoints = Checkpoints(config, policy, optimizer, clock=clock)
        begun, is_writing, last_step, last_at = [], False, 0, 0.0
        for step, (seconds, ends) in enumerate(steps, 1):
            clock.now += seconds
            policy.become(step)
            if is_writing and ends:
                policy.may_end.release()
                checkpoints.close()  # which waits for it
                is_writing = False
            saved = checkpoints.maybe_save(Progress(step, step, (f"batch {step}",)))
            wanted = not is_writing and is_due(interval, step, last_step, clock.now, last_at)
            assert ("train/save_time" in saved) == wanted
            if wanted:
                begun.append(step)
                is_writing, last_step, last_at = True, step, clock.now
        last = len(steps)
        policy.become(-1.0)
        policy.may_end.release(2)
        checkpoints.save(Progress(last + 1, last + 1), final=True)  # waits for the one before
        checkpoints.close()
        assert policy.most == 1
        found = {path.name: struct.unpack("<f", (path / "weight").read_bytes()) for path in folder.iterdir()}
        assert found == {**{f"step_{step}": (float(step),) for step in begun}, "model_final": (-1.0,)}
        for step in begun:
            state = read_state(folder / f"step_{step}")
            check_files(folder / f"step_{step}", state)
            assert state.progress == Progress(step, step, (f"batch {step}",))
