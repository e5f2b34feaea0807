"""Requests that wait for something to happen, so that clients need not ask again and again."""

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from typing import Any

from starlette.requests import ClientDisconnect, Request

from grpo_common.disconnects import unless_disconnected


class Waiters:
    """Requests that wait for a change. Call it from one event loop; nothing runs while they wait."""

    def __init__(self) -> None:
        self._change = 0
        self._changed = asyncio.Event()
        self.ended = False

    def tell(self, change: int) -> None:
        """Have all of them look again, if `change` is another number than last time."""
        if change != self._change:
            self._change = change
            self._wake()

    def end(self) -> None:
        """Let nobody wait any more: the server ends."""
        self.ended = True
        self._wake()

    async def until(self, ready: Callable[[], bool], seconds: float) -> None:
        """Return once `ready` says so, when `seconds` are over, or when the server ends."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while not self.ended and not ready():
                    await self._changed.wait()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()  # for who waits after this change


async def while_there(request: Request, waiting: Coroutine[Any, Any, None]) -> None:
    """Wait for as long as the client does.

    Raises:
        ClientDisconnect: the client disconnected; nothing was leased for it.
    """

    async def waited() -> bool:
        await waiting
        return True

    if await unless_disconnected(request, waited()) is None:
        raise ClientDisconnect
