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
    """Limits the time of one block at a time, each from its own thread.

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
        self._expired: str | None = None

    @contextmanager
    def over(self, what: str) -> Iterator[None]:
        """Limit the time of the block."""
        if not self._seconds:
            yield
            return
        ended = threading.Event()
        watching = threading.Thread(target=self._watch, args=(what, ended), name="step watch", daemon=True)
        watching.start()
        try:
            yield
        finally:
            ended.set()
            watching.join()
            self._expired = None

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

    def _watch(self, what: str, ended: threading.Event) -> None:
        if ended.wait(self._seconds):
            return
        log.error("%s has not ended for %.0f s; the stacks of all threads:", what, self._seconds)
        self._dump()
        self._expired = what
        if ended.wait(self._grace):
            return
        log.error(
            "%s does not end: this process ends without a new checkpoint. --resume auto continues from the last one",
            what,
        )
        try:
            self._last_words(self._grace)
        finally:
            self._end(HungError.exit_code)
