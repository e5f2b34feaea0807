"""The watch over a step: asked to end first, ended from outside if it does not."""

from __future__ import annotations

import subprocess
import sys
import threading
import time

import pytest

from grpo_trainer import watchdog
from grpo_trainer.errors import HungError
from grpo_trainer.watchdog import StepWatch
from tests.processes import ROOT


class Seen:
    """What the watch did."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.events: list[str] = []
        self.dumped = threading.Event()
        self.ended = threading.Event()
        monkeypatch.setattr(watchdog, "all_stacks", self.dump)
        monkeypatch.setattr(watchdog.os, "_exit", self.end)

    def dump(self) -> str:
        self.events.append("dump")
        self.dumped.set()
        return ""

    def last_words(self, seconds: float) -> None:
        self.events.append(f"words {seconds}")

    def end(self, code: int) -> None:
        self.events.append(f"end {code}")
        self.ended.set()

    def watch(self, seconds: float, grace: float) -> StepWatch:
        return StepWatch(seconds, self.last_words, grace=grace)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Seen:
    return Seen(monkeypatch)


def test_a_slow_step_is_asked_to_end_and_nothing_more_happens_once_it_does(seen: Seen) -> None:
    watch = seen.watch(0.01, grace=600.0)
    with pytest.raises(HungError) as error, watch.over("step 7"):
        assert seen.dumped.wait(60)
        while True:  # as a step that looks for a stop between its microbatches
            watch.check()
            time.sleep(0.001)
    assert error.value.exit_code == 124 and error.value.field == "step 7"
    assert "0 s" in error.value.got and "--step-timeout" in error.value.wanted
    watch.check()  # what saves afterwards is not disturbed
    assert seen.events == ["dump"]


def test_a_step_that_never_looks_is_ended_from_outside(seen: Seen) -> None:
    watch = seen.watch(0.01, grace=0.02)
    with watch.over("step 7"):
        assert seen.ended.wait(60)
    assert seen.events == ["dump", "words 0.02", "end 124"]


def test_steps_that_end_are_left_alone(seen: Seen) -> None:
    watch = seen.watch(600.0, grace=600.0)
    for step in range(3):
        with watch.over(f"step {step}"):
            watch.check()
    assert not seen.events


def test_without_a_limit_nothing_is_watched() -> None:
    watch = StepWatch(0.0)
    with watch.over("step 1"):
        assert "step watch" not in [thread.name for thread in threading.enumerate()]


HANGS = """
import logging, threading
from grpo_trainer.watchdog import StepWatch
logging.basicConfig()
def hangs_here(): threading.Event().wait()
with StepWatch(0.2, grace=0.2).over("step 3"): hangs_here()
"""


def test_a_process_that_hangs_ends_with_its_stacks_in_the_log() -> None:
    done = subprocess.run(
        [sys.executable, "-c", HANGS], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 124
    assert done.stderr.count("ERROR:grpo_trainer.watchdog:step 3 ") == 2 and "hangs_here" in done.stderr
    assert "--resume auto" in done.stderr
