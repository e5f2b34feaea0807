"""Watch groups while they are scored, so that scoring that never ends does not block a run silently.

The watch is a thread, because code that blocks the event loop also blocks the time-outs of asyncio. After `REPORT_S`
the thread logs the stack of the code. After `--env.score_timeout` it gives up the group:

    a coroutine, a thread or a process is awaited    its task is cancelled; the thread is left behind
    the code blocks the event loop                   a signal to the main thread raises the error inside that code
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import reprlib
import signal
import threading
from collections.abc import Awaitable
from contextvars import ContextVar
from types import FrameType
from typing import Any, TypeVar

from environments import stacks
from environments.threads import CLOCK, Clock, run
from grpo_common.errors import UserError
from grpo_common.text import Lines

log = logging.getLogger(__name__)

REPORT_S = 30.0
"""Seconds of scoring after which the log shows the stack of the code."""
MOVES_S = 1.0
"""Seconds without a callback after which the event loop counts as blocked."""
LEAST_PAUSE_S = 0.01
"""Shortest wait: a group's clock may stand still just before a mark."""
LOOK_AGAIN_S = 1.0
"""Seconds between two attempts to interrupt code that blocks the event loop."""
UNBLOCK = (
    "make `score` a plain function, which runs in a thread (score_in_thread), or await self.threads.call(function, …)"
)

T = TypeVar("T")
_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 200


class ScoreTimeout(UserError, TimeoutError):
    """Scoring a group took longer than `--env.score_timeout`."""


class _Scored:
    """The scoring of one group.

    Attributes:
        thread: ident of the thread of its event loop.
        clock: its age, and the threads that work for it.
        given_up: its task was cancelled.
        over: it has ended, with or without a result.
    """

    def __init__(self, item: object, seconds: float, limit: asyncio.Timeout) -> None:
        self.seconds = seconds
        self.loop = asyncio.get_running_loop()
        self.task: asyncio.Task[Any] | None = asyncio.current_task()
        self.thread = threading.get_ident()
        self.clock = Clock()
        self.given_up = self.over = False
        self._item = item
        self._limit = limit

    @property
    def age(self) -> float:
        """Return the seconds that it has taken, without those in which it waited for a thread or a judge."""
        return self.clock.seconds

    def error(self) -> ScoreTimeout:
        """Return the error for a group that is given up."""
        return ScoreTimeout(
            "scoring is given up",
            field="--env.score_timeout",
            got=f"{self.age:.0f} s for {self}",
            wanted=f"at most {self.seconds:g} s",
            fix="see the stack of the code in the log; raise the time-out if scoring needs that long",
        )

    def __str__(self) -> str:
        return _SHORT.repr(self._item)

    def expire(self) -> None:
        """Cancel the task; called in its event loop."""
        if not self.over:
            self._limit.reschedule(self.loop.time())


_CURRENT: ContextVar[_Scored | None] = ContextVar("scored", default=None)


