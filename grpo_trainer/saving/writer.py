"""Runs one job at a time in a separate thread, and raises its errors in the caller's thread."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait


class BackgroundWriter:
    """Runs jobs one after the other. The process exits only after the running job has ended."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, "checkpoint writer")
        self._job: Future[None] | None = None

    def start(self, job: Callable[[], None]) -> None:
        """Run a job in the background, after waiting for the last one.

        Raises:
            BaseException: the error of the last job.
        """
        self.wait()
        self._job = self._pool.submit(job)

    @property
    def is_busy(self) -> bool:
        """Whether a job is running."""
        return self._job is not None and not self._job.done()

    def check(self) -> None:
        """Raise the error of a job that has ended, only once; do not wait for a running one."""
        if not self.is_busy:
            self.wait()

    def wait(self, seconds: float | None = None) -> bool:
        """Wait for a running job, for at most `seconds`, and return whether none is running any more.

        Raises:
            BaseException: the job's error, only once.
        """
        if self._job is None:
            return True
        if not wait([self._job], seconds).done:
            return False
        job, self._job = self._job, None
        job.result()
        return True
