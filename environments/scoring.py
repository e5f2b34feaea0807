"""A watch over groups that are being scored: scoring that does not end must not stop a run without a word.

A thread watches, since code that blocks the event loop stops the time-outs of asyncio, too. After `REPORT_S` the thread
writes to the log where the code is. After `--env.score_timeout` it gives the group up:

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
import time
from collections.abc import Awaitable
from contextvars import ContextVar
from types import FrameType
from typing import Any, TypeVar

from environments import stacks
from environments.threads import WORKERS, run
from grpo_common.errors import UserError

log = logging.getLogger(__name__)

REPORT_S = 30.0
"""Seconds of scoring after which the log says where the code is."""
MOVES_S = 1.0
"""Seconds without a callback after which the event loop counts as blocked."""
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
        workers: idents of the threads that work for it now.
        given_up: its task was cancelled.
        over: it has ended, one way or the other.
    """

    def __init__(self, item: object, seconds: float, limit: asyncio.Timeout) -> None:
        self.seconds = seconds
        self.loop = asyncio.get_running_loop()
        self.task: asyncio.Task[Any] | None = asyncio.current_task()
        self.thread = threading.get_ident()
        self.workers: set[int] = set()
        self.given_up = self.over = False
        self._item = item
        self._limit = limit
        self._began = time.monotonic()

    @property
    def age(self) -> float:
        """Seconds since it began."""
        return time.monotonic() - self._began

    def error(self) -> ScoreTimeout:
        """What is raised for a group that is given up."""
        return ScoreTimeout(
            "scoring is given up",
            field="--env.score_timeout",
            got=f"{self.age:.0f} s for {self}",
            wanted=f"at most {self.seconds:g} s",
            fix="the log has the stack of the code; raise the time-out where scoring takes that long",
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
        seconds: that scoring a group may take.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._under_way: dict[int, _Scored] = {}  # the oldest first
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._reported = False
        self._blocked_for: _Scored | None = None
        self._last_stack = ""

    async def within(self, item: object, work: Awaitable[T]) -> T:
        """Return what `work`, the scoring of an item's group, returns.

        Raises:
            ScoreTimeout: it took too long, and is given up.
        """
        limit = asyncio.timeout(None)
        scored = _Scored(item, self._seconds, limit)
        tokens = _CURRENT.set(scored), WORKERS.set(scored.workers)
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
            WORKERS.reset(tokens[1])
        self._reported = False
        return result

    def _enter(self, scored: _Scored) -> None:
        with self._changed:
            if self._thread is None:
                self._thread = threading.Thread(target=self._watch, name="scoring watch", daemon=True)
                self._thread.start()
            if all(each.given_up for each in self._under_way.values()):  # else the thread wakes for an older one first
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
            if late:
                with contextlib.suppress(RuntimeError):  # the event loop has closed: nobody waits any more
                    self._look(late)

    def _pause(self) -> float | None:
        """Seconds until the oldest group wants a look; None: nothing is being scored."""
        if not self._under_way:
            return None
        age = max((each.age for each in self._under_way.values() if not each.given_up), default=self._seconds)
        marks = (min(REPORT_S, self._seconds), self._seconds)
        return min((mark - age for mark in marks if mark > age), default=LOOK_AGAIN_S)

    def _look(self, late: list[_Scored]) -> None:
        """Report groups that are late, and give up those whose time is up."""
        moves = _moves(late[0].loop)
        overdue = [scored for scored in late if scored.age >= self._seconds]
        if not overdue and not self._reported:
            self._report(late, moves)
        if not moves and overdue:  # scores of the others may be there once it moves
            self._interrupt(overdue[0])
            return
        for scored in overdue:
            if not scored.given_up:
                scored.given_up = True
                form = "the group of %s is given up after %.0f s of scoring; its code is here:"
                self._say(form, scored, scored.age, stack=_where(scored))
                scored.loop.call_soon_threadsafe(scored.expire)

    def _report(self, late: list[_Scored], moves: bool) -> None:
        self._reported = True
        oldest, count, seconds = late[0], len(late), late[-1].age
        if moves:
            form = "%d groups have been in scoring for %.0f s or more, the oldest is that of %s; its code is here:"
            self._say(form, count, seconds, oldest, stack=_where(oldest))
        else:
            self._say_blocked(oldest)

    def _interrupt(self, scored: _Scored) -> None:
        """Raise the error in the code that blocks the event loop, if that is of a group whose time is up."""
        if self._blocked_for is not scored:
            self._blocked_for = scored
            self._say_blocked(scored)
        if scored.thread == threading.main_thread().ident and signal.getsignal(signal.SIGUSR1) is _raise:
            signal.pthread_kill(scored.thread, signal.SIGUSR1)

    def _say_blocked(self, oldest: _Scored) -> None:
        form = "the event loop is blocked, and scoring the group of %s has taken %.0f s so far; %s. The loop is here:"
        blocking = stacks.of_thread(oldest.thread, Scoring.within.__code__)
        self._say(form, oldest, oldest.age, UNBLOCK, stack=blocking)

    def _say(self, form: str, *values: object, stack: str) -> None:
        """Write a warning that ends with a stack, or says that the stack is the last one that was written."""
        known, self._last_stack = stack == self._last_stack, stack
        log.warning(f"{form}\n%s", *values, "  (the same place as before)" if known else stack)


def allow_interrupts() -> None:
    """Let a `Scoring` interrupt code that blocks the event loop of the main thread; it uses SIGUSR1."""
    signal.signal(signal.SIGUSR1, _raise)


def _raise(number: int, frame: FrameType | None) -> None:
    """Runs in the middle of whatever the main thread does."""
    scored = _CURRENT.get()
    if scored is not None and not scored.over and scored.age >= scored.seconds:
        raise scored.error()


def _moves(loop: asyncio.AbstractEventLoop) -> bool:
    """Whether an event loop calls what it is given to call."""
    called = threading.Event()
    loop.call_soon_threadsafe(called.set)
    return called.wait(MOVES_S)


def _where(scored: _Scored) -> str:
    """The stacks of the threads that work for a group; of its task, if none does."""
    found = filter(None, (stacks.of_thread(ident, run.__code__) for ident in tuple(scored.workers)))
    task = "" if scored.task is None else stacks.of_task(scored.task, Scoring.within.__code__)
    return "\n".join(found) or task
