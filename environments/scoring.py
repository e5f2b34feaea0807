"""Limit the time of an environment's code, and show where the code is when it takes long.

After `REPORT_S` the log shows the stack of the code. At the limit, `--env.score_timeout`:

    a coroutine, a thread or a process is awaited    it is given up: its task is cancelled, a thread stays behind
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
from typing import Any, TypeVar

from environments import stacks
from environments.threads import CLOCK, Clock, Interrupted, as_exception, elsewhere, run
from grpo_common.errors import UserError
from grpo_common.text import Lines

log = logging.getLogger(__name__)

REPORT_S = 30.0
"""Seconds after which the log shows the stack of the code."""
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
    """

    def __init__(self, subject: Callable[[], str], clock: Clock, limit: asyncio.Timeout) -> None:
        self.subject = subject
        self.clock = clock
        self.limit = limit
        self.task: asyncio.Task[Any] | None = asyncio.current_task()
        self.timer: asyncio.TimerHandle | None = None

    def stack(self) -> str:
        """Return the stacks of the threads that work for it; without such threads, that of its task."""
        found = filter(None, (stacks.of_thread(ident, run.__code__) for ident in tuple(self.clock.workers)))
        task = "" if self.task is None else stacks.of_task(self.task, Scoring._limited.__code__)
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
        result = await self._limited(lambda: f"the group of {_SHORT.repr(item)}", Clock(), work)
        self._reported = False
        return result

    async def call(self, name: str, work: Awaitable[T]) -> T:
        """Return the result of another call of the environment's code, such as `evaluate()`. It may take any time, as
        long as the server answers it, or functions in threads return.

        Raises:
            ScoreTimeout: nothing happened for too long.
        """
        return await self._limited(lambda: name, Clock(restarts=True), work)

    async def _limited(self, subject: Callable[[], str], clock: Clock, work: Awaitable[T]) -> T:
        limit = asyncio.timeout(None)
        each = _Work(subject, clock, limit)
        try:
            with elsewhere():  # the clock of the work that this is a part of stops
                async with limit:
                    token = CLOCK.set(clock)
                    self._look(each)
                    try:
                        return await work
                    finally:
                        CLOCK.reset(token)
        except TimeoutError:
            if not limit.expired():
                raise
            raise ScoreTimeout(
                "code of the environment is given up",
                field="--env.score_timeout",
                got=f"{clock.seconds:.0f} s for {subject()}",
                wanted=f"at most {self._seconds:g} s",
                fix="see the stack of the code in the log; raise the time-out if the code needs that long",
            ) from None
        except Interrupted:
            raise
        except (KeyboardInterrupt, SystemExit) as error:
            raise as_exception(error) from error
        finally:
            if each.timer is not None:
                each.timer.cancel()

    def _look(self, work: _Work) -> None:
        """Report work that takes long, give it up if its time is up, or look again at its next mark."""
        age, report = work.clock.seconds, min(REPORT_S, self._seconds)
        if age >= self._seconds:
            self._say("%s is given up after %.0f s; stack of its code:", work.subject(), age, stack=work.stack())
            work.limit.reschedule(asyncio.get_running_loop().time())
            return
        if age >= report and not self._reported:
            self._reported = True
            form = "%s has taken %.0f s so far; stack of its code (said once, until a group is scored):"
            self._say(form, work.subject(), age, stack=work.stack())
        pause = (report if age < report else self._seconds) - age
        work.timer = asyncio.get_running_loop().call_later(max(pause, LEAST_PAUSE_S), self._look, work)

    def _say(self, form: str, *values: object, stack: str) -> None:
        """Log a warning that ends with a stack, or with a note that the stack is the same as in the last warning."""
        known, self._last_stack = stack == self._last_stack, stack
        log.warning(f"{form}\n%s", *values, Lines("  (the same stack as before)" if known else stack))


class LoopWatch:
    """Ends this process if its event loop is blocked for too long: `async with LoopWatch(seconds):`."""

    def __init__(self, seconds: float) -> None:
        """`seconds`: the limit."""
        self._seconds = seconds
        self._patient = False
        self._moved, self._over = threading.Event(), threading.Event()
        self._beating: asyncio.Task[None] | None = None

    async def __aenter__(self) -> None:
        """Begin to watch the loop of this thread."""
        self._over.clear()
        self._beating = asyncio.create_task(self._beat())
        threading.Thread(target=self._watch, args=(threading.get_ident(),), name="loop watch", daemon=True).start()

    async def __aexit__(self, *_: object) -> None:
        """End."""
        assert self._beating is not None, "entered"
        self._beating.cancel()
        self._over.set()
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

    async def _beat(self) -> None:
        while True:
            self._moved.set()
            if not self._patient:
                limit = max(self._seconds, LEAST_LOOKS * LOOK_S) + NATIVE_S
                faulthandler.dump_traceback_later(min(limit, LONGEST_S), exit=True, file=2)
            await asyncio.sleep(LOOK_S / 2)

    def _watch(self, thread: int) -> None:
        """Count looks and not seconds, so that a process that was stopped for a while is not blamed."""
        reports, ends = (
            max(LEAST_LOOKS, math.ceil(min(seconds, LONGEST_S) / LOOK_S))
            for seconds in (min(REPORT_S, self._seconds), self._seconds)
        )
        looks = 0
        while not self._over.wait(LOOK_S):
            patient = self._patient
            looks = 0 if self._moved.is_set() else looks + 1
            self._moved.clear()
            if looks < min(reports, ends):
                continue
            stack = stacks.of_thread(thread, asyncio.Handle._run.__code__, Scoring._limited.__code__)
            if looks >= ends and not patient:
                form = "the event loop has been blocked for %.0f s, %s: this process ends; %s. Stack of the code:\n%s"
                limit = f"longer than --env.score_timeout {self._seconds:g}"
                log.error(form, looks * LOOK_S, limit, UNBLOCK, Lines(stack))
                os._exit(os.EX_SOFTWARE)
            if looks == reports:
                form = "the event loop has been blocked for %.0f s so far; %s. Stack of the code:\n%s"
                log.warning(form, looks * LOOK_S, UNBLOCK, Lines(stack))
