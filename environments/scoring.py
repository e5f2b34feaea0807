"""Calls of an environment's own code: functions in threads, limits of time, and a watch of the event loop.

A coroutine that takes longer than `--env.score_timeout` is cancelled. A thread cannot be ended and stays behind, and so
does a coroutine that ignores its cancellation. Code that blocks the event loop cannot be interrupted either: after
`BLOCKED_S` the log shows its stack and the process ends, and a run starts it again.
"""

from __future__ import annotations

import asyncio
import contextvars
import faulthandler
import inspect
import logging
import math
import os
import reprlib
import sys
import threading
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from contextvars import ContextVar
from functools import partial
from types import FrameType
from typing import Any, Final, TypeVar, cast

from grpo_common.errors import UserError
from grpo_common.text import Lines

log = logging.getLogger(__name__)

BLOCKED_S: Final = 30.0
"""Seconds for which code may block the event loop; less if `--env.score_timeout` is less."""
NATIVE_S = 90.0
"""Seconds after that limit at which faulthandler ends a process in which no Python code can run. Its timer also counts
the time for which a process is stopped, so it is long."""
LOOK_S = 1.0
"""Seconds between two looks at the event loop, which moves twice as often."""
LEAST_LOOKS: Final = 3
"""Looks in a row that find the event loop blocked before the process ends, however low the limit is."""
GRACE_S: Final = 5.0
"""Seconds that code which is cancelled has to end."""
LATE: Final = "the time limit of this call"
"""Message of the cancellation of code that takes too long."""
UNBLOCK: Final = "code that takes long must run in a thread: await self.threads.call(function, …)"

T = TypeVar("T")
_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 200
_HAS_SLOT: ContextVar[bool] = ContextVar("has_slot", default=False)
"""Whether the current context holds a `Threads.slot`."""


class ScoreTimeout(UserError, TimeoutError):
    """Scoring a group, or `get_next_item`, took longer than `--env.score_timeout`."""


async def settled(value: Awaitable[T] | T) -> T:
    """Return a value, or the result of an awaitable: of a function that may be a coroutine function."""
    return await value if isinstance(value, Awaitable) else cast("T", value)


def as_exception(error: BaseException) -> RuntimeError:
    """Return an error of an environment's code that a future can't hold, or that would end the process.

    `exit()` in a score is a mistake of one group. A real Ctrl-C does not raise an error in the code.
    """
    shown = RuntimeError(f"{type(error).__name__}: {error}")
    shown.__cause__ = error
    return shown


OF_CODE: Final = (Exception, KeyboardInterrupt, SystemExit, asyncio.CancelledError)
"""What an environment's code may raise for one item."""


def error_of_code(raised: BaseException) -> Exception:
    """Return what an environment's code raised as an exception.

    Raises:
        CancelledError: The current task is cancelled, as at the end of the program. Code also raises this error itself,
            when it awaits a task that it has cancelled; then it is a mistake like any other.
    """
    task = asyncio.current_task()
    if isinstance(raised, asyncio.CancelledError) and task is not None and task.cancelling():
        raise raised
    return raised if isinstance(raised, Exception) else as_exception(raised)


class Scoring:
    """Limits the time for scoring a group to `seconds`."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    async def within(self, item: object, work: Awaitable[T]) -> T:
        """Return the result of `work`, which scores an item's group.

        Raises:
            ScoreTimeout: It took too long.
        """
        return await self.call(lambda: f"the group of {_SHORT.repr(item)}", work)

    async def call(self, name: Callable[[], str], work: Awaitable[T]) -> T:
        """Return the result of another call of the environment's code; raise as `within`."""

        def late() -> ScoreTimeout:
            return ScoreTimeout(
                "code of the environment is given up",
                field="--env.score_timeout",
                got=name(),
                wanted=f"an end within {self.seconds:g} s",
                fix="raise the time-out if the code needs longer",
            )

        try:
            return await limited(self.seconds, work, late)
        except asyncio.CancelledError as error:
            raise error_of_code(error) from error


class Threads:
    """Calls functions: coroutine functions in the event loop, all others in threads.

    The threads are daemons, unlike those of `asyncio.to_thread`: a hung one must not keep the process alive.

    Args:
        at_once: limit of concurrent calls in threads; others wait. A call that has timed out does not count.
    """

    def __init__(self, at_once: int) -> None:
        self._slots = asyncio.Semaphore(at_once)

    @asynccontextmanager
    async def slot(self) -> AsyncIterator[None]:
        """Wait for a thread; all calls of the context within count as one.

        Hold it around a time limit, which then begins when the code begins.
        """
        if _HAS_SLOT.get():
            yield
            return
        async with self._slots:
            token = _HAS_SLOT.set(True)
            try:
                yield
            finally:
                _HAS_SLOT.reset(token)

    async def call(self, function: Callable[..., Any], *args: Any, timeout: float | None = None) -> Any:
        """Return the function's result, or raise its error.

        Args:
            timeout: limit in seconds from the start of the call.

        Raises:
            TimeoutError: The call took longer.
        """

        def within(work: Awaitable[Any]) -> Awaitable[Any]:
            if timeout is None:
                return work
            return limited(timeout, work, lambda: TimeoutError(f"no answer within {timeout:g} s"))

        if inspect.iscoroutinefunction(function):
            return await within(function(*args))
        async with self.slot():
            result = await within(_in_thread(function, args))
        return await within(result) if inspect.isawaitable(result) else result