class Scoring:
    """The groups of one environment that are being scored.

    Args:
        seconds: time limit of scoring a group.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._under_way: dict[int, _Scored] = {}  # in order of their start
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._reported = False
        self._blocked_for: _Scored | None = None
        self._last_stack = ""

    async def within(self, item: object, work: Awaitable[T]) -> T:
        """Return the result of `work`, which scores an item's group.

        Raises:
            ScoreTimeout: it took too long, and the group is given up.
        """
        limit = asyncio.timeout(None)
        scored = _Scored(item, self._seconds, limit)
        tokens = _CURRENT.set(scored), CLOCK.set(scored.clock)
        try:
            async with limit:
                self._enter(scored)
                result = await work
        except TimeoutError:
            if limit.expired():
                raise scored.error() from None
            raise
        finally:
            self._leave(scored)
            _CURRENT.reset(tokens[0])
            CLOCK.reset(tokens[1])
        self._reported = False
        return result

    def _enter(self, scored: _Scored) -> None:
        with self._changed:
            if self._thread is None:
                self._thread = threading.Thread(target=self._watch, name="scoring watch", daemon=True)
                self._thread.start()
            if all(each.given_up for each in self._under_way.values()):  # else it wakes for an older group first
                self._changed.notify()
            self._under_way[id(scored)] = scored

    def _leave(self, scored: _Scored) -> None:
        scored.over = True
        with self._changed:
            self._under_way.pop(id(scored), None)

    def _watch(self) -> None:
        while True:
            with self._changed:
                self._changed.wait(self._pause())
                under_way = list(self._under_way.values())
            late = [scored for scored in under_way if scored.age >= min(REPORT_S, self._seconds)]
            late.sort(key=lambda scored: -scored.age)
            if late:
                with contextlib.suppress(RuntimeError):  # the event loop has closed, so no task waits for a result
                    self._look(late)

    def _pause(self) -> float | None:
        """Return the seconds until the oldest group must be checked; None if no group is being scored."""
        if not self._under_way:
            return None
        age = max((each.age for each in self._under_way.values() if not each.given_up), default=self._seconds)
        marks = (min(REPORT_S, self._seconds), self._seconds)
        pause = min((mark - age for mark in marks if mark > age), default=LOOK_AGAIN_S)
        return max(pause, LEAST_PAUSE_S)

    def _look(self, late: list[_Scored]) -> None:
        """Report late groups, and give up those whose time is up."""
        moves = _moves(late[0].loop)
        overdue = [scored for scored in late if scored.age >= self._seconds]
        if not overdue and not self._reported:
            self._report(late, moves)
        if not moves and overdue:  # the others may finish when the loop runs again
            self._interrupt(overdue[0])
            return
        for scored in overdue:
            if not scored.given_up:
                scored.given_up = True
                form = "the group of %s is given up after %.0f s of scoring; stack of its code:"
                self._say(form, scored, scored.age, stack=_where(scored))
                scored.loop.call_soon_threadsafe(scored.expire)

    def _report(self, late: list[_Scored], moves: bool) -> None:
        self._reported = True
        oldest, count, seconds = late[0], len(late), late[-1].age
        if moves:
            form = "scoring %d groups has taken %.0f s or more so far, the oldest is that of %s; stack of its code:"
            self._say(form, count, seconds, oldest, stack=_where(oldest))
        else:
            self._say_blocked(oldest)

    def _interrupt(self, scored: _Scored) -> None:
        """Raise the error in the code that blocks the event loop, if that code scores a group whose time is up."""
        if self._blocked_for is not scored:
            self._blocked_for = scored
            self._say_blocked(scored)
        if scored.thread == threading.main_thread().ident and signal.getsignal(signal.SIGUSR1) is _raise:
            signal.pthread_kill(scored.thread, signal.SIGUSR1)

    def _say_blocked(self, oldest: _Scored) -> None:
        form = "the event loop is blocked, and scoring the group of %s has taken %.0f s so far; %s. Stack of the loop:"
        blocking = stacks.of_thread(oldest.thread, Scoring.within.__code__)
        self._say(form, oldest, oldest.age, UNBLOCK, stack=blocking)

    def _say(self, form: str, *values: object, stack: str) -> None:
        """Log a warning that ends with a stack, or with a note that the stack is the same as in the last warning."""
        known, self._last_stack = stack == self._last_stack, stack
        log.warning(f"{form}\n%s", *values, Lines("  (the same stack as before)" if known else stack))


def allow_interrupts() -> None:
    """Let a `Scoring` interrupt code that blocks the main thread's event loop. This takes over SIGUSR1."""
    signal.signal(signal.SIGUSR1, _raise)


def _raise(number: int, frame: FrameType | None) -> None:
    """Raise in the main thread's current code if that code scores a group whose time is up."""
    scored = _CURRENT.get()
    if scored is not None and not scored.over and scored.age >= scored.seconds:
        raise scored.error()


def _moves(loop: asyncio.AbstractEventLoop) -> bool:
    """Return whether an event loop still runs its callbacks."""
    called = threading.Event()
    loop.call_soon_threadsafe(called.set)
    return called.wait(MOVES_S)


def _where(scored: _Scored) -> str:
    """Return the stacks of the threads that work for a group; without such threads, that of its task."""
    found = filter(None, (stacks.of_thread(ident, run.__code__) for ident in tuple(scored.clock.workers)))
    task = "" if scored.task is None else stacks.of_task(scored.task, Scoring.within.__code__)
    return "\n".join(found) or task
