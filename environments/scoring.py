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
import os
import reprlib
import sys
import threading
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable
from concurrent.futures import Future
from contextlib import asynccontextmanager
from contextvars import ContextVar
from functools import partial
from types import FrameType
from typing import Any, Final, TypeVar, cast

from grpo_common.errors import UserError
from grpo_common.text import Lines

log = logging.getLogger(__name__)

BLOCKED_S: Final = 30.0
"""Seconds for which code may block the event loop; less if `--env.score_timeout` is less."""
LEAST_S = 5.0
"""Least limit: a process on a busy machine may wait for a core."""
BEAT_S = 1.0
"""Seconds between two signs of the event loop."""
NATIVE_S = 90.0
"""Seconds after the limit at which faulthandler ends a process in which no Python code can run. Its timer also counts
the time for which a process is stopped, so it is long."""
UNBLOCK: Final = "code that takes long must run in a thread: await self.threads.call(function, …)"
GRACE_S: Final = 5.0
"""Seconds that code which is cancelled has to end."""
LATE: Final = "the time limit of this call"
"""Message of the cancellation of code that takes too long."""

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
    """Return what an environment's code raised as an exception, or raise CancelledError if the task is cancelled.

    That is so at the end of the program. Code also raises this error itself, when it awaits a task that it has
    cancelled; then it is a mistake like any other.
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
        return await self.call(f"the group of {_SHORT.repr(item)}", work)

    async def call(self, name: str, work: Awaitable[T]) -> T:
        """Return the result of another call of the environment's code; raise as `within`."""
        late = ScoreTimeout(
            "code of the environment is given up",
            field="--env.score_timeout",
            got=name,
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
            return limited(timeout, work, TimeoutError(f"no answer within {timeout:g} s"))

        if inspect.iscoroutinefunction(function):
            return await within(function(*args))
        async with self.slot():
            result = await within(in_thread(function, *args, reports=True))
        return await within(result) if inspect.isawaitable(result) else result


async def limited(seconds: float, work: Awaitable[T], late: Exception) -> T:
    """Return the result of `work`, or raise the error `late` if it takes longer.

    It runs in a separate task, which is left behind if it ignores its cancellation for `GRACE_S`.
    """

    task, why = _task(work), LATE
    try:
        done, _ = await asyncio.wait({task}, timeout=seconds)
        if not done:
            raise late
        return task.result()
    except asyncio.CancelledError as error:
        why = str(error)
        raise
    finally:
        if task.cancel(why):
            await asyncio.wait({task}, timeout=GRACE_S)


async def _contained(work: Awaitable[T]) -> T:
    """Return the result of `work`; an error that would end the process is raised as an ordinary exception.

    `exit()` is such an error, or a panic of a library in Rust.
    """
    try:
        return await work
    except (Exception, asyncio.CancelledError, GeneratorExit):
        raise
    except BaseException as error:
        raise as_exception(error) from error


def contain_tasks() -> None:
    """Have every later task of the running event loop contained, also those that libraries and users' code start.

    asyncio ends the loop, and with it the process, when any task raises `SystemExit`. Such an error is logged, once
    each: nobody may look at the task's result.
    """
    said: set[str] = set()

    async def contained(work: Coroutine[Any, Any, T]) -> T:
        try:
            return await _contained(work)
        except RuntimeError as error:
            ended = error.__cause__
            if not isinstance(ended, Exception | asyncio.CancelledError | None) and repr(ended) not in said:
                said.add(repr(ended))
                log.error("a task of the environment's code ended with %r; what waits for it gets this error", ended)
            raise

    def contained_task(loop: asyncio.AbstractEventLoop, work: Any, **options: Any) -> asyncio.Task[Any]:
        if not asyncio.iscoroutine(work):
            return asyncio.Task(work, loop=loop, **options)
        task = asyncio.Task(contained(work), loop=loop, **options)
        task.add_done_callback(lambda _: work.close())  # one that was cancelled before it began
        return task

    asyncio.get_running_loop().set_task_factory(contained_task)


def _task(work: Awaitable[T]) -> asyncio.Task[T]:
    """Return a task that is quiet about its error, and closes a coroutine that was cancelled before it began."""
    task = asyncio.create_task(_contained(work))
    task.add_done_callback(lambda done: done.cancelled() or done.exception())  # of one that is left behind, too
    if asyncio.iscoroutine(work):
        task.add_done_callback(lambda _: work.close())
    return task


async def gathered(works: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Return the results of coroutines that run at the same time.

    An error of one cancels the others and waits for them, but not longer than `GRACE_S`: what they hold, such as a
    command or a sandbox, is given back before the error goes on.
    """
    tasks = [_task(work) for work in works]
    try:
        return await asyncio.gather(*tasks)
    finally:
        unfinished = [task for task in tasks if task.cancel()]
        if unfinished:
            await asyncio.wait(unfinished, timeout=GRACE_S)


async def in_thread(function: Callable[..., Any], *args: Any, reports: bool = False) -> Any:
    """Call a function in a new daemon thread, which stays behind if the caller is cancelled.

    With `reports`, the stack of one that stays behind because of a time limit is logged.
    """
    done: Future[Any] = Future()
    done.set_running_or_notify_cancel()  # so that its result may come after the caller has given up

    def run_function() -> None:
        try:
            done.set_result(function(*args))
        except BaseException as error:  # every error goes to the caller: a thread has no other way to report it
            fits = isinstance(error, Exception) and not isinstance(error, StopIteration)
            done.set_exception(error if fits else as_exception(error))

    name = getattr(function.func if isinstance(function, partial) else function, "__name__", "a function")
    thread = threading.Thread(target=contextvars.copy_context().run, args=(run_function,), name=name, daemon=True)
    thread.start()
    try:
        return await asyncio.wrap_future(done)
    except asyncio.CancelledError as error:
        frame = sys._current_frames().get(thread.ident or 0)
        if reports and str(error) == LATE and frame is not None:  # and not the end of the program
            stack = Lines(_stack(frame))
            log.warning("%s did not return in time, its thread stays behind. Its stack:\n%s", name, stack)
        raise


async def watch_loop(seconds: float, is_armed: Callable[[], bool]) -> None:
    """End this process, with the stack in its log, if its event loop is blocked for too long; return never.

    The limit is `--env.score_timeout`, but between `LEAST_S` and `BLOCKED_S`. Nothing is watched before `is_armed`, as
    `setup` may load for minutes, nor in a terminal or a debugger: a person may hold the loop at a breakpoint.
    """
    limit, thread, moved = max(LEAST_S, min(seconds, BLOCKED_S)), threading.get_ident(), threading.Event()

    def end_if_blocked() -> None:
        moved.clear()
        if not moved.wait(2 * BEAT_S):  # the loop moves if the process was only stopped for a while
            blocked = f"the event loop has been blocked for {limit:g} s: this process ends"
            stack = Lines(_stack(sys._current_frames()[thread]))
            log.error("%s; %s. Stack of the code:\n%s", blocked, UNBLOCK, stack)
            os._exit(os.EX_SOFTWARE)

    timer = threading.Timer(limit, end_if_blocked)
    try:
        while True:
            moved.set()
            timer.cancel()
            if is_armed() and not (sys.gettrace() or (sys.stdin and sys.stdin.isatty())):
                timer = threading.Timer(limit, end_if_blocked)
                timer.daemon = True
                timer.start()
                # This timer needs no lock of the interpreter, which native code may hold.
                faulthandler.dump_traceback_later(limit + NATIVE_S, exit=True, file=2)
            await asyncio.sleep(BEAT_S)
    finally:
        timer.cancel()
        faulthandler.cancel_dump_traceback_later()


def _stack(frame: FrameType) -> str:
    """Return the calls of an environment's code that led to a frame, the innermost last."""
    frames = traceback.extract_stack(frame)
    ours = (asyncio.events.__file__, __file__)
    begin = max((place for place, each in enumerate(frames, 1) if each.filename in ours), default=0)
    return "".join(traceback.format_list(frames[begin:])).rstrip()