async def limited(seconds: float, work: Awaitable[T], late: Callable[[], Exception]) -> T:
    """Return the result of `work`, or raise the error `late` if it takes longer.

    It runs in a separate task, which is left behind if it ignores its cancellation for `GRACE_S`.
    """

    async def run() -> T:
        try:
            return await work
        except (Exception, asyncio.CancelledError, GeneratorExit):
            raise
        except BaseException as error:  # it would end the process: an interrupt, or a panic of a library in Rust
            raise as_exception(error) from error

    task, why = asyncio.create_task(run()), LATE
    task.add_done_callback(lambda done: done.cancelled() or done.exception())  # of one that is left behind, too
    try:
        done, _ = await asyncio.wait({task}, timeout=seconds)
        if not done:
            raise late()
        return task.result()
    except asyncio.CancelledError as error:
        why = str(error)
        raise
    finally:
        if task.cancel(why):
            await asyncio.wait({task}, timeout=GRACE_S)


async def _in_thread(function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Call a function in a new daemon thread."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Any] = loop.create_future()

    def settle(result: Any, error: BaseException | None) -> None:
        if done.done():  # timed out or cancelled
            return
        if error is None:
            done.set_result(result)
        else:
            fits = isinstance(error, Exception) and not isinstance(error, StopIteration)
            done.set_exception(error if fits else as_exception(error))

    def run() -> None:
        try:
            result, error = function(*args), None
        except BaseException as raised:  # every error goes to the caller: a thread has no other way to report it
            result, error = None, raised
        with suppress(RuntimeError):  # the loop has closed, so no task waits for the result
            loop.call_soon_threadsafe(settle, result, error)

    name = getattr(function.func if isinstance(function, partial) else function, "__name__", "a function")
    thread = threading.Thread(target=contextvars.copy_context().run, args=(run,), name=name, daemon=True)
    thread.start()
    try:
        return await done
    except asyncio.CancelledError as error:
        frame = sys._current_frames().get(thread.ident or 0)
        if str(error) == LATE and frame is not None:  # and not the end of the program
            log.warning(
                "%s did not return in time, its thread stays behind. Its stack:\n%s", name, Lines(_stack(frame))
            )
        raise


def _stack(frame: FrameType) -> str:
    """Return the calls of an environment's code that led to a frame, the innermost last."""
    frames = traceback.extract_stack(frame)
    start = max((place for place, each in enumerate(frames, 1) if each.filename in (asyncio.events.__file__, __file__)),
                default=0)  # fmt: skip
    return "".join(traceback.format_list(frames[start:])).rstrip()


def _is_traced(frame: FrameType | None) -> bool:
    """Return whether a debugger traces a thread, so that it may wait for a person."""
    while frame is not None:
        if frame.f_trace is not None:
            return True
        frame = frame.f_back
    return False


class LoopWatch:
    """Ends this process if its event loop is blocked for too long: `async with LoopWatch(seconds):`.

    Attributes:
        is_armed: a blocked loop ends the process; not before `setup`, which may load for minutes, has ended.
    """

    def __init__(self, seconds: float) -> None:
        """`seconds`: `--env.score_timeout`; a limit above `BLOCKED_S` counts as `BLOCKED_S`."""
        self._looks = max(LEAST_LOOKS, math.ceil(min(seconds, BLOCKED_S) / LOOK_S))
        self._moved, self._over = threading.Event(), threading.Event()
        self._beating: asyncio.Task[None] | None = None
        self.is_armed = False

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

    async def _beat(self) -> None:
        while True:
            self._moved.set()
            if self.is_armed:  # the timer needs no lock of the interpreter, which native code may hold
                faulthandler.dump_traceback_later(self._looks * LOOK_S + NATIVE_S, exit=True, file=2)
            await asyncio.sleep(LOOK_S / 2)

    def _watch(self, thread: int) -> None:
        """Count looks and not seconds, so that a process that was stopped for a while is not blamed.

        A loop in which a debugger waits is not blocked.
        """
        looks = 0
        while not self._over.wait(LOOK_S):
            looks = 0 if self._moved.is_set() or not self.is_armed else looks + 1
            self._moved.clear()
            if looks and _is_traced(sys._current_frames()[thread]):
                looks = 0
                faulthandler.cancel_dump_traceback_later()
            if looks >= self._looks:
                blocked = f"the event loop has been blocked for {looks * LOOK_S:.0f} s: this process ends"
                stack = Lines(_stack(sys._current_frames()[thread]))
                log.error("%s; %s. Stack of the code:\n%s", blocked, UNBLOCK, stack)
                os._exit(os.EX_SOFTWARE)
