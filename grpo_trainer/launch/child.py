"""One process of a run: its log, its last lines, the phase of its start that it reports, and its end.

Each child runs in its own session, so that Ctrl-C reaches only the supervisor. If the supervisor is killed, the kernel
sends each child SIGTERM.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO

import psutil

from grpo_trainer import phases
from grpo_trainer.errors import ProcessFailedError
from grpo_trainer.launch.plan import ProcessSpec

LAST_LINES = 25
START_STOP_SECONDS = 5.0
"""Time to end for a trainer before its first step, which has nothing to save but may be compiling."""

CAUSE = re.compile(r"\b[A-Z]\w*(?:Error|Exception|Failure): \S.*")
"""A log line that names an exception. The first such lines name the cause; later ones only pass it on."""
CAUSES = 3

PROGRESS = re.compile(r"\bINFO\b|\d%")
"""A log line of vLLM that says what it does, unlike its warnings."""

PHASE = re.compile(rf"\b{re.escape(phases.__name__)}: start: (.+)")
"""A log line in which a trainer names the present phase of its start."""

KILL_SECONDS = 1.0
"""Time for the kernel to remove killed processes."""

_LIBC = ctypes.CDLL(None, use_errno=True)
_PR_SET_PDEATHSIG = 1


def _end_with_parent() -> None:
    """In the child, before exec: ask the kernel for SIGTERM when the supervisor dies."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


class Child:
    """A running process, its log file and its last lines.

    Attributes:
        progress: the last line of its log that says what it does, at most 150 characters; empty: there is none yet.
    """

    def __init__(
        self,
        spec: ProcessSpec,
        log_path: Path,
        on_stdout: Callable[[str], None],
        on_stderr: Callable[[str], None],
        last_lines: int = LAST_LINES,
    ) -> None:
        self.spec = spec
        self.log_path = log_path
        self.last_lines: collections.deque[str] = collections.deque(maxlen=last_lines)
        self.causes: list[str] = []
        self.progress = ""
        self.log_error: OSError | None = None
        self.ready = spec.ready_url is None
        self.phase: tuple[str, float] | None = None
        self.told_end = False
        self.started = time.monotonic()
        self._lock = threading.Lock()
        self._log = log_path.open("a", buffering=1, errors="replace")
        self._log.write(f"$ {' '.join(spec.argv)}\n")
        self.process = subprocess.Popen(
            spec.argv,
            env={**os.environ, **spec.env},
            stdin=subprocess.PIPE if spec.told else subprocess.DEVNULL,
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

    def _read(self, stream: IO[str], on_line: Callable[[str], None]) -> None:
        """Read one pipe to its end, even if the log can't be written, because a full pipe would block the child."""
        for line in stream:
            with self._lock:
                self._remember(line.rstrip("\n"))
                self._write(line)
            on_line(line.rstrip("\n"))

    def _write(self, text: str) -> None:
        """Write to the log. The first error goes to `log_error`, and nothing is written after it."""
        if self.log_error is None:
            try:
                self._log.write(text)
            except OSError as error:
                error.filename = str(self.log_path)
                self.log_error = error

    def _remember(self, line: str) -> None:
        self.last_lines.append(line)
        if PROGRESS.search(line):
            self.progress = line.strip()[:150]
        if (phase := PHASE.search(line)) is not None:
            self.phase = phase[1], time.monotonic()
        cause = CAUSE.search(line)
        if cause and len(self.causes) < CAUSES and cause[0] not in self.causes:
            self.causes.append(cause[0])

    def tell(self, spec: ProcessSpec, line: str) -> None:
        """Send a standby process the line that it waits for; from now on it is the process of `spec`.

        Raises:
            BrokenPipeError: the standby process has ended.
        """
        assert self.spec.told and self.process.stdin is not None, "it was not started to be told anything"
        with self.process.stdin as stdin:
            stdin.write(f"{line}\n")
        self.spec = spec
        self.started = time.monotonic()
        with self._lock:
            self._write(f"$ {' '.join(spec.argv)}\n")

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def exit_code(self) -> int | None:
        return self.process.poll()

    @property
    def stop_seconds(self) -> float:
        """Seconds to end after SIGTERM: few for a trainer before its first step, which has nothing to save."""
        starts = self.spec.ends_run and self.phase is not None and not self.trains
        return min(self.spec.stop_seconds, START_STOP_SECONDS) if starts else self.spec.stop_seconds

    @property
    def trains(self) -> bool:
        """Whether it is a trainer that has come to its first step, and so may have something to save."""
        return self.phase is not None and self.phase[0] == phases.FIRST_STEP

    def ended(self) -> ProcessFailedError:
        """Return the error for a process that has ended, with its exit code or signal and its last lines."""
        for reader in self._readers:
            reader.join(timeout=1.0)
        code = self.process.returncode
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return ProcessFailedError("has ended", field=self.name, got=how, fix=self.last_words())

    def left(self) -> ProcessFailedError:
        """Return the error for the last environment, which exited with 0 while the trainer still needs rollouts."""
        return ProcessFailedError(
            "has ended, and the trainer waits for rollouts",
            field=self.name,
            got="exit code 0",
            wanted="rollouts until the trainer's last step",
            fix=self.last_words(),
        )

    def not_ready(self, flag: str = "") -> ProcessFailedError:
        """Return the error for a process that does not answer in time.

        Args:
            flag: the option that sets the time limit.
        """
        seconds = f"{self.spec.ready_timeout:.0f} s"
        return ProcessFailedError(
            f"not ready after {seconds}{flag and f' ({flag})'}",
            field=self.name,
            got=f"no answer at {self.spec.ready_url}",
            wanted=f"one within {seconds}",
            fix=self.last_words(),
        )

    def last_words(self) -> str:
        """Return the path of its log, the first errors in the log, and its last lines."""
        causes = [cause for cause in self.causes if not any(cause in line for line in self.last_lines)]
        first = "The first errors in it:\n" + "".join(f"  {cause}\n" for cause in causes) if causes else ""
        lines = "\n".join(f"  {line}" for line in self.last_lines if line.strip())
        return f"see {self.log_path}. {first}Its last lines:\n{lines or '  (none)'}"

    def family(self) -> list[psutil.Process]:
        """Return the process and all its descendants, including those that have left its process group."""
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(self.process.pid)
            return [process, *process.children(recursive=True)]
        return []

    def terminate(self) -> None:
        """Send SIGTERM."""
        if self.process.poll() is None:
            self.process.terminate()

    def kill_group(self, family: Sequence[psutil.Process]) -> None:
        """Kill the rest of its process group and of the given family, and wait until they are gone."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        for relative in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                relative.kill()
        self.process.wait()
        psutil.wait_procs(family, timeout=KILL_SECONDS)

    def close(self) -> None:
        """Wait for the end of its output, and close the log."""
        if self.process.stdin is not None:
            self.process.stdin.close()
        for reader in self._readers:
            reader.join(timeout=1.0)
        with contextlib.suppress(OSError):  # a full disk was reported already
            self._log.close()
