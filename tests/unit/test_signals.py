"""What a signal does to `grpo run` before it has started any process, and to a trainer."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from typer.testing import CliRunner

from grpo_trainer import cli, loop, phases, run, signals
from grpo_trainer.config.train import TrainConfig
from grpo_trainer.errors import ConfigError, HungError, StoppedError
from grpo_trainer.parallel.world import World
from grpo_trainer.phases import FIRST_STEP, IN_WORDS, Phases, Wait, report_start
from grpo_trainer.run import CACHE_VARIABLE, compile_caches
from grpo_trainer.signals import StepWatch, StopSignal
from tests.processes import ROOT
from tests.unit.test_supervisor import started_with


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_ends_a_call_that_blocks(monkeypatch: pytest.MonkeyPatch, number: signal.Signals) -> None:
    def asks_vllm(*_: object) -> None:
        threading.Timer(0.2, os.kill, (os.getpid(), number)).start()
        subprocess.run([sys.executable, "-c", "import time; time.sleep(120)"], check=False)

    monkeypatch.setattr(run, "run", asks_vllm)
    words = ["run", "--model-name", "demo", "--weight-bridge-mode", "lora_only", "--training-steps", "1"]
    with started_with(signal.SIG_IGN, number):
        done = CliRunner().invoke(cli.app, words)
        assert signal.getsignal(number) == signal.SIG_IGN, "the handler is put back"
    assert isinstance(done.exception, StoppedError) and done.exception.exit_code == 128 + number


def test_what_is_sent_for_each_thread_of_a_killed_parent_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with StopSignal() as stop:
        for _ in range(3):
            signal.raise_signal(signal.SIGTERM)
        with pytest.raises(StoppedError):
            stop.check()
        monkeypatch.setattr(signals, "ONCE_SECONDS", 0.0)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_the_signal_of_a_parent_that_ends_during_a_save_interrupts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signals, "ONCE_SECONDS", 0.0)
    with StopSignal() as stop:
        signal.raise_signal(signal.SIGTERM)
        monkeypatch.setattr(os, "getppid", lambda: 1)
        try:
            signal.raise_signal(signal.SIGTERM)
        except KeyboardInterrupt:  # it would end pytest
            pytest.fail("the save is abandoned")
        with pytest.raises(StoppedError):
            stop.check()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)


def test_another_trainer_process_outlives_a_parent_that_ends_only_for_the_time_to_save(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ended = threading.Event()
    codes: list[int] = []
    for name in ("LOOK_SECONDS", "ORPHAN_SECONDS"):
        monkeypatch.setattr(signals, name, 0.01)
    monkeypatch.setattr(os, "_exit", lambda code: (codes.append(code), ended.set()))
    with StopSignal() as stop:
        stop.ignore(is_supervised=True)
        assert not codes
        monkeypatch.setattr(os, "getppid", lambda: 1)
        assert ended.wait(60) and codes == [os.EX_TEMPFAIL]


def trained_by_the_second(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, build_policy: Callable[..., object], trainer: Callable[..., object]
) -> None:
    monkeypatch.setattr(loop, "build_policy", build_policy)
    monkeypatch.setattr(loop, "Trainer", trainer)
    loop.train(TrainConfig(model_name="m", log_dir=tmp_path), lambda _: World(1, 2))


def test_another_trainer_process_leaves_signals_to_the_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Also that of a closed terminal: the first needs the others to save."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    found: list[object] = []

    def trainer(*_: object, **__: object) -> None:
        found.extend(map(signal.getsignal, numbers))
        raise ConfigError(field="the test's end")

    with started_with(signal.SIG_DFL, *numbers), pytest.raises(ConfigError):
        trained_by_the_second(monkeypatch, tmp_path, lambda *_: SimpleNamespace(model=None), trainer)
    assert found == [signal.SIG_IGN] * 3


def test_a_signal_ends_the_wait_of_another_trainer_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def build_policy(_: object, check_stop: Callable[[], None], __: object) -> None:
        signal.raise_signal(signal.SIGTERM)
        check_stop()

    with pytest.raises(StoppedError):
        trained_by_the_second(monkeypatch, tmp_path, build_policy, lambda: None)


# the watch over a step --------------------------------------------------------------------------------------


class Seen:
    """What the watch did."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.events: list[str] = []
        self.dumped = threading.Event()
        self.ended = threading.Event()
        monkeypatch.setattr(signals, "all_stacks", self.dump)
        monkeypatch.setattr(signals.os, "_exit", self.end)

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


def test_watch_leaves_steps_alone(seen: Seen) -> None:
    watch = seen.watch(600.0, grace=600.0)
    for step in range(3):
        with watch.over(f"step {step}"):
            watch.check()
    assert not seen.events

    watch = StepWatch(0.0)
    with watch.over("step 1"):
        assert "step watch" not in [thread.name for thread in threading.enumerate()]


