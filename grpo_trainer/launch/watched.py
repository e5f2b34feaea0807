"""One process of a run as its supervisor sees it, wherever it runs: its log, its last lines, and why it ended.

`child.Child` is a process of this machine, `remote.RemoteProcess` one of another node of a Ray cluster.
"""

from __future__ import annotations

import collections
import contextlib
import re
import shlex
import signal
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path

import httpx

from grpo_common.redaction import redacted_arguments, redacted_text
from grpo_common.text import printable
from grpo_trainer import phases
from grpo_trainer.errors import ProcessFailedError
from grpo_trainer.launch.plan import ProcessSpec

LAST_LINES = 25
LOG_CHARACTERS = 64 * 2**20
"""Characters after which a log begins again; a run keeps the part before, so that two such parts are the most."""
START_STOP_SECONDS = 5.0
"""Time to end for a trainer before its first step, which has nothing to save but may be compiling."""

CAUSE = re.compile(r"\b[A-Z]\w*(?:Error|Exception|Failure): \S.*")
"""A log line that names an exception. The first such lines name the cause; later ones only pass it on."""
CAUSES = 3

PROGRESS = re.compile(r"\bINFO\b|\d%")
"""A log line of vLLM that says what it does, unlike its warnings."""

PHASE = re.compile(rf"\b{re.escape(phases.__name__)}: start: (.+)")
"""A log line in which a trainer names the present phase of its start."""

Listener = Callable[[str], None]
"""Gets each line of a process's output, or the first piece of a long one, without its end of line."""


class Watched(ABC):
    """A running process, its log file and its last lines.

    Attributes:
        progress: the last line of its log that says what it does, at most 150 characters; empty: there is none yet.
    """

    def __init__(self, spec: ProcessSpec, log_path: Path, last_lines: int = LAST_LINES) -> None:
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
        self._log_size = log_path.stat().st_size
        self._write(f"$ {shlex.join(redacted_arguments(spec.argv))}\n")

    # what each kind of process does in its own way ----------------------------------------------------------

    @property
    @abstractmethod
    def pid(self) -> int:
        """Process id on its machine."""

    @property
    @abstractmethod
    def exit_code(self) -> int | None:
        """Exit code; the negative number of the signal that killed it; None: it runs."""

    @abstractmethod
    def note_family(self) -> None:
        """Note its descendants of this moment, so that `kill` reaches those that leave it later."""

    @abstractmethod
    def terminate(self) -> None:
        """Send SIGTERM."""

    @abstractmethod
    def kill(self) -> None:
        """Kill the rest of its process group and of the noted family, and wait until they are gone."""

    @abstractmethod
    def drain(self) -> None:
        """Wait for the last lines of a process that has ended, for a second at most."""

    # what is the same for all -------------------------------------------------------------------------------

    def take(self, line: str, *, continues: bool = False) -> None:
        """Keep a line of its output, or a piece of a long one.

        Args:
            line: ends with a line feed, unless more of the same line follows.
            continues: it is not the line's first piece, and only the log has it.
        """
        text = line.removesuffix("\n")
        with self._lock:
            if not continues:
                self._remember(printable(text))
            self._write(printable(text, None) + line[len(text) :])

    def _write(self, text: str) -> None:
        """Write to the log, unless it is closed. The first error goes to `log_error`; nothing is written after it."""
        if self.log_error is None and not self._log.closed:
            try:
                if self._log_size + len(text) > LOG_CHARACTERS:
                    self._rotate()
                self._log_size += self._log.write(text)
            except OSError as error:
                error.filename = str(self.log_path)
                self.log_error = error

    def _rotate(self) -> None:
        """Begin a new log; the present one becomes NAME.log.1, in place of an older one."""
        self._log.close()
        self.log_path.replace(self.log_path.with_name(f"{self.log_path.name}.1"))
        self._log = self.log_path.open("w", buffering=1, errors="replace")
        self._log_size = 0

    def _remember(self, line: str) -> None:
        self.last_lines.append(line)
        if PROGRESS.search(line):
            self.progress = line.strip()[:150]
        if (phase := PHASE.search(line)) is not None:
            self.phase = phase[1], time.monotonic()
        cause = CAUSE.search(line)
        if cause and len(self.causes) < CAUSES and cause[0] not in self.causes:
            self.causes.append(cause[0])

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def stop_seconds(self) -> float:
        """Seconds to end after SIGTERM: few for a trainer before its first step, which has nothing to save."""
        starts = self.spec.ends_run and self.phase is not None and not self.trains
        return min(self.spec.stop_seconds, START_STOP_SECONDS) if starts else self.spec.stop_seconds

    @property
    def trains(self) -> bool:
        """Whether it is a trainer that has come to its first step, and so may have something to save."""
        return self.phase is not None and self.phase[0] == phases.FIRST_STEP

    def how_it_ended(self) -> str:
        """Return its exit code, or the name of the signal that killed it."""
        code = self.exit_code
        assert code is not None, "it runs"
        return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"

    def ended(self) -> ProcessFailedError:
        """Return the error for a process that has ended, with its exit code or signal and its last lines."""
        self.drain()
        return ProcessFailedError("has ended", field=self.name, got=self.how_it_ended(), fix=self.last_words())

    def left(self) -> ProcessFailedError:
        """Return the error for the last environment, which exited with 0 while the trainer still needs rollouts."""
        self.drain()
        return ProcessFailedError(
            "has ended, and the trainer waits for rollouts",
            field=self.name,
            got="exit code 0",
            wanted="rollouts until the trainer's last step",
            fix=self.last_words(),
        )

    def is_ready(self, http: httpx.Client) -> bool:
        """Return whether `ready_url` answers 200.

        Raises:
            ProcessFailedError: it refuses the key (401, 403); it would do so for ever.
        """
        assert self.spec.ready_url is not None, "a process without one is ready when it runs"
        key = self.spec.ready_key
        try:
            status = http.get(
                self.spec.ready_url, headers={"Authorization": f"Bearer {key}"} if key else {}
            ).status_code
        except httpx.HTTPError:
            return False  # not listening yet
        if status in (401, 403):
            raise ProcessFailedError(
                "refuses the request that asks whether it is ready",
                field=self.name,
                got=f"status {status} from {self.spec.ready_url}, asked {'with' if key else 'without'} a key",
                wanted="status 200",
                fix=f"give the key by its own option or variable only, not in the process's own arguments; "
                f"{self.last_words()}",
            )
        return status == 200

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
        first = (
            "The first errors in it:\n" + "".join(f"  {redacted_text(cause)}\n" for cause in causes) if causes else ""
        )
        lines = "\n".join(f"  {redacted_text(line)}" for line in self.last_lines if line.strip())
        return f"see {self.log_path}. {first}Its last lines:\n{lines or '  (none)'}"

    def close(self) -> None:
        """Wait for the end of its output, and close the log."""
        self.drain()
        with contextlib.suppress(OSError):  # a full disk was reported already
            self._log.close()


Executor = Callable[[ProcessSpec, Path, Listener, Listener], Watched]
"""Starts a process of a plan, here (`Child`) or on the node that the plan names (`RayCluster.start`)."""
