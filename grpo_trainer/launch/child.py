"""One process of a run on this machine.

Each child runs in its own session, so that Ctrl-C reaches only the supervisor. If the supervisor is killed, the kernel
sends each child SIGTERM.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import threading
from pathlib import Path
from typing import IO

import psutil

from grpo_trainer.launch.plan import ProcessSpec
from grpo_trainer.launch.watched import LAST_LINES, Listener, Watched

KILL_SECONDS = 1.0
"""Time for the kernel to remove killed processes."""

PIECE = 2**16
"""Characters of a line that are read at once: a line may have any length."""

_LIBC = ctypes.CDLL(None, use_errno=True)
_PR_SET_PDEATHSIG = 1


def _end_with_parent() -> None:
    """In the child, before exec: ask the kernel for SIGTERM when the supervisor dies."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


class Child(Watched):
    """A child of this process, whose output goes to a log file and to two listeners."""

    def __init__(
        self,
        spec: ProcessSpec,
        log_path: Path,
        on_stdout: Listener = lambda line: None,
        on_stderr: Listener = lambda line: None,
        last_lines: int = LAST_LINES,
    ) -> None:
        super().__init__(spec, log_path, last_lines)
        self._family: list[psutil.Process] = []
        self.process = subprocess.Popen(
            spec.argv,
            env={**os.environ, **spec.env},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
            preexec_fn=_end_with_parent,
        )
        assert self.process.stdout is not None and self.process.stderr is not None
        self._readers = [
            threading.Thread(target=self._read, args=(self.process.stdout, on_stdout), daemon=True),
            threading.Thread(target=self._read, args=(self.process.stderr, on_stderr), daemon=True),
        ]
        for reader in self._readers:
            reader.start()

    def _read(self, stream: IO[str], on_line: Listener) -> None:
        """Read one pipe to its end, even if the log can't be written, because a full pipe would block the child."""
        continues = False
        while line := stream.readline(PIECE):
            self.take(line, continues=continues)
            if not continues:
                on_line(line.removesuffix("\n"))
            continues = not line.endswith("\n")

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def exit_code(self) -> int | None:
        return self.process.poll()

    def note_family(self) -> None:
        self._family = []
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(self.process.pid)
            self._family = [process, *process.children(recursive=True)]

    def terminate(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        for relative in self._family:
            with contextlib.suppress(psutil.NoSuchProcess):
                relative.kill()
        self.process.wait()
        psutil.wait_procs(self._family, timeout=KILL_SECONDS)

    def drain(self) -> None:
        for reader in self._readers:
            reader.join(timeout=1.0)
