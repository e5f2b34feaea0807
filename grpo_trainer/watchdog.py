"""A step that hangs ends the run instead of holding a machine for ever.

First the stacks of all threads are written to the log, and the run is asked to end at its next safe point, where it
saves. A step that never comes to one is ended from outside: the last checkpoint is whole, and the batches since then
come again.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from grpo_trainer.errors import HungError

log = logging.getLogger(__name__)

GRACE_SECONDS = 60.0
"""From asking a step to end to ending it."""


def dump_stacks() -> None:
    """Where every thread is, to standard error."""
    faulthandler.dump_traceback(file=sys.__stderr__ or 2, all_threads=True)


class StepWatch:
    """Watches over one thing at a time, from a thread.

    Args:
        seconds: that it may take; 0: nothing is watched.
        last_words: called before the run is ended from outside, given the seconds that it may take.
        end: ends the process with an exit code.
    """

    def __init__(
        self,
        seconds: float,
        last_words: Callable[[float], object] = lambda seconds: None,
        *,
        grace: float = GRACE_SECONDS,
        dump: Callable[[], None] = dump_stacks,
        end: Callable[[int], None] = os._exit,
    ) -> None:
        self._seconds = seconds
        self._last_words = last_words
        self._grace = grace
        self._dump = dump
        self._end = end
        self._changed = threading.Condition()
        self._what: str | None = None
        self._deadline = 0.0
        self._expired: str | None = None
        self._closing = False
        self._thread: threading.Thread | None = None

    @contextmanager
    def over(self, what: str) -> Iterator[None]:
        """Watch over the block."""
        if not self._seconds:
            yield
            return
        self._set(what)
        try:
            yield
        finally:
            self._set(None)

    def check(self) -> None:
        """Raise if what is watched over has taken too long: it can't be hung where this is called.

        Raises:
            HungError: it has.
        """
        if self._expired is not None:
            raise HungError(
                field=self._expired,
                got=f"more than {self._seconds:.0f} s",
                wanted="at most --step-timeout",
                fix="see the stacks of all threads above",
            )

    def close(self) -> None:
        """Watch no more."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join()

    def _set(self, what: str | None) -> None:
        with self._changed:
            self._what, self._expired = what, None
            self._deadline = time.monotonic() + self._seconds
            if self._thread is None:
                self._thread = threading.Thread(target=self._watch, name="step watch", daemon=True)
                self._thread.start()
            self._changed.notify()

    def _watch(self) -> None:
        with self._changed:
            while not self._closing:
                left = self._deadline - time.monotonic()
                if self._what is None:
                    self._changed.wait()
                elif left > 0:
                    self._changed.wait(left)
                elif self._expired is None:
                    self._ask()
                else:
                    self._finish(self._what)
                    return

    def _ask(self) -> None:
        assert self._what is not None
        log.error("%s has not ended for %.0f s; the stacks of all threads:", self._what, self._seconds)
        self._dump()
        self._expired = self._what
        self._deadline = time.monotonic() + self._grace

    def _finish(self, what: str) -> None:
        log.error(
            "%s does not end: this process ends without a new checkpoint. --resume auto goes on from the last one, "
            "with the same batches",
            what,
        )
        try:
            self._last_words(self._grace)
        finally:
            self._end(HungError.exit_code)
