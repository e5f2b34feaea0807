"""Timeline of a run: what each process did and when, for Perfetto and `chrome://tracing`.

All processes of a run append to one file in Chrome's trace event format, one event a line. Times are those of the
system's monotonic clock, which all processes of a machine share. Without the variable GRPO_TRACE, nothing is recorded.

Source: "Trace Event Format", the JSON array format, whose closing bracket is optional.
"""

import json
import logging
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import cache
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)

FILE_VARIABLE, NAME_VARIABLE = "GRPO_TRACE", "GRPO_TRACE_NAME"
"""Environment variables: the file that processes append to, and the name of a process in the timeline."""

_lane: ContextVar[str | None] = ContextVar("lane", default=None)


def _timeline() -> int | None:
    """Return the descriptor of the file, which has the name of this process then; None: nothing is recorded."""
    if not (path := os.environ.get(FILE_VARIABLE)):
        return None
    try:
        return _opened(path, os.getpid())
    except OSError as error:  # which is not cached
        _say_gap(str(error))
        return None


@cache
def _opened(path: str, pid: int) -> int:
    """Return the descriptor of this process; a forked child has a separate lane."""
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
    name = os.environ.get(NAME_VARIABLE, "process")
    _write(descriptor, {"ph": "M", "pid": pid, "name": "process_name", "args": {"name": name}})
    return descriptor


def _write(descriptor: int, *events: dict[str, Any]) -> None:
    """Append events in one call, so that lines of several processes do not mix. Drop those that cannot be written."""
    text = "".join(json.dumps(event, separators=(",", ":")) + ",\n" for event in events)
    try:
        os.write(descriptor, text.encode())
    except OSError as error:
        _say_gap(str(error))


@cache
def _say_gap(why: str) -> None:
    log.warning("the timeline has gaps: %s", why)


@contextmanager
def lane(name: str) -> Iterator[None]:
    """Put stages of the block into a lane of this name: asyncio tasks share a thread, so their stages overlap."""
    outer = _lane.get()
    token = _lane.set(f"{outer}, {name}" if outer else name)
    try:
        yield
    finally:
        _lane.reset(token)


@contextmanager
def stage(name: str, **arguments: Any) -> Iterator[dict[str, Any]]:
    """Record how long the block takes.

    The arguments are shown with the stage; the block may add to the dictionary that it receives.
    """
    if _timeline() is None:
        yield arguments
        return
    started = time.monotonic()
    try:
        yield arguments
    finally:
        since(name, started, lane=_lane.get(), **arguments)


def since(name: str, started: float, lane: str | None = None, **arguments: Any) -> None:
    """Record a stage that began at `started` (seconds of the monotonic clock) and ends now.

    `lane` is where the stage is shown; stages of one lane do not overlap. None: the lane of this thread.
    """
    if (timeline := _timeline()) is None:
        return
    begin, end = round(started * 1e6), round(time.monotonic() * 1e6)
    event = {"pid": os.getpid(), "tid": threading.get_native_id(), "cat": "grpo", "name": name}
    if lane is None:
        _write(timeline, {**event, "ph": "X", "ts": begin, "dur": end - begin, "args": arguments})
    else:
        event["id2"] = {"local": lane}
        _write(timeline, {**event, "ph": "b", "ts": begin, "args": arguments}, {**event, "ph": "e", "ts": end})


def begin_file(path: Path) -> None:
    """Start a new timeline: an empty list of events. Raise an OSError if the file can't be written."""
    path.write_text("[\n")


def end_file(path: Path) -> None:
    """Close the list, which makes the file valid JSON. Do nothing if the file was deleted."""
    with suppress(FileNotFoundError), path.open("r+") as file:
        file.seek(0, os.SEEK_END)
        file.write('{"ph":"M","pid":0,"name":"process_sort_index","args":{"sort_index":0}}\n]\n')
