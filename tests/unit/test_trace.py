"""The timeline of a run: what is recorded."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from grpo_common import trace
from tests.runs import check_format


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A timeline that this process records."""
    path = tmp_path / "trace.json"
    monkeypatch.setenv(trace.FILE_VARIABLE, str(path))
    monkeypatch.setenv(trace.NAME_VARIABLE, "a test")
    trace.begin_file(path)
    yield path


def recorded(path: Path) -> list[dict[str, Any]]:
    lines = [line.removesuffix(",") for line in path.read_text().splitlines()]
    return [json.loads(line) for line in lines if line not in ("", "[", "]")]


def test_without_the_variable_nothing_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(trace.FILE_VARIABLE, raising=False)
    with trace.stage("wait"):
        pass
    assert trace._timeline() is None and not list(tmp_path.iterdir())


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
    with pytest.raises(ZeroDivisionError), trace.stage("score"):
        _ = 1 / 0
    assert recorded(file)[-1]["name"] == "score", "also of a stage that fails"


async def test_tasks_keep_their_lanes_apart(file: Path) -> None:
    async def collect(number: int) -> None:
        with trace.lane(f"group {number}"), trace.stage("generate"):
            await asyncio.sleep(0)

    await asyncio.gather(collect(1), collect(2))
    events = recorded(file)
    check_format(events)
    assert {event["id2"]["local"] for event in events if event["ph"] == "b"} == {"group 1", "group 2"}
    trace.end_file(file)
    check_format(json.loads(file.read_text()))  # the closed file is JSON


def test_a_child_writes_its_own_events_only(file: Path) -> None:
    with trace.stage("wait"):
        pass
    if (child := os.fork()) == 0:
        with trace.stage("save"):
            pass
        os._exit(0)
    os.waitpid(child, 0)
    names = [(event["pid"] == child, event["name"]) for event in recorded(file)]
    assert sorted(names) == [(False, "process_name"), (False, "wait"), (True, "process_name"), (True, "save")]
