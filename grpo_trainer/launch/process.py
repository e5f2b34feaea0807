"""One process of a run: its log, its last lines, what it says of itself, and why it ended.

Each process has its own session, so that Ctrl-C reaches only the supervisor. If the supervisor is killed, the kernel
sends each of its processes SIGTERM. `ray_cluster.RemoteProcess` is one that an agent runs on another machine.
"""

from __future__ import annotations

import collections
import contextlib
import os
import re
import shlex
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO

import httpx
import msgspec
import psutil

from grpo_common.processes import end_with_parent, kill_group
from grpo_common.redaction import redacted_arguments, redacted_text
from grpo_common.status import TRAINED, VARIABLE, Notice, Status, parse
from grpo_common.text import printable
from grpo_trainer.errors import ProcessFailedError, from_os_error
from grpo_trainer.launch.plan import ProcessSpec
from grpo_trainer.phases import FIRST_STEP
from grpo_trainer.signals import running_time

LAST_LINES = 25
LOG_CHARACTERS = 64 * 2**20
"""Characters after which a log begins again; a run keeps the part before, so that two such parts are the most."""
PIECE = 2**16
"""Characters of a line that are read at once: a line may have any length."""
START_STOP_SECONDS = 5.0
"""Time to end for a trainer before its first step, which has nothing to save but may be compiling."""
KILL_SECONDS = 1.0
"""Time for the kernel to remove killed processes."""
HELD_SECONDS = 20.0
"""Most seconds to wait for a killed process: a driver or a file system that hangs may hold it for ever."""
POLL_SECONDS = 0.1
STATUS_BYTES = 1 << 20
"""Of a status file, that are read; a whole one has fewer."""

CAUSE, CAUSES = re.compile(r"\b[A-Z]\w*(?:Error|Exception|Failure): \S.*"), 3
"""The first lines that name an exception are shown with the last ones, which may only pass it on. Nothing is decided by
them: vLLM says why its engine died nowhere else."""