def test_time_in_which_a_process_was_stopped_does_not_count(monkeypatch: pytest.MonkeyPatch, seen: Seen) -> None:
    now = [100.0]
    monkeypatch.setattr(signals.time, "monotonic", lambda: now[0])
    clock = signals.RunningTime()
    began = clock()
    for seconds, counted in ((1, 1), (5, 6), (1000, 11), (2, 13)):  # of a gap 5 s at most
        now[0] += seconds
        assert clock() - began == counted
    monkeypatch.setattr(signals, "running_time", clock)
    monkeypatch.setattr(signals, "LOOK_SECONDS", 0.01)
    looks = threading.Semaphore(0)

    class Ended(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            looks.release()
            return super().wait(timeout)

    monkeypatch.setattr(signals.threading, "Event", Ended)
    with seen.watch(600.0, grace=600.0).over("step 7"):
        for _ in range(3):
            assert looks.acquire(timeout=60)
        now[0] += 100_000  # SIGSTOP, and a day later SIGCONT
        for _ in range(3):
            assert looks.acquire(timeout=60)
    assert not seen.events


def test_a_clock_that_reads_itself_counts_the_time_of_a_long_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """By itself, and with it the limits of a process that waits for one answer for long."""
    readings: list[float] = []
    others = {*threading.enumerate()} - {threading.current_thread()}  # the module's own clock may read the time too

    def monotonic() -> float:
        if threading.current_thread() not in others:
            readings.append(4.0)  # less than a gap that does not count
        return sum(readings)

    monkeypatch.setattr(signals, "READ_SECONDS", 0.01)
    monkeypatch.setattr(signals, "time", SimpleNamespace(monotonic=monotonic))
    clock = signals.RunningTime(reads_itself=True)
    began, until = clock(), time.monotonic() + 60
    while len(readings) < 20:
        assert time.monotonic() < until
        time.sleep(0.01)
    assert clock() - began >= 4.0 * 18


HANGS = """
import logging, threading
from grpo_trainer.signals import StepWatch
logging.basicConfig()
def hangs_here(): threading.Event().wait()
with StepWatch(0.2, grace=0.2).over("step 3"): hangs_here()
"""


def test_a_process_that_hangs_ends_with_its_stacks_in_the_log() -> None:
    done = subprocess.run(
        [sys.executable, "-c", HANGS], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 124
    assert done.stderr.count("ERROR:grpo_trainer.signals:step 3 ") == 2 and "hangs_here" in done.stderr
    assert "--resume auto" in done.stderr


# phases of a start ---------------------------------------------------------------------------------------------------


def clock(*times: float) -> Callable[[], float]:
    """Says the times that it is given, one after the other."""
    return partial(next, iter(times))


def test_each_second_is_in_one_phase() -> None:
    counted = Phases(clock(14, 20, 21, 25, 31))
    counted.begin("command", 10)
    counted.enter("imports", at=11.5)
    counted.enter("model")  # at 14
    counted.enter("compile")  # at 20
    with counted.of("server"):  # from 21 to 25
        pass
    # command 10 to 11.5, imports to 14, model to 20, compile to 21 and from 25 to 31, server between
    assert counted.end() == {"command": 1.5, "imports": 2.5, "model": 6, "compile": 1 + 6, "server": 4}
    assert counted.end() is None


def test_the_present_phase_is_what_the_trainer_waits_for() -> None:
    counted = Phases(clock(14, 20))
    assert counted.waits() == []
    counted.begin("imports", 10)
    assert counted.waits() == [Wait("trainer", IN_WORDS["imports"], 4.0)]  # from 10 to 14
    counted.end()
    assert counted.waits() == []


def test_what_a_start_took_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = Phases(clock(4, 9))
    monkeypatch.setattr(phases, "START", counted)
    said: list[str] = []
    report_start(said.append)
    assert not said, "nothing has begun"
    counted.begin("imports", 1)
    counted.enter(FIRST_STEP)
    report_start(said.append)
    report_start(said.append)
    (line,) = said
    assert all(part in line for part in ("8.0 s", "imports 3.0", f"{FIRST_STEP} 5.0"))


def test_a_process_knows_when_it_was_started() -> None:
    assert phases.process_start() == pytest.approx(psutil.Process().create_time(), abs=10)


# compilers' caches -------------------------------------------------------------------------------------------


def test_compile_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    made = compile_caches({"TRITON_CACHE_DIR": "/mine", "VLLM_CACHE_ROOT": ""})
    assert made == {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor"), "VLLM_CACHE_ROOT": str(tmp_path / "vllm")}

    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "not" / "there"))
    assert compile_caches({})
    monkeypatch.setattr(os, "access", lambda path, how: how == os.F_OK and Path(path).exists())  # root may write all
    assert compile_caches({}) == {}
