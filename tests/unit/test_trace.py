"""The timeline of a run: what is recorded, what the report makes of it."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from grpo_common import trace
from grpo_trainer.report.timeline import Interval, covered, intervals, lanes, last_steps, sentence
from tests.trace_format import check_format


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A timeline that this process records."""
    path = tmp_path / "trace.json"
    monkeypatch.setenv(trace.FILE_VARIABLE, str(path))
    monkeypatch.setenv(trace.NAME_VARIABLE, "a test")
    trace._recorder.cache_clear()
    trace.begin_file(path)
    yield path
    trace._recorder.cache_clear()


def recorded(path: Path) -> list[dict[str, Any]]:
    recorder = trace._recorder()
    assert recorder is not None
    recorder.flush()
    events, unreadable = trace.read_events(path)
    assert not unreadable
    return events


def test_without_the_variable_nothing_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(trace.FILE_VARIABLE, raising=False)
    trace._recorder.cache_clear()
    with trace.stage("wait"):
        pass
    assert trace._recorder() is None and not list(tmp_path.iterdir())


def test_a_stage_of_a_thread_and_one_of_a_lane(file: Path) -> None:
    with trace.stage("wait", step=1):
        pass
    with trace.lane("group 1"), trace.lane("conversation 2"), trace.stage("generate", completions=8) as found:
        found["version"] = 3
    name, wait, begin, end = recorded(file)
    assert name["args"] == {"name": "a test"}
    assert (wait["ph"], wait["args"]) == ("X", {"step": 1})
    assert (begin["ph"], begin["args"], end["ph"]) == ("b", {"completions": 8, "version": 3}, "e")
    assert begin["id2"] == end["id2"] == {"local": "group 1, conversation 2"}
    assert begin["ts"] <= end["ts"]


def test_a_stage_that_fails_is_recorded(file: Path) -> None:
    with pytest.raises(ZeroDivisionError), trace.stage("score"):
        _ = 1 / 0
    assert [event["name"] for event in recorded(file)] == ["process_name", "score"]


def test_tasks_keep_their_lanes_apart(file: Path) -> None:
    async def collect(number: int) -> None:
        with trace.lane(f"group {number}"), trace.stage("generate"):
            await asyncio.sleep(0)

    async def both() -> None:
        await asyncio.gather(collect(1), collect(2))

    asyncio.run(both())
    events = recorded(file)
    check_format(events)
    assert {event["id2"]["local"] for event in events if event["ph"] == "b"} == {"group 1", "group 2"}


def test_a_child_writes_its_own_events_only(file: Path) -> None:
    with trace.stage("wait"):
        pass
    if (child := os.fork()) == 0:
        with trace.stage("save"):
            pass
        recorded(file)
        os._exit(0)
    os.waitpid(child, 0)
    names = [(event["pid"] == child, event["name"]) for event in recorded(file)]
    assert sorted(names) == [(False, "process_name"), (False, "wait"), (True, "process_name"), (True, "save")]


def test_the_closed_file_is_json_and_the_open_one_is_read(file: Path) -> None:
    with trace.stage("wait"):
        pass
    before = recorded(file)
    with file.open("a") as stream:
        stream.write('{"ph":"X","na')  # a process was killed in the middle of a line
    assert trace.read_events(file) == (before, 0)
    trace.begin_file(file)
    trace.end_file(file)
    check_format(json.loads(file.read_text()))


STEPS = [
    *(Interval("wait", 0.0, 6.0), Interval("forward_backward", 6.0, 9.0), Interval("publish", 9.0, 10.0)),
    *(Interval("generate", 0.0, 3.0), Interval("generate", 2.0, 4.0), Interval("score", 4.0, 4.5)),
]


def test_what_the_run_waits_for_most() -> None:
    said = sentence(STEPS)
    assert "60%" in said and "67%" in said and "generated" in said  # 6 of 10 s; 4 of these 6
    busy = [Interval("wait", 0.0, 1.0), Interval("forward_backward", 1.0, 5.0), *STEPS[3:]]
    assert "80%" in sentence(busy) and "forward_backward" in sentence(busy)
    assert "%" not in sentence([])


def test_time_covered_counts_overlaps_once() -> None:
    within = [Interval("wait", 0.0, 6.0), Interval("wait", 8.0, 9.0)]
    assert covered([Interval("g", 1.0, 3.0), Interval("g", 2.0, 4.0), Interval("g", 5.0, 8.5)], within) == 4.5
    assert covered([], within) == 0.0


def test_the_lanes_of_the_last_steps() -> None:
    waits = [Interval("wait", float(start), start + 0.5) for start in range(5)]
    assert last_steps(waits, 3) == (2.0, 4.5) and last_steps(waits[:1], 3) == (0.0, 0.5) and last_steps([]) is None
    drawn = lanes(STEPS, (0.0, 10.0))
    assert drawn.count("<rect") == 6 and drawn.index("generate (") < drawn.index("wait (")
    assert lanes(STEPS, (6.0, 10.0)).count("<rect") == 2


def test_a_stage_that_never_ended_is_left_out() -> None:
    event = {"pid": 1, "name": "generate", "id2": {"local": "group 1"}, "ts": 1_000_000}
    assert intervals([{**event, "ph": "b"}]) == []
    ended = intervals([{**event, "ph": "b"}, {**event, "ph": "e", "ts": 1_500_000}])
    assert ended == [Interval("generate", 1.0, 1.5)]
