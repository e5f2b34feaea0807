"""Call an environment's blocking functions in threads, so that they do not block the event loop.

A tool that fetches a page, or a score that asks a solver, takes seconds. In the event loop it would block everything
else meanwhile: generation, posting groups, and requests to the rollout API.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import logging
import sys
import threading
import time
import traceback
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from contextvars import ContextVar
from functools import partial
from types import CodeType, FrameType
from typing import Any, TypeVar, cast

log = logging.getLogger(__name__)

T = TypeVar("T")


async def settled(value: Awaitable[T] | T) -> T:
    """Return a value, or what an awaitable gives: a result of a function that may be a coroutine function."""
    return await value if isinstance(value, Awaitable) else cast("T", value)


class Clock:
    """Measures the seconds that some work takes. It stops while all its calls wait for a thread, a judge or a server.

    Args:
        restarts: begin at 0 again whenever a call begins, is answered or ends.

    Attributes:
        workers: idents of the threads that currently work for it.
        is_over: the work was given up, as it has taken too long.
    """

    def __init__(self, *, restarts: bool = False) -> None:
        self.workers: set[int] = set()
        self.is_over = False
        self._restarts = restarts
        self._before = 0.0
        self._since: float | None = time.monotonic()
        self._calls = self._waiting = 0

    @property
    def seconds(self) -> float:
        """Return the seconds that it has run."""
        return self._before + (0.0 if self._since is None else time.monotonic() - self._since)

    @contextmanager
    def count(self, *, calls: int = 0, waiting: int = 0) -> Iterator[None]:
        """Count calls, and those of them that wait."""
        self._change(calls, waiting)
        try:
            yield
        finally:
            self._change(-calls, -waiting)

    def _change(self, calls: int, waiting: int) -> None:
        self._before = 0.0 if self._restarts else self.seconds
        self._calls += calls
        self._waiting += waiting
        self._since = None if 0 < self._waiting == self._calls else time.monotonic()


CLOCK: ContextVar[Clock | None] = ContextVar("clock", default=None)
"""The clock of the current context's work."""


def elsewhere() -> AbstractContextManager[None]:
    """Count the time inside as a call that waits for something with another time limit, such as a server."""
    return (CLOCK.get() or Clock()).count(calls=1, waiting=1)


class Threads:
    """Calls functions: coroutines in the event loop, all others in threads, with a limit of concurrent threads.

    The threads are daemons: a thread cannot be ended from outside, and a hung one must not keep the program alive.

    Args:
        at_once: limit of concurrent calls in threads; others wait. A call that has timed out does not count.
    """

    def __init__(self, at_once: int) -> None:
        self._slots = asyncio.Semaphore(at_once)
        self._left_behind = 0

    async def call(self, function: Callable[..., Any], *args: Any, timeout: float | None = None) -> Any:
        """Return the function's result, or raise its error.

        Args:
            timeout: limit in seconds from the start of the call. Its time does not count for another limit.

        Raises:
            TimeoutError: the call took longer.
        """
        clock, limited = CLOCK.get() or Clock(), int(timeout is not None)
        if inspect.iscoroutinefunction(function):
            with clock.count(calls=limited, waiting=limited):
                return await _within(timeout, function(*args))
        with clock.count(calls=1):
            with clock.count(waiting=1):
                await self._slots.acquire()
            try:
                with clock.count(waiting=limited):
                    result = await self._in_a_thread(function, args, timeout, clock)
            finally:
                self._slots.release()
            with clock.count(waiting=limited):
                return await _within(timeout, result) if inspect.isawaitable(result) else result

    async def _in_a_thread(self, function: Callable[..., Any], args: Any, timeout: float | None, clock: Clock) -> Any:
        done: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        inside = contextvars.copy_context().run
        name = getattr(function.func if isinstance(function, partial) else function, "__name__", "a function")
        threading.Thread(target=inside, args=(run, done, function, args), name=name, daemon=True).start()
        try:
            return await _within(timeout, done)
        except (TimeoutError, asyncio.CancelledError) as error:
            if done.cancelled() and (isinstance(error, TimeoutError) or clock.is_over):
                self._left_behind += 1
                log.warning("%s did not return in time; threads left behind so far: %d", name, self._left_behind)
            raise


async def _within(seconds: float | None, work: Any) -> Any:
    limit = asyncio.timeout(seconds)
    try:
        async with limit:
            return await work
    except TimeoutError:
        if limit.expired():
            raise TimeoutError(f"no answer within {seconds:g} s") from None
        raise


def run(done: asyncio.Future[Any], function: Callable[..., Any], args: Any) -> None:
    """Call a function in this thread, and set the future's result in its event loop."""
    clock, own = CLOCK.get(), threading.get_ident()
    if clock is not None:
        clock.workers.add(own)
    try:
        result, error = function(*args), None
    except BaseException as raised:  # every error goes to the caller: a thread has no other way to report it
        result, error = None, raised
    finally:
        if clock is not None:
            clock.workers.discard(own)
    with suppress(RuntimeError):  # the loop has closed, so no task waits for the result
        done.get_loop().call_soon_threadsafe(_settle, done, result, error)


def _settle(done: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    if done.done():
        return  # timed out or cancelled
    if error is None:
        done.set_result(result)
    elif isinstance(error, Exception) and not isinstance(error, StopIteration):
        done.set_exception(error)
    else:
        done.set_exception(as_exception(error))


def as_exception(error: BaseException) -> RuntimeError:
    """Return an error of an environment's code that a future can't hold, or that would end the process.

    `exit()` in a score is a mistake of one group. A real Ctrl-C does not raise an error in the code.
    """
    said = RuntimeError(f"{type(error).__name__}: {error}")
    said.__cause__ = error
    return said


def stack_of_thread(ident: int, *after: CodeType) -> str:
    """Return a thread's stack, the innermost call last, or nothing if it has ended.

    Args:
        after: code of functions; the last call of one of them, and the calls that led to it, are left out.
    """
    frame, frames = sys._current_frames().get(ident), list[FrameType]()
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    return _shown(frames[::-1], after)


def stack_of_task(task: asyncio.Task[Any], *after: CodeType) -> str:
    """Return the stack of a waiting task: the coroutines that await each other, the innermost last."""
    return _shown(_awaited(task), after)


def _awaited(task: asyncio.Task[Any]) -> list[FrameType]:
    """Return the frames of all awaited coroutines; `Task.get_stack` has only the outermost one."""
    frames: list[FrameType] = []
    each: Any = task.get_coro()
    while (frame := getattr(each, "cr_frame", None) or getattr(each, "gi_frame", None)) is not None:
        frames.append(frame)
        each = getattr(each, "cr_await", None) or getattr(each, "gi_yieldfrom", None)
    for child in getattr(getattr(task, "_fut_waiter", None), "_children", ()):  # the task awaits asyncio.gather
        if isinstance(child, asyncio.Task) and not child.done():
            return frames + _awaited(child)
    return frames


def _shown(frames: list[FrameType], after: tuple[CodeType, ...]) -> str:
    start = max((place + 1 for place, frame in enumerate(frames) if frame.f_code in after), default=0)
    summary = traceback.StackSummary.extract((frame, frame.f_lineno) for frame in frames[start:])
    return "".join(summary.format()).rstrip()
