"""Starts a plan's processes, waits until they are ready, watches them, and ends all that it started.

Children run in sessions of their own, so that Ctrl-C reaches only the supervisor, which then ends them in order. Should
the supervisor itself be killed, the kernel sends each child SIGTERM.
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
from types import FrameType, TracebackType
from typing import IO

import httpx
import psutil

from grpo_trainer.errors import ProcessFailedError, StoppedError, from_os_error
from grpo_trainer.launch.plan import ProcessSpec

POLL_SECONDS = 0.1
LAST_LINES = 25
SHUTDOWN_SECONDS = 9.5
"""From the first signal until the last child is gone, at most; longer only where a process needs longer to save."""

CAUSE = re.compile(r"\b[A-Z]\w*(?:Error|Exception|Failure): \S.*")
"""A line that names an exception: the first ones tell more than the last, which only report them upwards."""
CAUSES = 3

NOTICE = re.compile(r"\b(?:WARNING|ERROR)\b|\bwaiting \d+ s for\b|\bbridge proved\b")
"""Lines in the logs of trainer and environments that their user should see at once."""

KILL_SECONDS = 1.0
"""For the kernel to clear away what was killed."""

_LIBC = ctypes.CDLL(None, use_errno=True)
_PR_SET_PDEATHSIG = 1


def _end_with_parent() -> None:
    """In the child, before exec: ask the kernel for SIGTERM when the supervisor dies."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


