"""Starts a plan's processes, waits until they are ready, watches them, and ends every process that it started.

Ctrl-C reaches only the supervisor, which then ends its children in order (`child.py`).
"""

from __future__ import annotations

import collections
import os
import re
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import ClassVar

import httpx

from grpo_common.text import printable
from grpo_trainer.errors import ProcessFailedError, from_os_error
from grpo_trainer.launch.child import Child
from grpo_trainer.launch.crew import Crew
from grpo_trainer.launch.plan import ProcessSpec
from grpo_trainer.launch.start import StartWatch
from grpo_trainer.launch.watched import Executor, Watched
from grpo_trainer.signals import Arrivals, ending_signals

POLL_SECONDS = 0.1
SHUTDOWN_SECONDS = 9.5
"""Most seconds from the first signal until the last child is gone; more only if a process needs longer to save."""

NOTICE = re.compile(
    r"\b(?:WARNING|ERROR)\b|^Timeout \(\d|\bwaiting \d+ s for\b|\bbridge proved\b|\bcheckpoint: saved\b"
)
"""Log lines of trainer and environments that the user should see at once. `Timeout (` is the timer of faulthandler."""

STACK = re.compile(r"  |(?:Thread|Current thread) 0x")
"""Log lines of a stack. They are shown after a notice that ends with a colon, or is that timer's."""

WAITING = re.compile(r"\bwaiting\b")
"""Log lines of processes that wait for a server; they are hidden while the supervisor itself waits for that server."""

WAITS = re.compile(r"\bwaiting \d+ s for a batch\b")
"""The trainer's log line while it has no batch to train on."""


@dataclass
class Notices:
    """Decides which of a process's notices the user sees: `BURST` at once, then one in `PAUSE_SECONDS`.

    An environment may write a warning for each sample.
    """

    BURST: ClassVar[int] = 10
    PAUSE_SECONDS: ClassVar[float] = 5.0
    STACK_LINES: ClassVar[int] = 16
    STACK_CHARACTERS: ClassVar[int] = 200
    left: float = BURST
    missed: int = 0
    at: float = 0.0
    stack: int = 0

    def take(self, now: float) -> int | None:
        """Return how many notices were left out since the last one; None: this one is left out, too."""
        self.left, self.at = min(self.BURST, self.left + (now - self.at) / self.PAUSE_SECONDS), now
        if self.left < 1:
            self.missed += 1
            return None
        self.left -= 1
        missed, self.missed = self.missed, 0
        return missed

    def follows(self, line: str) -> bool:
        """Return whether a line belongs to the stack after the last notice, of which the first lines are shown."""
        self.stack = self.stack - 1 if self.stack and STACK.match(line) else 0
        return self.stack > 0


