"""Limit the time of an environment's code, and show where the code is when it takes long.

After `REPORT_S` the log shows the stack of the code. At the limit, `--env.score_timeout`:

    a coroutine, a thread or a process is awaited    it is given up: its task is cancelled, a thread stays behind
    a coroutine that catches the cancellation        is lost, too; if it goes on for `STUBBORN_S`, the process ends
    the code blocks the event loop                   the process ends; a run starts it again

Time-outs of asyncio do not work in a blocked event loop, and no Python code runs while native code, such as a regular
expression, holds the interpreter's lock. Therefore a thread watches the loop, and faulthandler's timer, which needs no
lock, ends the process if that thread is blocked, too.
"""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import math
import os
import reprlib
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn, TypeVar

from environments.threads import CLOCK, Clock, as_exception, elsewhere, run, stack_of_task, stack_of_thread
from grpo_common.errors import UserError
from grpo_common.text import Lines

log = logging.getLogger(__name__)

REPORT_S = 30.0
"""Seconds after which the log shows the stack of the code."""
STUBBORN_S = 30.0
"""Seconds after which the process ends if code that was given up goes on, because it catches the cancellation."""
STUBBORN_LOOKS = 30
"""Looks at such code in that time. They are counted, so that a process that was stopped, or whose event loop was
blocked for a while, is not blamed: the code had no time to end."""
CLOSE_S = 10.0
"""Longest time for `close()`."""
LEAST_PAUSE_S = 0.05
"""Shortest wait: a clock may stand still just before a mark."""
LOOK_S = 1.0
"""Seconds between two looks at the event loop, which moves twice as often."""
LEAST_LOOKS = 3
"""Looks in a row that find a blocked event loop before the process ends, however low the limit is."""
NATIVE_S = 10.0
"""Seconds after the limit at which faulthandler's timer ends a process whose thread could not."""
LONGEST_S = 1e6
UNBLOCK = "code that takes long must run in a thread, as a plain `score` does: await self.threads.call(function, …)"

T = TypeVar("T")
_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 200


class ScoreTimeout(UserError, TimeoutError):
    """Scoring a group, or another call of the environment's code, took longer than `--env.score_timeout`."""


class _Work:
    """A call of the environment's code.

    Attributes:
        clock: its age, and the threads that work for it.
        seconds: limit of its age.
        looks: how many there were since it was given up.
    """

    def __init__(self, subject: Callable[[], str], clock: Clock, limit: asyncio.Timeout, seconds: float) -> None:
        self.subject = subject
        self.clock = clock
        self.limit = limit
        self.seconds = seconds
        self.looks = 0
        self.task: asyncio.Task[Any] | None = asyncio.current_task()
        self.timer: asyncio.TimerHandle | None = None

    def stack(self) -> str:
        """Return the stacks of the threads that work for it; without such threads, that of its task."""
        found = filter(None, (stack_of_thread(ident, run.__code__) for ident in tuple(self.clock.workers)))
        task = "" if self.task is None else stack_of_task(self.task, Scoring._limited.__code__)
        return "\n".join(found) or task


