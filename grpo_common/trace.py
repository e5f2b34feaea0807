"""Timeline of a run: what each process did and when, for Perfetto and `chrome://tracing`.

All processes of a run append to one file in Chrome's trace event format, one event a line. Times are those of the
system's monotonic clock, which all processes of a machine share. Without the variable GRPO_TRACE, nothing is recorded.

Source: "Trace Event Format", the JSON array format, whose closing bracket is optional.
"""

import atexit
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
FLUSH_SECONDS, FLUSH_BYTES = 1.0, 1 << 16
"""Events stay in memory for this many seconds, or until they have this many bytes."""

_lane: ContextVar[str | None] = ContextVar("lane", default=None)


class Recorder:
    """Append this process's events to the file. A forked child process gets a separate lane."""

    def __init__(self, path: Path, name: str) -> None:
        """Write nothing before the first event; `name` is the name of this process in the timeline."""
        self._path = path
        self._name = name
        self._lock = threading.Lock()
        self._lines: list[str] = []
        self._bytes = 0
        self._flushed_at = time.monotonic()
        self._pid = -1
        self._failed = False

    def add(self, event: dict[str, Any]) -> None:
        """Record an event; add its process and thread."""
        with self._lock:
            if self._pid != os.getpid():
                self._begin()
            self._append({"pid": self._pid, "tid": threading.get_native_id(), "cat": "grpo", **event})
            if self._bytes >= FLUSH_BYTES or time.monotonic() - self._flushed_at >= FLUSH_SECONDS:
                self._flush()

    def flush(self) -> None:
        """Write the events that are still in memory."""
        with self._lock:
            self._flush()

    def _begin(self) -> None:
        self._pid, self._lines, self._bytes = os.getpid(), [], 0
        atexit.register(self.flush)
        self._append({"ph": "M", "pid": self._pid, "name": "process_name", "args": {"name": self._name}})

    def _append(self, event: dict[str, Any]) -> None:
        line = json.dumps(event, separators=(",", ":")) + ",\n"
        self._lines.append(line)
        self._bytes += len(line)

    def _flush(self) -> None:
        """Append in one call, so that lines of several processes do not mix. Drop events that cannot be written."""
        self._flushed_at = time.monotonic()
        if not self._lines or self._pid != os.getpid():
            return
        text, self._lines, self._bytes = "".join(self._lines), [], 0
        try:
            descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
            try:
                os.write(descriptor, text.encode())
            finally:
                os.close(descriptor)
        except OSError as error:
            if not self._failed:
                self._failed = True
                log.warning("the timeline has gaps: %s", error)


@cache
def _recorder() -> Recorder | None:
    """Return this process's recorder, or None without GRPO_TRACE.

    It is created with the first stage: a process may be forked before its environment is set.
    """
    path = os.environ.get(FILE_VARIABLE)
    return Recorder(Path(path), os.environ.get(NAME_VARIABLE, "process")) if path else None


def recording() -> bool:
    """Return whether this process records a timeline."""
    return _recorder() is not None


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

    Args:
        arguments: shown with the stage; the block may add more to the dictionary that it receives.
    """
    if not recording():
        yield arguments
        return
    started = time.monotonic()
    try:
        yield arguments
    finally:
        since(name, started, lane=_lane.get(), **arguments)


def since(name: str, started: float, lane: str | None = None, **arguments: Any) -> None:
    """Record a stage that began at `started` (seconds of the monotonic clock) and ends now.

    Args:
        lane: where the stage is shown; stages of one lane do not overlap. None: the lane of this thread.
    """
    recorder = _recorder()
    if recorder is None:
        return
    begin, end = round(started * 1e6), round(time.monotonic() * 1e6)
    if lane is None:
        recorder.add({"name": name, "ph": "X", "ts": begin, "dur": end - begin, "args": arguments})
    else:
        recorder.add({"name": name, "ph": "b", "id2": {"local": lane}, "ts": begin, "args": arguments})
        recorder.add({"name": name, "ph": "e", "id2": {"local": lane}, "ts": end})


def begin_file(path: Path) -> None:
    """Start a new timeline: an empty list of events.

    Raises:
        OSError: the file cannot be written.
    """
    path.write_text("[\n")


def end_file(path: Path) -> None:
    """Close the list, which makes the file valid JSON. Do nothing if the file was deleted."""
    with suppress(FileNotFoundError), path.open("r+") as file:
        file.seek(0, os.SEEK_END)
        file.write('{"ph":"M","pid":0,"name":"process_sort_index","args":{"sort_index":0}}\n]\n')
