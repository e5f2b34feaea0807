"""Runs one job at a time in a separate thread, and raises its errors in the caller's thread."""

from __future__ import annotations

import threading
from collections.abc import Callable


class BackgroundWriter:
    """Runs jobs one after the other. The process exits only after the running job has ended."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def start(self, job: Callable[[], None]) -> None:
        """Run a job in the background, after waiting for the last one.

        Raises:
            BaseException: the error of the last job.
        """
        self.wait()
        self._thread = threading.Thread(target=self._run, args=(job,), name="checkpoint writer")
        self._thread.start()

    @property
    def is_busy(self) -> bool:
        """Whether a job is running."""
        return self._thread is not None and self._thread.is_alive()

    def check(self) -> None:
        """Raise the error of a job that has ended; do not wait for a running one.

        Raises:
            BaseException: the job's error, only once.
        """
        if not self.is_busy:
            self.wait()

    def wait(self, seconds: float | None = None) -> bool:
        """Wait for a running job, for at most `seconds`.

        Returns:
            Whether no job is running any more.

        Raises:
            BaseException: the job's error.
        """
        if self._thread is not None:
            self._thread.join(seconds)
            if self._thread.is_alive():
                return False
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error
        return True

    def _run(self, job: Callable[[], None]) -> None:
        try:
            job()
        except BaseException as error:  # raised again by `wait`
            self._error = error