class Child:
    """A running process, its log file and its last lines."""

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
        self.log_error: OSError | None = None
        self.ready = False
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
        """Drain one pipe to the end, whatever happens to the log: a full pipe would block the child."""
        for line in stream:
            with self._lock:
                self._remember(line.rstrip("\n"))
                self._write(line)
            on_line(line.rstrip("\n"))

    def _write(self, text: str) -> None:
        """To the log; the first error is kept for whoever watches, and ends that."""
        if self.log_error is None:
            try:
                self._log.write(text)
            except OSError as error:
                error.filename = str(self.log_path)
                self.log_error = error

    def _remember(self, line: str) -> None:
        self.last_lines.append(line)
        cause = CAUSE.search(line)
        if cause and len(self.causes) < CAUSES and cause[0] not in self.causes:
            self.causes.append(cause[0])

    def tell(self, spec: ProcessSpec, line: str) -> None:
        """Have a process that waits for a line go on as another one, which starts now.

        Raises:
            BrokenPipeError: it has ended.
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

    def ended(self) -> ProcessFailedError:
        """Return the error for a process that has ended: how it did, with its last lines."""
        for reader in self._readers:
            reader.join(timeout=1.0)
        code = self.process.returncode
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return ProcessFailedError("has ended", field=self.name, got=how, fix=self.last_words())

    def not_ready(self, flag: str = "") -> ProcessFailedError:
        """Return the error for a process that does not answer in time.

        Args:
            flag: the option that sets the time.
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
        """Return where its log is, the first errors in it, and its last lines."""
        causes = [cause for cause in self.causes if not any(cause in line for line in self.last_lines)]
        first = "The first errors in it:\n" + "".join(f"  {cause}\n" for cause in causes) if causes else ""
        lines = "\n".join(f"  {line}" for line in self.last_lines if line.strip())
        return f"see {self.log_path}. {first}Its last lines:\n{lines or '  (none)'}"

    def family(self) -> list[psutil.Process]:
        """The process and all its descendants, also those that left its process group."""
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(self.process.pid)
            return [process, *process.children(recursive=True)]
        return []

    def terminate(self) -> None:
        """Ask it to end."""
        if self.process.poll() is None:
            self.process.terminate()

    def kill_group(self, family: Sequence[psutil.Process]) -> None:
        """End what is left of its process group and of the given relatives, and see them gone."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        for relative in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                relative.kill()
        self.process.wait()
        psutil.wait_procs(family, timeout=KILL_SECONDS)

    def close(self) -> None:
        """Wait for the end of its output and close the log."""
        if self.process.stdin is not None:
            self.process.stdin.close()
        for reader in self._readers:
            reader.join(timeout=1.0)
        with contextlib.suppress(OSError):  # a full disk was reported already
            self._log.close()


class Supervisor:
    """Owns the processes of one run. Use as a context manager: leaving it ends every child.

    Args:
        log_folder: each process writes to NAME.log there.
        say: shows a line of progress to the user.
        echo: shows a line that the process with `ends_run` wrote to its stdout.
    """

    def __init__(self, log_folder: Path, say: Callable[[str], None], echo: Callable[[str], None]) -> None:
        self.children: list[Child] = []
        self._log_folder = log_folder
        self._say = say
        self._echo = echo
        self._unheard = False
        self._signals: list[int] = []
        self._handlers: dict[int, signal._HANDLER] = {}

    def __enter__(self) -> Supervisor:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            self._handlers[number] = signal.signal(number, self._on_signal)
        self._log_folder.mkdir(parents=True, exist_ok=True)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.stop_all()
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        self._signals.append(number)

    def run(self, stages: Sequence[Sequence[ProcessSpec]]) -> None:
        """Start stage after stage, then watch until the process with `ends_run` is done.

        Raises:
            ProcessFailedError: a process ended that should not have, or was not ready in time.
            StoppedError: a signal came.
            DiskFullError: a log could not be written.
        """
        for stage in stages:
            started = [self.start(spec) for spec in stage]
            self._wait_ready(started)
        while not any(child.spec.ends_run and child.exit_code == 0 for child in self.children):
            self._check()
            time.sleep(POLL_SECONDS)

    def start(self, spec: ProcessSpec) -> Child:
        """Start one process; it is watched, and ended with the others."""

        def on_stdout(line: str) -> None:
            if spec.ends_run:
                self._tell(self._echo, line)

        def on_stderr(line: str) -> None:
            if spec.ready_url is None and NOTICE.search(line):
                self._tell(self._say, f"{spec.name}: {line}")

        child = Child(spec, self._log_folder / f"{spec.name}.log", on_stdout, on_stderr)
        self.children.append(child)
        return child

    def _tell(self, show: Callable[[str], None], line: str) -> None:
        """Show a line, unless nobody is there any more (`grpo run | head`): the run goes on, its logs are complete."""
        if self._unheard:
            return
        try:
            show(line)
        except (OSError, SystemExit):  # rich turns a broken pipe into SystemExit
            self._unheard = True

    def _check(self) -> None:
        """Raise for whatever ends the run early."""
        if self._signals:
            number = self._signals[0]
            raise StoppedError(f"stopped by {signal.Signals(number).name}", number)
        for child in self.children:
            if child.log_error is not None:
                raise from_os_error(child.log_error, f"write the log of {child.name}") or child.log_error
        for child in self.children:
            if child.exit_code == 0 and child.spec.may_end and not child.told_end:
                child.told_end = True
                self._tell(self._say, f"{child.name}: has ended (log: {child.log_path})")
        ended = [child for child in self.children if child.exit_code is not None and not self._as_planned(child)]
        if ended:
            # A process that was killed is the cause; one that ended with an error in the same moment may be its victim.
            culprit = min(ended, key=lambda child: (child.process.returncode >= 0, child.spec.ends_run))
            raise culprit.ended()

    @staticmethod
    def _as_planned(child: Child) -> bool:
        return child.exit_code == 0 and (child.spec.may_end or child.spec.ends_run)

    def _wait_ready(self, started: Sequence[Child]) -> None:
        begun = time.monotonic()
        said = 0.0
        with httpx.Client(timeout=1.0, trust_env=False) as http:
            while waiting := [child for child in started if not child.ready]:
                self._check()
                now = time.monotonic()
                for child in waiting:
                    child.ready = child.spec.ready_url is None or answers(http, child.spec.ready_url)
                    if child.ready:
                        self._tell(
                            self._say, f"{child.name}: ready after {now - child.started:.1f} s (log: {child.log_path})"
                        )
                    elif now - child.started > child.spec.ready_timeout:
                        child.terminate()
                        raise child.not_ready()
                if now - begun - said >= 10.0 and (late := [child for child in started if not child.ready]):
                    said = now - begun
                    for child in late:
                        last = next((line for line in reversed(child.last_lines) if line.strip()), "nothing said yet")
                        self._tell(
                            self._say, f"{child.name}: starting, {now - child.started:.0f} s: {last.strip()[:150]}"
                        )
                time.sleep(POLL_SECONDS)

    def stop_all(self) -> None:
        """End every child: those that work for the run first, then the servers that they use.

        Each gets SIGTERM and its time; whatever is left of its process group or its descendants is killed. Takes at
        most `SHUTDOWN_SECONDS`, or the longest time of a process; a second signal to the supervisor kills at once.
        """
        families = {child: child.family() for child in self.children}
        longest = max((child.spec.stop_seconds for child in self.children), default=0.0)
        deadline = time.monotonic() + max(SHUTDOWN_SECONDS, longest)
        workers = [child for child in self.children if child.spec.ready_url is None]
        servers = [child for child in self.children if child.spec.ready_url is not None]
        for group in (workers, servers):
            for child in group:
                child.terminate()
            patience = max((child.spec.stop_seconds for child in group), default=0.0)
            until = min(deadline, time.monotonic() + patience)
            while any(child.exit_code is None for child in group):
                if time.monotonic() > until or len(self._signals) >= 2:
                    break
                time.sleep(POLL_SECONDS / 2)
        for child in self.children:
            child.kill_group(families[child])
            child.close()
        self.children.clear()


def answers(http: httpx.Client, url: str) -> bool:
    """Whether a GET gets 200."""
    try:
        return http.get(url).status_code == 200
    except httpx.HTTPError:
        return False  # not listening yet: that is what is being waited for
