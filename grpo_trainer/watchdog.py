"""A step that hangs ends the run, so that it does not occupy a machine for ever.

First the watchdog writes the stacks of all threads to the log, and makes the run end at its next safe point, with a
checkpoint. If the step does not reach a safe point, the watchdog ends the process. The last checkpoint is then
complete, and the rollout API serves the batches since that checkpoint again.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from grpo_common.text import Lines
from grpo_trainer.errors import HungError
from grpo_trainer.signals import running_time

log = logging.getLogger(__name__)

GRACE_SECONDS = 60.0
"""Time between the first report and the end of the process."""
LOOK_SECONDS = 1.0
"""Between two looks at the clock."""


def all_stacks() -> Lines:
    """Return the stacks of all threads, the main thread's first, each with its innermost call first."""
    frames = sys._current_frames()
    parts: list[str] = []
    for thread in sorted(threading.enumerate(), key=lambda thread: thread is not threading.main_thread()):
        calls = traceback.extract_stack(frames[thread.ident]) if thread.ident in frames else []
        parts += [f"thread {thread.name}, most recent call first:"]
        parts += [f'  File "{call.filename}", line {call.lineno}, in {call.name}' for call in reversed(calls)]
    return Lines("\n".join(parts))


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
    ) -> None:
        self._seconds = seconds
        self._last_words = last_words
        self._grace = grace
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

    @staticmethod
    def _ends(ended: threading.Event, seconds: float) -> bool:
        """Return whether the block ends within the time, which stands still while this process is stopped."""
        until = running_time() + seconds
        while (left := until - running_time()) > 0:
            if ended.wait(min(left, LOOK_SECONDS)):
                return True
        return ended.is_set()

    def _watch(self, what: str, ended: threading.Event) -> None:
        if self._ends(ended, self._seconds):
            return
        text = "%s has not ended for %.0f s; the stacks of all threads:\n%s"
        log.error(text, what, self._seconds, all_stacks())
        self._expired = what
        if self._ends(ended, self._grace):
            return
        log.error(
            "%s does not end: this process ends without a new checkpoint. --resume auto continues from the last one",
            what,
        )
        try:
            self._last_words(self._grace)
        finally:
            os._exit(HungError.exit_code)
