"""What ends a process early. SIGINT, SIGTERM and SIGHUP: delayed to the next safe point, or raised at once. A step that
hangs, so that it does not occupy a machine for ever. And a clock for limits of time, `running_time`, that stops with
the process.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass
from types import FrameType

from grpo_common.text import Lines
from grpo_trainer.errors import HungError, StoppedError

log = logging.getLogger(__name__)

ONCE_SECONDS = 1.0
"""Signals that arrive within this time count once. A closed terminal and `timeout` send theirs twice. The kernel sends
SIGTERM for each thread of a parent that is killed."""


READ_SECONDS = 1.0
"""Between two readings of `running_time` by its own thread."""
LONGEST_GAP_SECONDS = 5.0
"""What `running_time` counts, at most, of the time between two readings: of a stop no more than this. Where code holds
the interpreter for longer, time without a stop is left out, too: a limit is then longer than was asked for."""


class RunningTime:
    """A clock, in seconds, that stops `LONGEST_GAP_SECONDS` after it was read, until it is read again: so it stops
    while this process is stopped, by SIGSTOP, as a suspended job, or in a paused container. The system's own clock
    stops only while the machine sleeps. If it reads itself, a thread does so from its first reading on.
    """

    def __init__(self, *, reads_itself: bool = False) -> None:
        self._lock, self._read, self._stopped = threading.Lock(), time.monotonic(), 0.0
        self._has_no_thread = reads_itself

    def _read_on(self, sleep: Callable[[float], None] = time.sleep) -> None:
        while True:
            sleep(READ_SECONDS)
            self()

    def __call__(self) -> float:
        with self._lock:
            if self._has_no_thread:
                self._has_no_thread = False
                threading.Thread(target=self._read_on, name="running time", daemon=True).start()
            now = time.monotonic()
            self._stopped += max(0.0, now - self._read - LONGEST_GAP_SECONDS)
            self._read = now
            return now - self._stopped


running_time = RunningTime(reads_itself=True)


class Arrivals:
    """The signals that have arrived. A second one means that the first is not to be waited for."""

    def __init__(self) -> None:
        self.numbers: list[int] = []
        self._newest = 0.0

    def add(self, number: int) -> bool:
        """Add a signal; return whether it counts."""
        now = time.monotonic()
        if self.numbers and now - self._newest < ONCE_SECONDS:
            return False
        self.numbers.append(number)
        self._newest = now
        return True

    def check(self) -> None:
        """Raise the first signal, if one arrived, as a `StoppedError` with its exit code."""
        if self.numbers:
            raise StoppedError(self.numbers[0])


def ending_signals() -> tuple[signal.Signals, ...]:
    """Return the signals that end a command in order. A closed terminal ends none that `nohup` started."""
    has_terminal = signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN
    return (signal.SIGINT, signal.SIGTERM, *((signal.SIGHUP,) if has_terminal else ()))


@contextmanager
def stopped_at_once() -> Iterator[None]:
    """In the block, raise a signal at once as a `StoppedError`, even if a shell made this process ignore SIGINT (as for
    `command &`)."""
    arrived = Arrivals()

    def interrupt(number: int, _: FrameType | None) -> None:
        if arrived.add(number):
            raise KeyboardInterrupt  # unlike an `Exception`, it is caught by nothing on its way

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    except KeyboardInterrupt:
        arrived.check()
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class StopSignal:
    """While active, `check` raises the first signal as an error; a second signal interrupts at once."""

    def __init__(self) -> None:
        self._arrived, self._parent = Arrivals(), os.getppid()
        self._before: dict[int, signal._HANDLER] = {}
        self._watched: list[Callable[[], None]] = []
        self._over = threading.Event()

    def __enter__(self) -> StopSignal:
        for number in ending_signals():
            self._before[number] = signal.signal(number, self._remember)
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _remember(self, number: int, _: FrameType | None) -> None:
        if number == signal.SIGTERM and os.getppid() != self._parent:  # the kernel's, as the parent has ended
            self._parent = os.getppid()
            if self._arrived.numbers:  # nobody is impatient
                return
        if self._arrived.add(number) and len(self._arrived.numbers) > 1:
            raise KeyboardInterrupt

    def ignore(self, *, is_supervised: bool) -> None:
        """Ignore these signals from now on: rank 0 gets them, too, and needs this process to save.

        Where a supervisor has ended, rank 0 may be gone without a sign, with its machine. So this process ends then,
        but leaves time to save. The end of a shell means nothing.
        """
        for number in self._before:
            signal.signal(number, signal.SIG_IGN)
        if not is_supervised:
            return
        threading.Thread(target=self._end_orphan, name="orphan watch", daemon=True).start()

    def _end_orphan(self) -> None:
        while os.getppid() == self._parent:
            if self._over.wait(LOOK_SECONDS):
                return
        if StepWatch._ends(self._over, ORPHAN_SECONDS):
            return
        log.error("the process that started this one has ended, and rank 0 does not end the run: this process ends")
        os._exit(os.EX_TEMPFAIL)

    def watch(self, check: Callable[[], None]) -> None:
        """Make `check` also call this function."""
        self._watched.append(check)

    def check(self) -> None:
        """Raise the first signal that came as a `StoppedError` with its exit code, or what a watched check raises."""
        self._arrived.check()
        for check in self._watched:
            check()


# a step that hangs --------------------------------------------------------------------------------------------


GRACE_SECONDS = 60.0
"""Time between the first report and the end of the process."""
LOOK_SECONDS = 1.0
"""Between two looks at the clock."""
ORPHAN_SECONDS = 600.0
"""Time to save for a process whose parent has ended."""


def all_stacks() -> Lines:
    """Return the stacks of all threads, the main thread's first, each with its innermost call first."""
    frames = sys._current_frames()
    parts: list[str] = []
    for thread in sorted(threading.enumerate(), key=lambda thread: thread is not threading.main_thread()):
        calls = traceback.extract_stack(frames[thread.ident]) if thread.ident in frames else []
        parts += [f"thread {thread.name}, most recent call first:"]
        parts += [f'  File "{call.filename}", line {call.lineno}, in {call.name}' for call in reversed(calls)]
    return Lines("\n".join(parts))


