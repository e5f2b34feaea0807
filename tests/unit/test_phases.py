"""What a start takes, phase by phase: counted once, and shown to users."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from grpo_trainer import phases
from grpo_trainer.cache import CACHE_VARIABLE, compile_caches
from grpo_trainer.phases import FIRST_STEP, IN_WORDS, Phases, StartReport, Wait, read_report, report_at, report_start


class Clock:
    """Says the times that it is given, one after the other."""

    def __init__(self, *times: float) -> None:
        self.times = list(times)

    def __call__(self) -> float:
        return self.times.pop(0)


def test_each_second_is_in_one_phase() -> None:
    counted = Phases(Clock(14, 20, 21, 25, 31))
    counted.begin("command", 10)
    counted.enter("imports", at=11.5)
    counted.enter("model")  # at 14
    counted.enter("compile")  # at 20
    with counted.of("server"):  # from 21 to 25
        pass
    # command 10 to 11.5, imports to 14, model to 20, compile to 21 and from 25 to 31, server between
    assert counted.end() == {"command": 1.5, "imports": 2.5, "model": 6, "compile": 1 + 6, "server": 4}
    assert counted.end() is None


def test_nothing_is_counted_before_and_after() -> None:
    counted = Phases(Clock(3))
    counted.enter("model")
    with counted.of("server"):
        pass
    assert counted.end() is None
    counted.begin("imports", 1)
    assert counted.end() == {"imports": 2}
    with counted.of("server"):
        pass
    assert counted.seconds == {"imports": 2}


def test_a_phase_that_goes_on_is_one(caplog: pytest.LogCaptureFixture) -> None:
    counted = Phases(Clock(2, 7))
    counted.begin("imports", 1)
    with caplog.at_level("INFO"):
        counted.enter(FIRST_STEP)
        counted.enter(FIRST_STEP)  # of a later step: the clock is not even asked
    assert len(caplog.records) == 1
    assert counted.end() == {"imports": 1, FIRST_STEP: 5}


def test_the_present_phase_is_what_the_trainer_waits_for() -> None:
    counted = Phases(Clock(14, 20))
    assert counted.waits() == []
    counted.begin("imports", 10)
    assert counted.waits() == [Wait("trainer", IN_WORDS["imports"], 4.0)]  # from 10 to 14
    counted.end()
    assert counted.waits() == []


def test_a_wait_is_reported_early_then_ever_less_often() -> None:
    reports = [0.0]
    while reports[-1] < 250:
        reports.append(report_at(reports[-1]))
    assert reports == [0, 10, 20, 40, 80, 140, 200, 260]  # doubled, but at least every minute


def test_what_a_start_took_is_written_and_said_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counted = Phases(Clock(4, 9))
    monkeypatch.setattr(phases, "START", counted)
    said: list[str] = []
    report_start(tmp_path, said.append)
    assert not said and not list(tmp_path.iterdir()), "nothing has begun"
    counted.begin("imports", 1)
    counted.enter(FIRST_STEP)
    report_start(tmp_path, said.append)
    report_start(tmp_path, said.append)
    assert len(said) == 1
    assert read_report(tmp_path / phases.REPORT_FILE) == StartReport(8, {"imports": 3, FIRST_STEP: 5})


def test_a_report_that_cant_be_written_ends_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(phases, "START", counted := Phases())
    counted.begin("imports", 1)
    report_start(tmp_path / "not there", lambda _: None)


def test_a_process_knows_when_it_was_started() -> None:
    code = "from grpo_trainer.phases import process_start; print(process_start())"
    before = time.time()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert before - 0.1 <= float(done.stdout) <= time.time()  # the kernel counts hundredths of seconds


# the supervisor's side ---------------------------------------------------------------------------------------


def test_a_damaged_report_is_none(tmp_path: Path) -> None:
    report = tmp_path / "start.json"
    for content in ("", "{", "[]", '{"seconds": "x", "phases": {}}'):
        report.write_text(content)
        assert read_report(report) is None


# compilers' caches -------------------------------------------------------------------------------------------


def test_compilers_keep_what_they_compile_in_our_folder_unless_the_user_says_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    made = compile_caches({"TRITON_CACHE_DIR": "/mine", "VLLM_CACHE_ROOT": ""})
    assert made == {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor"), "VLLM_CACHE_ROOT": str(tmp_path / "vllm")}


def test_without_a_home_they_keep_it_where_they_like(monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("no home")

    monkeypatch.delenv(CACHE_VARIABLE)
    monkeypatch.setattr(Path, "home", homeless)
    assert compile_caches({}) == {}


def test_where_no_cache_may_be_written_they_keep_it_where_they_like(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "not" / "there"))
    assert compile_caches({})
    monkeypatch.setattr(os, "access", lambda path, how: how == os.F_OK and Path(path).exists())  # root may write all
    assert compile_caches({}) == {}
