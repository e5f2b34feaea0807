"""What both servers do with an HTTP client's messages: cancel work when it disconnects, and read a message again."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.types import Message, Receive

T = TypeVar("T")


async def unless_disconnected(request: Request, work: Coroutine[Any, Any, T]) -> T | None:
    """Return the result of `work`. If the client disconnects first, cancel `work` and return None.

    Call it only after the body was read: before that, `request.receive` returns the body's parts.
    """

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(gone())
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


def replayed(message: Message, receive: Receive) -> Receive:
    """Return a `receive` that yields the message once and then the client's further ones, usually its disconnect."""
    first = [message]

    async def replay() -> Message:
        return first.pop() if first else await receive()

    return replay