class Supervisor:
    """Owns the processes of one run. Use as a context manager: its exit ends every child.

    Args:
        log_folder: each process has its NAME.log there.
        say: shows a line about a process to the user.
        echo: shows a line that the process with `ends_run` wrote to its stdout.
        watch: follows the start, which ends with the first trained step.
        check: raises an error that ends the run, for example if the run's folder is gone.
        show: shows the run's progress; called many times a second, and once after the end.
        execute: starts a process; by default as a child of this one.
        crew: decides which processes restart; by default none.
        saves: a trainer that is stopped saves a checkpoint.
    """

    def __init__(
        self,
        log_folder: Path,
        say: Callable[[str], None],
        echo: Callable[[str], None],
        watch: StartWatch | None = None,
        check: Callable[[], None] = lambda: None,
        show: Callable[[], None] = lambda: None,
        execute: Executor = Child,
        crew: Crew | None = None,
        saves: bool = True,
    ) -> None:
        self.children: list[Watched] = []
        self._log_folder = log_folder
        self._say = say
        self._echo = echo
        self._watch = watch
        self._check_run = check
        self._show = show
        self._execute = execute
        self._crew = crew or Crew()
        self._saves = saves
        self._waits = False
        self._unheard = False
        self._signals = Arrivals()
        self._handlers: dict[int, signal._HANDLER] = {}

    def __enter__(self) -> Supervisor:
        for number in ending_signals():
            self._handlers[number] = signal.signal(number, self._on_signal)
        self._log_folder.mkdir(parents=True, exist_ok=True)
        return self

    def __exit__(self, *_: object) -> None:
        self.stop_all()
        self._show_progress()
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        self._signals.add(number)

    def run(self, stages: Sequence[Sequence[ProcessSpec]]) -> None:
        """Start each stage when the stage before is ready, and watch all processes until that with `ends_run` is done.

        Raises:
            ProcessFailedError: a process ended unexpectedly, or was not ready in time.
            StoppedError: a signal arrived.
            DiskFullError: a log could not be written.
        """
        later = collections.deque(stages)
        with httpx.Client(timeout=1.0, trust_env=False) as http:
            while not any(child.spec.ends_run and child.exit_code == 0 for child in self.children):
                if later and not self._unready:
                    for spec in later.popleft():
                        self.start(spec)
                self._check()
                for specs in self._crew.due():
                    self._start_again(specs)
                self._crew.tend(self.children)
                for child in self._unready:
                    self._look(child, http)
                self._show_progress()
                time.sleep(POLL_SECONDS)

    def start(self, spec: ProcessSpec) -> Watched:
        """Start one process, to be watched and ended with the others."""

        def on_stdout(line: str) -> None:
            if spec.ends_run:
                self._tell(self._echo, printable(line))

        notices = Notices()

        def on_stderr(line: str) -> None:
            self._waits |= spec.ends_run and WAITS.search(line) is not None
            if notices.follows(line):
                self._tell(self._say, f"{spec.name}: {printable(line, Notices.STACK_CHARACTERS)}")
            elif spec.ready_url is None and NOTICE.search(line) and not (self._unready and WAITING.search(line)):
                log = self._log_folder / f"{spec.name}.log"
                if (missed := notices.take(time.monotonic())) is not None:
                    before = f"; {missed} warnings before it are not shown" if missed else ""
                    goes_on = line.endswith(":") or line.startswith("Timeout (")
                    notices.stack = Notices.STACK_LINES + 1 if goes_on else 0
                    more = f" (in {log}{before})" if missed or goes_on else ""
                    self._tell(self._say, f"{spec.name}: {printable(line)}{more}")

        child = self._execute(spec, self._log_folder / f"{spec.name}.log", on_stdout, on_stderr)
        self.children.append(child)
        self._crew.started(spec)
        self._tell(self._say, f"{spec.name}: started (log: {child.log_path})")
        return child

    def _tell(self, show: Callable[..., None], *line: str) -> None:
        """Show a line. Once the output is closed (`grpo run | head`), show no more; the run and its logs continue."""
        if self._unheard:
            return
        try:
            show(*line)
        except (OSError, SystemExit):  # rich turns a broken pipe into SystemExit
            self._unheard = True

    def _check(self) -> None:
        """Raise an error if anything ends the run early."""
        self._signals.check()
        self._check_run()
        for child in self.children:
            if child.log_error is not None:
                raise from_os_error(child.log_error, f"write the log of {child.name}") or child.log_error
        for child in self.children:
            if child.exit_code == 0 and child.spec.may_end and not child.told_end:
                child.told_end = True
                self._waits = False  # its last rollouts may complete the batch that the trainer waits for
                self._tell(self._say, f"{child.name}: has ended (log: {child.log_path})")
        ended = [child for child in self.children if child.exit_code is not None and not self._as_planned(child)]
        if ended:
            # Blame a killed process first: one that ended with an error at the same moment may have failed because
            # of it. Blame one that has lost another process of the trainer last.
            culprit = min(ended, key=_blame)
            self._replace(culprit, culprit.ended)
        environments = [child for child in self.children if child.name.startswith("env-")]
        waits_in_vain = self._waits and environments and all(child.told_end for child in environments)
        if waits_in_vain and not self._crew.expects("env-"):
            raise environments[-1].left()

    def _replace(self, culprit: Watched, error: Callable[[], ProcessFailedError]) -> None:
        """Take a process that failed, and those that restart with it, out of the run; they start again later.

        Raises:
            ProcessFailedError: it does not restart.
        """
        group = self._crew.lost(culprit, self.children)
        if group is None:
            raise error()
        self._take_out(group)
        self._waits = False

    def _start_again(self, specs: Sequence[ProcessSpec]) -> None:
        """Start processes that belong together; if one can't be started, all start later.

        Raises:
            ProcessFailedError: they could not be started several times.
        """
        begun: list[Watched] = []
        try:
            for spec in specs:
                begun.append(self.start(spec))
        except ProcessFailedError:
            if not self._crew.put_off(specs):
                raise
            self._take_out(begun)

    def _take_out(self, group: Sequence[Watched]) -> None:
        """Kill what is left of processes, and forget them."""
        for child in group:
            child.note_family()
            child.kill()
            child.close()
            self.children.remove(child)

    @staticmethod
    def _as_planned(child: Watched) -> bool:
        return child.exit_code == 0 and (child.spec.may_end or child.spec.ends_run)

    @property
    def _unready(self) -> list[Watched]:
        return [child for child in self.children if not child.ready]

    def _look(self, child: Watched, http: httpx.Client) -> None:
        """Check whether a server answers, and record it as ready if so.

        Raises:
            ProcessFailedError: it does not answer, and its time is up; or it refuses the key.
        """
        seconds = time.monotonic() - child.started
        child.ready = child.is_ready(http)
        if child.ready:
            self._tell(self._say, f"{child.name}: ready after {seconds:.1f} s")
            if self._watch is not None:
                self._watch.note_ready(child.name, seconds)
        elif seconds > child.spec.ready_timeout:
            child.terminate()
            self._replace(child, child.not_ready)

    def _show_progress(self) -> None:
        if self._watch is not None:
            self._watch.look(self.children)
        self._tell(self._show)

    def stop_all(self) -> None:
        """End every child: first trainers and environments, then the servers that they use.

        Each gets SIGTERM and its time to stop; what is left of its process group or its descendants is then killed.
        This takes at most `SHUTDOWN_SECONDS`, or the longest `stop_seconds`. A second signal to the supervisor kills at
        once.
        """
        if self._signals.numbers:
            saves = self._saves and any(child.trains for child in self.children)
            first = "the trainer saves a checkpoint, then " if saves else ""
            self._tell(
                self._say, f"stopping ({signal.Signals(self._signals.numbers[0]).name}): {first}all processes end"
            )
        for child in self.children:
            child.note_family()
        longest = max((child.stop_seconds for child in self.children), default=0.0)
        deadline = time.monotonic() + max(SHUTDOWN_SECONDS, longest)
        workers = [child for child in self.children if child.spec.ready_url is None]
        servers = [child for child in self.children if child.spec.ready_url is not None]
        for group in (workers, servers):
            for child in group:
                child.terminate()
            patience = max((child.stop_seconds for child in group), default=0.0)
            until = min(deadline, time.monotonic() + patience)
            while any(child.exit_code is None for child in group):
                if time.monotonic() > until or len(self._signals.numbers) >= 2:
                    break
                time.sleep(POLL_SECONDS / 2)
        for child in self.children:
            child.kill()
            child.close()
        self.children.clear()


def _blame(child: Watched) -> tuple[bool, bool, bool]:
    """Return a key by which those that failed first come first."""
    return (child.exit_code or 0) >= 0, child.exit_code == os.EX_TEMPFAIL, child.spec.ends_run