@dataclass(eq=False, repr=False)
class StepWatch:
    """Limits the time of one block at a time, each from its own thread.

    After the time it writes the stacks of all threads to the log, and makes the run end at its next safe point, with a
    checkpoint. If the block does not reach one, it ends the process: the last checkpoint is complete, and the rollout
    API serves the batches since that checkpoint again.
    """

    seconds: float
    """Time limit of a block; 0: no limit."""
    last_words: Callable[[float], object] = lambda seconds: None
    """Called before the process ends, with its own time limit in seconds."""
    _: KW_ONLY
    grace: float = GRACE_SECONDS
    """Seconds between the first report and the end of the process."""
    _expired: str | None = None

    @contextmanager
    def over(self, what: str) -> Iterator[None]:
        """Limit the time of the block."""
        if not self.seconds:
            yield
            return
        ended = threading.Event()
        watching = threading.Thread(target=self._watch, args=(what, ended), name="step watch", daemon=True)
        watching.start()
        try:
            yield
        finally:
            ended.set()
            watching.join()  # it ends now, or is about to end the process
            self._expired = None

    def check(self) -> None:
        """Raise a `HungError` if the block has exceeded its time limit; the block calls this at its safe points."""
        if self._expired is not None:
            raise HungError(
                field=self._expired,
                got=f"more than {self.seconds:.0f} s",
                wanted="at most --step-timeout",
                fix="see the stacks of all threads above",
            )

    @staticmethod
    def _ends(ended: threading.Event, seconds: float) -> bool:
        """Return whether the block ends within the time, counted by `running_time`."""
        until = running_time() + seconds
        while (left := until - running_time()) > 0:
            if ended.wait(min(left, LOOK_SECONDS)):
                return True
        return ended.is_set()

    def _watch(self, what: str, ended: threading.Event) -> None:
        if self._ends(ended, self.seconds):
            return
        text = "%s has not ended for %.0f s; the stacks of all threads:\n%s"
        log.error(text, what, self.seconds, all_stacks())
        self._expired = what
        if self._ends(ended, self.grace):
            return
        log.error(
            "%s does not end: this process ends without a new checkpoint. --resume auto continues from the last one",
            what,
        )
        try:
            self.last_words(self.grace)
        finally:
            os._exit(HungError.exit_code)
