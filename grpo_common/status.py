"""What a process of `grpo run` says of itself: `RUN_DIR/status/NAME.json`, which the supervisor reads.

Trainers and environments write it: the phase of a trainer's start, what a trainer lacks, and notices: log records that
the user should see at once. The supervisor shows notices and decides by the rest. Logs are for people.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from contextlib import suppress
from pathlib import Path

import msgspec

from grpo_common.text import PrintableFormatter, printable

VARIABLE = "GRPO_STATUS"
"""Environment variable with the path of this process's file."""
NOTICE = {"notice": True}
"""`extra=NOTICE` makes a log record below WARNING a notice."""
WAITS = {"waits": True}
"""`extra=WAITS` says that a record is about waiting for another process."""
TRAINED = "trained"
"""The phase of a trainer that has trained a step since its start."""
KEPT, BURST, PAUSE_SECONDS = 16, 10, 5.0
"""The file holds the last `KEPT` notices. A process writes `BURST` of them without a pause, then one each
`PAUSE_SECONDS`: an environment may warn of each sample."""
LINES, CHARACTERS, STACK_CHARACTERS = 17, 500, 200
"""Of a notice that has a stack, of its first line, and of each other line."""


class Notice(msgspec.Struct, frozen=True):
    """A message to the user."""

    number: int  # counted from 1 in each process
    text: str  # the lines after the first are a stack
    waits: bool = False  # it says that the process waits for another one
    missed: int = 0  # notices before it that were not written


class Status(msgspec.Struct, frozen=True):
    """The content of the file."""

    phase: str = ""  # of a trainer; empty: none has begun
    since: float = 0.0  # start of the phase, in Unix seconds
    lacks_batch: bool = False  # a trainer has waited for a batch for seconds, and waits still
    notices: tuple[Notice, ...] = ()  # the newest ones
    pid: int = 0
    """Of the process that wrote it: one of an earlier run may still be ending, and write the file of the same name."""
    format: int = 1


class StatusWriter(logging.Handler):
    """Writes this process's file; as a handler it takes the notices from the log. Without `open` it does nothing."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.setFormatter(PrintableFormatter("%(message)s"))
        self._path: Path | None = None
        self._status = Status()
        self._is_written = False
        self._writing = threading.RLock()
        self._left, self._at, self._missed, self._count = float(BURST), 0.0, 0, 0

    def open(self) -> None:
        """Write to the file that the environment names, if it names one; child processes write none."""
        if path := os.environ.pop(VARIABLE, ""):
            self._path, self._status = Path(path), Status(pid=os.getpid())
            logging.getLogger().addHandler(self)

    @property
    def _is_fork(self) -> bool:
        """Whether this process is a fork of the one that writes: the lock may be held for ever there."""
        return self._status.pid != os.getpid()

    def update(self, **changes: object) -> None:
        """Write fields that have changed; a new `phase` has its `since`."""
        path = self._path
        if path is None or self._is_fork:
            return
        with self._writing:
            status = msgspec.structs.replace(self._status, **changes)
            if self._is_written and status == self._status:
                return
            self._status, self._is_written = status, False
            temporary = path.with_suffix(".new")
            with suppress(OSError):  # the run does not depend on it; the next update tries again
                temporary.write_bytes(msgspec.json.encode(status))
                temporary.replace(path)
                self._is_written = True

    def emit(self, record: logging.LogRecord) -> None:
        """Take a log record, unless there are too many. A record with wrong arguments raises nothing, as in logging."""
        if self._is_fork or (record.levelno < logging.WARNING and not getattr(record, "notice", False)):
            return
        try:
            self._note(record)
        except Exception:
            self.handleError(record)

    def _note(self, record: logging.LogRecord) -> None:
        now = time.monotonic()
        with self._writing:
            self._left, self._at = min(BURST, self._left + (now - self._at) / PAUSE_SECONDS), now
            if self._left < 1:
                self._missed += 1
                return
            self._left -= 1
            missed, self._missed, self._count = self._missed, 0, self._count + 1
            record.message = record.getMessage()
            text = (self.formatter or PrintableFormatter()).formatMessage(record)
            text = f"{record.levelname} {text}" if record.levelno >= logging.WARNING else text
            first, *stack = text.split("\n")[:LINES]
            text = "\n".join([printable(first, CHARACTERS), *(printable(line, STACK_CHARACTERS) for line in stack)])
            notice = Notice(self._count, text, bool(getattr(record, "waits", False)), missed)
            self.update(notices=(*self._status.notices, notice)[-KEPT:])


OWN = StatusWriter()
"""The file of this process; a global, as the logger is."""


def parse(content: bytes) -> Status | None:
    """Return a file's content; None: it is no such file, or one of a newer version."""
    try:
        found = msgspec.json.decode(content, type=Status)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    return found if found.format == 1 else None