class Process:
    """A running process, whose output goes to a log; the last lines are kept for an error.

    `on_line` gets each line, or the first piece of a long one, without its end; True: it is one of stderr.
    """

    def __init__(
        self,
        spec: ProcessSpec,
        log_path: Path,
        on_line: Callable[[str, bool], None] = lambda line, is_error: None,
        last_lines: int = LAST_LINES,
    ) -> None:
        self.spec, self.name, self.log_path = spec, spec.name, log_path
        self.last_lines: collections.deque[str] = collections.deque(maxlen=last_lines)
        self.causes: list[str] = []
        self.log_error: OSError | None = None
        self.ready = spec.ready_url is None
        self.started = running_time()
        self.status = Status()
        self._heard, self._content = 0, b""
        self._on_line = on_line
        self._lock = threading.Lock()
        self._log = log_path.open("a", buffering=1, errors="replace")
        self._log_size = log_path.stat().st_size
        self._write(f"$ {shlex.join(redacted_arguments(spec.argv))}\n")
        self.pid = self._start()

    # where it runs: another machine has other ways ----------------------------------------------------------

    def _start(self) -> int:
        """Start it, and return its id."""
        if status := self.spec.env.get(VARIABLE):
            Path(status).parent.mkdir(parents=True, exist_ok=True)
            Path(status).unlink(missing_ok=True)  # of the process before
        self._family: set[psutil.Process] = set()
        self.popen = subprocess.Popen(
            self.spec.argv,
            env={**os.environ, **self.spec.env},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
            preexec_fn=lambda: end_with_parent(signal.SIGTERM),  # the supervisor
        )
        pipes = (self.popen.stdout, False), (self.popen.stderr, True)
        self._readers = [threading.Thread(target=self._read, args=pipe, daemon=True) for pipe in pipes]
        for reader in self._readers:
            reader.start()
        return self.popen.pid

    @property
    def exit_code(self) -> int | None:
        """Exit code; the negative number of the signal that killed it; None: it runs.

        It stays a zombie until `kill`: another process could get its number, and be killed in its place.
        """
        if self.popen.returncode is not None:
            return self.popen.returncode
        try:
            ended = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:  # another thread is in `kill`
            return self.popen.poll()
        if ended is None:
            return None
        return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status

    def note_family(self) -> None:
        """Note its descendants of this moment, so that `kill` reaches those that leave it later."""
        if self.popen.returncode is not None:
            return
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(self.pid)
            self._family |= {process, *process.children(recursive=True)}

    def terminate(self) -> None:
        """Send SIGTERM."""
        if self.exit_code is None:
            os.kill(self.pid, signal.SIGTERM)  # `Popen.terminate` would wait for one that has ended

    def kill(self) -> None:
        """Kill the rest of its process group and of its family, and wait until they are gone."""
        self.note_family()
        kill_group(self.popen)
        for relative in self._family:
            try:
                relative.kill()
            except psutil.NoSuchProcess:
                pass
            except psutil.AccessDenied:
                self.take(f"process {relative.pid}, which it started, is another user's and can't be killed\n")
        try:
            self.popen.wait(timeout=HELD_SECONDS)
        except subprocess.TimeoutExpired:
            self.take(f"process {self.pid} was killed and is still there after {HELD_SECONDS:g} s\n")
        psutil.wait_procs(self._family, timeout=KILL_SECONDS)

    def drain(self) -> None:
        """Wait for the last lines of a process that has ended, for a second at most."""
        for reader in self._readers:
            reader.join(timeout=1.0)

    def said(self) -> bytes:
        """Return the content of its status file."""
        try:
            with Path(self.spec.env[VARIABLE]).open("rb") as file:
                return file.read(STATUS_BYTES)
        except (KeyError, OSError):
            return b""

    # its log ------------------------------------------------------------------------------------------------

    def _read(self, stream: IO[str], is_error: bool) -> None:
        """Read one pipe to its end, even if the log can't be written, because a full pipe would block the child."""
        continues = False
        while line := stream.readline(PIECE):
            self.take(line, continues=continues)
            if not continues:
                self._on_line(line.removesuffix("\n"), is_error)
            continues = not line.endswith("\n")

    def take(self, line: str, *, continues: bool = False) -> None:
        """Keep a line of its output, or a piece of a long one, which ends without a line feed if more follows.

        A piece that continues a line goes only to the log.
        """
        text = line.removesuffix("\n")
        with self._lock:
            if not continues:
                shown = printable(text)
                self.last_lines.append(shown)
                cause = CAUSE.search(shown)
                if cause and len(self.causes) < CAUSES and cause[0] not in self.causes:
                    self.causes.append(cause[0])
            self._write(printable(text, None) + line[len(text) :])

    def _write(self, text: str) -> None:
        """Write to the log, unless it is closed. The first error goes to `log_error`; nothing is written after it."""
        if self.log_error is not None or self._log.closed:
            return
        try:
            if self._log_size + len(text) > LOG_CHARACTERS and self.log_path.is_file():  # not the null device
                # The present log becomes NAME.log.1, and a new one begins.
                self._log.close()
                self.log_path.replace(self.log_path.with_name(f"{self.log_path.name}.1"))
                self._log, self._log_size = self.log_path.open("w", buffering=1, errors="replace"), 0
            self._log_size += self._log.write(text)
        except OSError as error:
            error.filename = str(self.log_path)
            self.log_error = error

    def check_log(self) -> None:
        """Raise an error if its log could not be written: a `DiskFullError` if the disk is full."""
        if self.log_error is not None:
            raise from_os_error(self.log_error, f"write the log of {self.name}") or self.log_error

    @property
    def progress(self) -> str:
        """The newest line of its log, for people."""
        lines = [line.strip() for line in tuple(self.last_lines)]
        return next((line[:150] for line in reversed(lines) if line), "")

    def last_words(self) -> str:
        """Return the path of its log, the first errors in the log, and its last lines."""
        causes = [cause for cause in self.causes if not any(cause in line for line in self.last_lines)]
        first = (
            "The first errors in it:\n" + "".join(f"  {redacted_text(cause)}\n" for cause in causes) if causes else ""
        )
        lines = "\n".join(f"  {redacted_text(line)}" for line in self.last_lines if line.strip())
        return f"see {self.log_path}. {first}Its last lines:\n{lines or '  (none)'}"

    # its status ---------------------------------------------------------------------------------------------

    def hear(self) -> list[Notice]:
        """Read its status, and return the notices that are new."""
        content = self.said()
        if content != self._content:
            self._content = content
            found = parse(content)
            self.status = found if found is not None and found.pid in (0, self.pid) else self.status
        new = [notice for notice in self.status.notices if notice.number > self._heard]
        if new:
            lost = new[0].number - self._heard - 1  # they left the file before it was read
            new[0] = msgspec.structs.replace(new[0], missed=new[0].missed + lost)
            self._heard = max(notice.number for notice in new)
        return new

    @property
    def may_save(self) -> bool:
        """Whether it is a trainer that has come to its first step, and so may have something to save."""
        return self.status.phase in (FIRST_STEP, TRAINED)

    @property
    def stop_seconds(self) -> float:
        """Seconds to end after SIGTERM: few for a trainer before its first step, which has nothing to save."""
        starts = self.spec.ends_run and self.status.phase and not self.may_save
        return min(self.spec.stop_seconds, START_STOP_SECONDS) if starts else self.spec.stop_seconds

    # its end ------------------------------------------------------------------------------------------------

    def how_it_ended(self) -> str:
        """Return its exit code, or the name of the signal that killed it."""
        code = self.exit_code
        assert code is not None, "it runs"
        return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"

    def ended(self, summary: str = "has ended", wanted: str = "") -> ProcessFailedError:
        """Return the error for a process that has ended, with its exit code or signal and its last lines."""
        self.drain()
        got = self.how_it_ended()
        return ProcessFailedError(summary, field=self.name, got=got, wanted=wanted, fix=self.last_words())

    def not_ready(self, flag: str = "") -> ProcessFailedError:
        """Return the error for a process that does not answer in time, which the option `flag` limits."""
        seconds = f"{self.spec.ready_timeout:.0f} s"
        return ProcessFailedError(
            f"not ready after {seconds}{flag and f' ({flag})'}",
            field=self.name,
            got=f"no answer at {self.spec.ready_url}",
            wanted=f"one within {seconds}",
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

    def end(self, seconds: float) -> None:
        """End it and all that it started: SIGTERM, some seconds, SIGKILL."""
        until = running_time() + seconds
        self.note_family()
        self.terminate()
        while self.exit_code is None and running_time() < until:
            time.sleep(POLL_SECONDS / 2)
        self.kill()
        self.close()

    def close(self) -> None:
        """Wait for the end of its output, and close the log."""
        self.drain()
        with contextlib.suppress(OSError):  # a full disk was reported already
            self._log.close()
