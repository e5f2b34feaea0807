"""A process on another node, as the supervisor sees it."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from pathlib import Path

from grpo_trainer.launch.agent import Line
from grpo_trainer.launch.plan import ProcessSpec
from grpo_trainer.launch.watched import Listener, Watched

END_SECONDS = 3.0
"""Most seconds from the end of a killed process until its node has said so."""


class RemoteProcess(Watched):
    """A process that a node's agent runs.

    Args:
        order: has the agent do what a method of it does, by the method's name, and waits for that; it does nothing
            once the node is lost.
    """

    def __init__(
        self, spec: ProcessSpec, log_path: Path, on_stdout: Listener, on_stderr: Listener, order: Callable[[str], None]
    ) -> None:
        super().__init__(spec, log_path)
        self._listeners = (on_stdout, on_stderr)
        self._order = order
        self._pid = 0
        self._exit_code: int | None = None
        self._is_over = threading.Event()
        self._lost = ""

    @property
    def pid(self) -> int:
        return self._pid

    @property
    def exit_code(self) -> int | None:
        return self._exit_code

    def begin(self, pid: int) -> None:
        """Note that it runs."""
        self._pid = pid

    def hear(self, line: Line) -> None:
        """Take a line that it wrote."""
        self.take(f"{line.text}\n")
        self._listeners[line.is_error](line.text)

    def end(self, code: int) -> None:
        """Note that it has ended."""
        self._exit_code = code
        self._is_over.set()

    def lose(self, reason: str) -> None:
        """Note that its node is lost, and with it the process; one that had ended before keeps its exit code."""
        if self._exit_code is None:
            self._lost = reason
            self.end(-signal.SIGKILL)

    def how_it_ended(self) -> str:
        return self._lost or super().how_it_ended()

    def note_family(self) -> None:
        self._order("note_family")

    def terminate(self) -> None:
        if self._exit_code is None:
            self._order("terminate")

    def kill(self) -> None:
        self._order("kill")
        self._is_over.wait(END_SECONDS)

    def drain(self) -> None:
        """Do nothing: the last lines come before the exit code."""