class Scoring:
    """Limits the time of one environment's code.

    Args:
        seconds: limit of scoring a group, and of any other call without progress.

    Attributes:
        loop: watches the event loop, where a program enters it.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._reported = False
        self._last_stack = ""
        self.loop = LoopWatch(seconds)

    async def within(self, item: object, work: Awaitable[T]) -> T:
        """Return the result of `work`, which scores an item's group. The wait for a thread, a judge or a server does
        not count.

        Raises:
            ScoreTimeout: it took too long, and the group is given up.
        """
        result = await self._limited(lambda: f"the group of {_SHORT.repr(item)}", Clock(), work, self._seconds)
        self._reported = False
        return result

    async def call(self, name: str, work: Awaitable[T]) -> T:
        """Return the result of another call of the environment's code, such as `evaluate()`. It may take any time, as
        long as the server answers it, or functions in threads return.

        Raises:
            ScoreTimeout: nothing happened for too long.
        """
        return await self._limited(lambda: name, Clock(restarts=True), work, self._seconds)

    async def close(self, work: Awaitable[None]) -> None:
        """Close the environment. The log has its errors; after `CLOSE_S` it is given up, or the process ends."""
        self.loop.shorten(CLOSE_S)
        try:
            await self._limited(lambda: "close()", Clock(), work, min(CLOSE_S, self._seconds))
        except ScoreTimeout as error:
            log.warning("%s", error)
        except Exception:  # what else is open must be closed, too
            log.exception("close() of the environment failed")

    async def _limited(self, subject: Callable[[], str], clock: Clock, work: Awaitable[T], seconds: float) -> T:
        limit = asyncio.timeout(None)
        each = _Work(subject, clock, limit, seconds)
        try:
            with elsewhere():  # the clock of the work that this is a part of stops
                async with limit:
                    token = CLOCK.set(clock)
                    self._look(each)
                    try:
                        result = await work
                    finally:
                        CLOCK.reset(token)
            if not limit.expired():  # else it was given up, even if it caught the cancellation and has a result
                return result
        except TimeoutError:
            if not limit.expired():
                raise
        except (KeyboardInterrupt, SystemExit) as error:
            raise as_exception(error) from error
        finally:
            if each.timer is not None:
                each.timer.cancel()
        raise ScoreTimeout(
            "code of the environment is given up",
            field="--env.score_timeout",
            got=f"{clock.seconds:.0f} s for {subject()}",
            wanted=f"at most {seconds:g} s",
            fix="see the stack of the code in the log; raise the time-out if the code needs that long",
        )

    def _look(self, work: _Work) -> None:
        """Report work that takes long, give it up if its time is up, or look again at its next mark."""
        loop = asyncio.get_running_loop()
        if work.clock.is_over:
            work.looks += 1
            if work.looks < STUBBORN_LOOKS:
                work.timer = loop.call_later(STUBBORN_S / STUBBORN_LOOKS, self._look, work)
            elif self.loop.is_entered:
                _end(
                    f"{work.subject()} goes on {STUBBORN_S:.0f} s after it was given up: its code catches the "
                    "cancellation, as a bare `except:` does",
                    "let asyncio.CancelledError pass: write `except Exception:`",
                    work.stack(),
                )
            return
        age, report = work.clock.seconds, min(REPORT_S, work.seconds)
        if age >= work.seconds:
            self._say("%s is given up after %.0f s; stack of its code:", work.subject(), age, stack=work.stack())
            work.clock.is_over = True
            work.limit.reschedule(loop.time())
            work.timer = loop.call_later(STUBBORN_S / STUBBORN_LOOKS, self._look, work)
            return
        if age >= report and not self._reported:
            self._reported = True
            form = "%s has taken %.0f s so far; stack of its code (said once, until a group is scored):"
            self._say(form, work.subject(), age, stack=work.stack())
        pause = (report if age < report else work.seconds) - age
        work.timer = loop.call_later(max(pause, LEAST_PAUSE_S), self._look, work)

    def _say(self, form: str, *values: object, stack: str) -> None:
        """Log a warning that ends with a stack, or with a note that the stack is the same as in the last warning."""
        known, self._last_stack = stack == self._last_stack, stack
        log.warning(f"{form}\n%s", *values, Lines("  (the same stack as before)" if known else stack))


def _end(why: str, fix: str, stack: str) -> NoReturn:
    """End this process, whose event loop or code can't be stopped in another way; the log says why."""
    log.error("%s: this process ends; %s. Stack of the code:\n%s", why, fix, Lines(stack))
    os._exit(os.EX_SOFTWARE)


class LoopWatch:
    """Ends this process if its event loop is blocked for too long: `async with LoopWatch(seconds):`.

    Attributes:
        is_entered: it watches, so that this process may end.
    """

    def __init__(self, seconds: float) -> None:
        """`seconds`: the limit."""
        self._seconds = seconds
        self._limit = f"--env.score_timeout {seconds:g}"
        self._patient = False
        self._moved, self._over = threading.Event(), threading.Event()
        self._beating: asyncio.Task[None] | None = None
        self.is_entered = False

    async def __aenter__(self) -> None:
        """Begin to watch the loop of this thread."""
        self.is_entered = True
        self._over.clear()
        self._beating = asyncio.create_task(self._beat())
        threading.Thread(target=self._watch, args=(threading.get_ident(),), name="loop watch", daemon=True).start()

    async def __aexit__(self, *_: object) -> None:
        """End."""
        assert self._beating is not None, "entered"
        self._beating.cancel()
        self._over.set()
        self.is_entered = False
        faulthandler.cancel_dump_traceback_later()

    @contextmanager
    def patience(self) -> Iterator[None]:
        """Only report a blocked loop: `setup` may load for minutes."""
        self._patient = True
        faulthandler.cancel_dump_traceback_later()
        try:
            yield
        finally:
            self._moved.set()  # first: the time that was spent in here does not count
            self._patient = False

    def shorten(self, seconds: float) -> None:
        """Lower the limit, at the end of the program."""
        if seconds < self._seconds:
            self._seconds, self._limit = seconds, f"the {seconds:g} s of close()"
            self._arm()

    def _arm(self) -> None:
        if self.is_entered and not self._patient:
            limit = max(self._seconds, LEAST_LOOKS * LOOK_S) + NATIVE_S
            faulthandler.dump_traceback_later(min(limit, LONGEST_S), exit=True, file=2)

    async def _beat(self) -> None:
        while True:
            self._moved.set()
            self._arm()
            await asyncio.sleep(LOOK_S / 2)

    def _watch(self, thread: int) -> None:
        """Count looks and not seconds, so that a process that was stopped for a while is not blamed."""
        looks = 0
        while not self._over.wait(LOOK_S):
            patient = self._patient
            reports, ends = (
                max(LEAST_LOOKS, math.ceil(min(seconds, LONGEST_S) / LOOK_S))
                for seconds in (min(REPORT_S, self._seconds), self._seconds)
            )
            looks = 0 if self._moved.is_set() else looks + 1
            self._moved.clear()
            if looks < min(reports, ends):
                continue
            stack = stack_of_thread(thread, asyncio.Handle._run.__code__, Scoring._limited.__code__)
            blocked = f"the event loop has been blocked for {looks * LOOK_S:.0f} s"
            if looks >= ends and not patient:
                _end(f"{blocked}, longer than {self._limit}", UNBLOCK, stack)
            if looks == reports:
                log.warning("%s so far; %s. Stack of the code:\n%s", blocked, UNBLOCK, Lines(stack))
