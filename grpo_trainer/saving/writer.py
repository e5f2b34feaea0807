"""One job at a time in a thread of its own; what goes wrong there is raised here."""

from __future__ import annotations

import threading
from collections.abc import Callable


class BackgroundWriter:
    """Runs jobs one after the other. Leaving the program waits for the one that runs."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def start(self, job: Callable[[], None]) -> None:
        """Run a job in the background, once the one before has ended.

        Raises:
            BaseException: what the one before raised.
        """
        self.wait()
        self._thread = threading.Thread(target=self._run, args=(job,), name="checkpoint writer")
        self._thread.start()

    @property
    def is_busy(self) -> bool:
        """Whether a job runs."""
        return self._thread is not None and self._thread.is_alive()

    def check(self) -> None:
        """Raise what a job raised; does not wait for one that runs.

        Raises:
            BaseException: that; once.
        """
        if not self.is_busy:
            self.wait()

    def wait(self, seconds: float | None = None) -> bool:
        """Wait for the job that runs, if one does.

        Returns:
            Whether none runs any more.

        Raises:
            BaseException: what it raised.
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
        except BaseException as error:  # it is the starter's
            self._error = error
