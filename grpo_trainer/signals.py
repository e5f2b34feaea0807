"""SIGINT, SIGTERM and SIGHUP: delayed to the next safe point of a command, or raised at once. SIGSTOP: a clock that
stops with the process."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from grpo_trainer.errors import StoppedError

ONCE_SECONDS = 1.0
"""Signals that arrive within this time count once. A closed terminal and `timeout` send theirs twice. The kernel sends
SIGTERM for each thread of a parent that is killed."""


LONGEST_GAP_SECONDS = 5.0
"""What `running_time` counts, at most, between two readings. Processes that measure a limit read it once a second or
more often, so a longer gap means that they were stopped."""


class RunningTime:
    """A clock, in seconds, that stops while this process is stopped: by SIGSTOP, as a suspended job, or in a paused
    container. The system's own clock stops only while the machine sleeps."""

    def __init__(self) -> None:
        self._lock, self._read, self._stopped = threading.Lock(), time.monotonic(), 0.0

    def __call__(self) -> float:
        with self._lock:
            now = time.monotonic()
            self._stopped += max(0.0, now - self._read - LONGEST_GAP_SECONDS)
            self._read = now
            return now - self._stopped


running_time = RunningTime()


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
        """Raise the first signal as an error.

        Raises:
            StoppedError: a signal arrived; the error has its exit code.
        """
        if self.numbers:
            raise StoppedError(self.numbers[0])


def ending_signals() -> tuple[signal.Signals, ...]:
    """Return the signals that end a command in order. A closed terminal ends none that `nohup` started."""
    has_terminal = signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN
    return (signal.SIGINT, signal.SIGTERM, *((signal.SIGHUP,) if has_terminal else ()))


@contextmanager
def stopped_at_once() -> Iterator[None]:
    """In the block, a signal ends what runs, even if a shell made this process ignore SIGINT (as for `command &`).

    Raises:
        StoppedError: a signal arrived; the error has its exit code.
    """
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
        self._arrived = Arrivals()
        self._before: dict[int, signal._HANDLER] = {}
        self._watched: list[Callable[[], None]] = []

    def __enter__(self) -> StopSignal:
        for number in ending_signals():
            self._before[number] = signal.signal(number, self._remember)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _remember(self, number: int, _: FrameType | None) -> None:
        if self._arrived.add(number) and len(self._arrived.numbers) > 1:
            raise KeyboardInterrupt

    def ignore(self) -> None:
        """Ignore these signals from now on."""
        for number in self._before:
            signal.signal(number, signal.SIG_IGN)

    def watch(self, check: Callable[[], None]) -> None:
        """Make `check` also call this function."""
        self._watched.append(check)

    def check(self) -> None:
        """Raise an error if a signal arrived or a watched check fails.

        Raises:
            StoppedError: a signal arrived; the error has its exit code.
        """
        self._arrived.check()
        for check in self._watched:
            check()
