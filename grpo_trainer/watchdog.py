"""A step that hangs ends the run, so that it does not occupy a machine for ever.

First the watchdog writes the stacks of all threads to the log, and makes the run end at its next safe point, with a
checkpoint. If the step does not reach a safe point, the watchdog ends the process. The last checkpoint is then
complete, and the rollout API serves the batches since that checkpoint again.
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
"""Time between the first report and the end of the process."""


def dump_stacks() -> None:
    """Write the stacks of all threads to standard error."""
    faulthandler.dump_traceback(file=sys.__stderr__ or 2, all_threads=True)


class StepWatch:
    """Limits the time of one block at a time, from a thread.

    Args:
        seconds: time limit of a block; 0: no limit.
        last_words: called before the process ends, with its own time limit in seconds.
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
        """Limit the time of the block."""
        if not self._seconds:
            yield
            return
        self._set(what)
        try:
            yield
        finally:
            self._set(None)

    def check(self) -> None:
        """Raise an error if the block has exceeded its time limit; the block calls this at its safe points.

        Raises:
            HungError: the time limit is exceeded.
        """
        if self._expired is not None:
            raise HungError(
                field=self._expired,
                got=f"more than {self._seconds:.0f} s",
                wanted="at most --step-timeout",
                fix="see the stacks of all threads above",
            )

    def close(self) -> None:
        """End the thread."""
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
            "%s does not end: this process ends without a new checkpoint. --resume auto continues from the last one, "
            "with the same batches",
            what,
        )
        try:
            self._last_words(self._grace)
        finally:
            self._end(HungError.exit_code)
