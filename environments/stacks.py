"""Stacks of running threads and of waiting tasks."""

from __future__ import annotations

import asyncio
import sys
import traceback
from types import CodeType, FrameType
from typing import Any


def of_thread(ident: int, *after: CodeType) -> str:
    """Return a thread's stack, the innermost call last, or nothing if it has ended.

    Args:
        after: code of functions; the last call of one of them, and the calls that led to it, are left out.
    """
    frame = sys._current_frames().get(ident)
    frames: list[FrameType] = []
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    return _text(frames[::-1], after)


def of_task(task: asyncio.Task[Any], *after: CodeType) -> str:
    """Return the stack of a waiting task: the coroutines that await each other, the innermost last."""
    return _text(_waiting(task), after)


def _waiting(task: asyncio.Task[Any]) -> list[FrameType]:
    """Return the frames of all awaited coroutines; `Task.get_stack` has only the outermost one."""
    frames: list[FrameType] = []
    each: Any = task.get_coro()
    while (frame := getattr(each, "cr_frame", None) or getattr(each, "gi_frame", None)) is not None:
        frames.append(frame)
        each = getattr(each, "cr_await", None) or getattr(each, "gi_yieldfrom", None)
    for child in getattr(getattr(task, "_fut_waiter", None), "_children", ()):  # the task awaits asyncio.gather
        if isinstance(child, asyncio.Task) and not child.done():
            return frames + _waiting(child)
    return frames


def _text(frames: list[FrameType], after: tuple[CodeType, ...]) -> str:
    start = max((place + 1 for place, frame in enumerate(frames) if frame.f_code in after), default=0)
    summary = traceback.StackSummary.extract((frame, frame.f_lineno) for frame in frames[start:])
    return "".join(summary.format()).rstrip()
