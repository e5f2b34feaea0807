"""Delays SIGINT and SIGTERM to the next safe point of a command."""

from __future__ import annotations

import signal
from collections.abc import Callable
from types import FrameType, TracebackType

from grpo_trainer.errors import StoppedError


class StopSignal:
    """While active, `check` raises the first signal as an error; a second signal interrupts at once."""

    def __init__(self) -> None:
        self.number: int | None = None
        self._before: dict[int, signal._HANDLER] = {}
        self._watched: list[Callable[[], None]] = []

    def __enter__(self) -> StopSignal:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._remember)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _remember(self, number: int, _: FrameType | None) -> None:
        if self.number is not None:
            raise KeyboardInterrupt
        self.number = number

    def watch(self, check: Callable[[], None]) -> None:
        """Make `check` also call this function."""
        self._watched.append(check)

    def check(self) -> None:
        """Raise an error if a signal arrived or a watched check fails.

        Raises:
            StoppedError: a signal arrived; the error has its exit code.
        """
        if self.number is not None:
            raise StoppedError(f"stopped by {signal.Signals(self.number).name}", self.number)
        for check in self._watched:
            check()
