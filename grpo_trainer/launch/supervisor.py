"""Starts a plan's processes, waits until they are ready, watches and restarts them, and ends all that it started.

One table has a row for each process of the run, with its state. Ctrl-C reaches only the supervisor, which then ends the
processes in order.

Nothing restarts before the first trained step: a process that fails during the start has an error that the user should
see at once. Afterwards a process restarts up to `--max-restarts` times in a row, each time after a longer pause.
"""

from __future__ import annotations

import collections
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import httpx

from grpo_common.status import LINES, TRAINED
from grpo_common.text import printable
from grpo_trainer.errors import ProcessFailedError
from grpo_trainer.launch.fleet import Fleet, Row
from grpo_trainer.launch.plan import TRAINERS, ProcessSpec, started_again
from grpo_trainer.launch.process import POLL_SECONDS, Process
from grpo_trainer.launch.replan import Replanner
from grpo_trainer.phases import IN_WORDS, LOGGED, PATIENCE_SECONDS, SERVER, STARTING, Wait
from grpo_trainer.signals import Arrivals, ending_signals, running_time

SHUTDOWN_SECONDS = 9.5
"""Most seconds from the first signal until the last process is gone; more only if one needs longer to save."""
LONGEST_NOTICE = 600
"""Characters of a line of a notice. The process has cut it already, and said how much; but it may write anything."""
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 1.0, 60.0
"""Before the first restart, and before any."""
IN_A_ROW_SECONDS = 600.0
"""After a process was ready and has run for longer than this, its count of restarts begins at 0 again."""
PLACE_SECONDS = 2.0
"""Between two attempts to start a process that has no machine, or could not be started."""


class Supervisor:
    """Owns the processes of one run. Use as a context manager: its exit ends every process.

    Args:
        log_folder: each process has its NAME.log there.
        say: shows a line about a process to the user.
        echo: shows a line that the process with `ends_run` wrote to its stdout.
        check: raises an error that ends the run, for example if the run's folder is gone.
        show: shows the run's progress; called many times a second, and once after the end.
        max_restarts: of a process in a row; 0: any process that ends, ends the run.
        has_checkpoint: returns whether trainers can continue from a checkpoint.
        servers: the run's folder of servers, where they may change; None: they stay.
        replanner: says where processes start again; None: where they were, and no server is added.
        saves: a trainer that is stopped saves a checkpoint.
    """

    def __init__(
        self,
        log_folder: Path,
        say: Callable[[str], None],
        echo: Callable[[str], None],
        *,
        check: Callable[[], None] = lambda: None,
        show: Callable[[], None] = lambda: None,
        start: Callable[[ProcessSpec, Path, Callable[[str, bool], None]], Process] = Process,
        max_restarts: int = 0,
        has_checkpoint: Callable[[], bool] = lambda: False,
        servers: Path | None = None,
        replanner: Replanner | None = None,
        saves: bool = True,
    ) -> None:
        self.table: dict[str, Row] = {}
        self.begun = False  # the first step is trained
        self.waits: tuple[Wait, ...] = ()  # what the processes do now, until then
        self._log_folder = log_folder
        self._say, self._echo, self._show = say, echo, show
        self._check_run, self._has_checkpoint = check, has_checkpoint
        self._start, self._saves, self._most, self._replanner = start, saves, max_restarts, replanner
        self._fleet = None if servers is None else Fleet(servers, self.table, replanner)
        self._restarts: collections.Counter[str] = collections.Counter()
        self._starved_since: float | None = None
        self._unheard = False
        self._signals = Arrivals()
        self._handlers: dict[int, signal._HANDLER] = {}

    def __enter__(self) -> Supervisor:
        for number in ending_signals():
            self._handlers[number] = signal.signal(number, lambda arrived, _: self._signals.add(arrived))
        self._log_folder.mkdir(parents=True, exist_ok=True)
        return self

    def __exit__(self, *_: object) -> None:
        self.stop_all()
        self._tell(self._show)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def _tell(self, show: Callable[..., None], *line: str) -> None:
        """Show a line. Once the output is closed (`grpo run | head`), show no more; the run and its logs continue."""
        if self._unheard:
            return
        try:
            show(*line)
        except (OSError, SystemExit):  # rich turns a broken pipe into SystemExit
            self._unheard = True

    # start and watch ----------------------------------------------------------------------------------------

    def run(self, stages: Sequence[Sequence[ProcessSpec]]) -> None:
        """Start each stage when the stage before is ready, and watch all processes until that with `ends_run` is done.

        Raises:
            ProcessFailedError: a process ended unexpectedly, or was not ready in time.
            StoppedError: a signal arrived.
            DiskFullError: a log could not be written.
        """
        later = collections.deque(stages)
        with httpx.Client(timeout=1.0, trust_env=False) as http:
            while not any(process.spec.ends_run and process.exit_code == 0 for process in self.processes):
                if later and not self._unready:
                    for spec in later.popleft():
                        self.start(spec)
                self._hear()
                self._check()
                self._start_due()
                if self._fleet is not None:
                    self._fleet.tend(self._tell_user)
                for row, process in self._unready:
                    self._ask(row, process, http)
                self._tell(self._show)
                time.sleep(POLL_SECONDS)

    @property
    def processes(self) -> list[Process]:
        """Those that run, or have ended as planned."""
        return [process for _, process in self._running]

    @property
    def _running(self) -> list[tuple[Row, Process]]:
        return [(row, row.process) for row in self.table.values() if row.process is not None]

    @property
    def _unready(self) -> list[tuple[Row, Process]]:
        return [(row, process) for row, process in self._running if not process.ready]

    def _tell_user(self, line: str) -> None:
        self._tell(self._say, line)

    def start(self, spec: ProcessSpec) -> Process:
        """Start one process, to be watched and ended with the others."""

        def on_line(line: str, is_error: bool) -> None:
            if spec.ends_run and not is_error:
                self._tell(self._echo, printable(line))

        row = self.table.setdefault(spec.name, Row(spec))
        again = started_again(spec, row.boots) if row.boots else spec
        process = self._start(again, self._log_folder / f"{spec.name}.log", on_line)
        row.spec, row.process, row.boots = spec, process, row.boots + 1
        row.state = "running" if process.ready else "starting" if row.boots == 1 else "restarting"
        self._tell_user(f"{spec.name}: started (log: {process.log_path})")
        return process

    def _hear(self) -> None:
        """Show the notices of all processes, and note how far the trainer is."""
        for process in self.processes:
            self._show_notices(process)
        trainers = [process for process in self.processes if process.spec.ends_run]
        if not self.begun and any(process.status.phase == TRAINED for process in trainers):
            self.begun = True
        self.waits = () if self.begun else tuple(self._present_waits())

    def _show_notices(self, process: Process) -> None:
        for notice in process.hear():
            if notice.waits and self._unready:
                continue  # the supervisor waits for the same, and says so
            first, *stack = notice.text.split("\n")[:LINES]
            before = f"; {notice.missed} warnings before it are not shown" if notice.missed else ""
            more = f" (in {process.log_path}{before})" if stack or before else ""
            self._tell_user(f"{process.name}: {printable(first, LONGEST_NOTICE)}{more}")
            for line in stack:
                self._tell_user(f"{process.name}: {printable(line, LONGEST_NOTICE)}")

    def _present_waits(self) -> Iterator[Wait]:
        """Yield what servers that are not ready, and the trainer, do now."""
        for process in self.processes:
            seconds = running_time() - process.started
            if not process.ready:
                yield Wait(process.name, STARTING, seconds, process.progress)
            elif process.spec.ends_run:
                phase = printable(process.status.phase)
                if phase == SERVER and any(name.startswith("server") for name in self.table):
                    continue  # that server's own wait covers it
                seconds = time.time() - process.status.since if phase else seconds
                yield Wait(process.name, IN_WORDS.get(phase, phase) or STARTING, seconds, logged=phase in LOGGED)

    def _check(self) -> None:
        """Handle processes that have ended; raise an error if anything ends the run early."""
        self._signals.check()
        self._check_run()
        failed: list[tuple[tuple[bool, bool, bool], Row]] = []
        for row, process in self._running:
            process.check_log()
            if (code := process.exit_code) is None or row.state == "ended":
                continue
            if code == 0 and process.spec.may_end:
                row.state = "ended"
                self._tell_user(f"{process.name}: has ended (log: {process.log_path})")
            elif not (code == 0 and process.spec.ends_run):
                # A killed process comes first: one that ended with an error at the same moment may have failed because
                # of it. One that has lost another process of the trainer comes last.
                failed.append(((code >= 0, code == os.EX_TEMPFAIL, process.spec.ends_run), row))
        if failed:
            self._lose(min(failed, key=lambda each: each[0])[1])
        self._check_supply()

    def _check_supply(self) -> None:
        """Raise an error if the trainer waits for a batch that no environment will send."""
        environments = [row for row in self.table.values() if row.spec.name.startswith("env-")]
        over = environments and all(row.state == "ended" for row in environments)
        settled = all(row.state in ("running", "ended") for row in self.table.values())
        if not (over and settled and any(process.status.lacks_batch for process in self.processes)):
            self._starved_since = None
            return
        # The last rollouts may complete a batch, and the trainer needs a moment to fetch it.
        self._starved_since = self._starved_since or running_time()
        if running_time() - self._starved_since > PATIENCE_SECONDS:
            last = environments[-1].process
            assert last is not None, "it has ended"
            summary, wanted = "has ended, and the trainer waits for rollouts", "rollouts until the trainer's last step"
            raise last.ended(summary, wanted)

    def _ask(self, row: Row, process: Process, http: httpx.Client) -> None:
        """Check whether a server answers, and record it as ready if so.

        Raises:
            ProcessFailedError: it does not answer, and its time is up; or it refuses the key.
        """
        seconds = running_time() - process.started
        process.ready = process.is_ready(http)
        if process.ready:
            row.state = "running" if row.state in ("starting", "restarting") else row.state
            self._tell_user(f"{process.name}: ready after {seconds:.1f} s")
        elif seconds > process.spec.ready_timeout:
            process.terminate()
            self._lose(row, late=True)

    # restart ------------------------------------------------------------------------------------------------

    def _lose(self, row: Row, *, late: bool = False) -> None:
        """Take a process that failed, and those that restart with it, out of the run; they start again later.

        One that is late was not ready in time; the signal for that may have ended it already.

        Raises:
            ProcessFailedError: it does not restart.
        """
        process, spec = row.process, row.spec
        assert process is not None, "it has failed"
        self._show_notices(process)
        if row.state in ("leaving", "ending"):
            self._give_up([row])
            self._tell_user(f"{spec.name}: has left")
            return
        how = "not ready in time" if late else process.how_it_ended()
        if process.ready and running_time() - process.started > IN_A_ROW_SECONDS:
            self._restarts[spec.restarts] = 0
        done = self._restarts[spec.restarts]
        may_restart = self._may_restart(process)
        if may_restart and done >= self._most and self._fleet is not None and self._fleet.has_another(row):
            self._give_up([row])
            log = f"(log: {process.log_path})"
            self._tell_user(f"{spec.name}: {how}, after {done} restarts; the run goes on without it {log}")
            return
        if not may_restart or done >= self._most:
            raise process.not_ready() if late else process.ended()
        self._restarts[spec.restarts] += 1
        pause = min(FIRST_PAUSE_SECONDS * 2**done, LONGEST_PAUSE_SECONDS)
        group = [each for each in self.table.values() if each.spec.restarts == spec.restarts]
        names = ", ".join(each.spec.name for each in group)
        self._tell_user(f"{spec.name}: {how}; {names}: restart {done + 1} of {self._most} in {pause:g} s")
        self._put_off(group, pause)
        if (process.exit_code or 0) > 0 and process.progress:
            self._tell_user(f"{spec.name}: its last line: {process.progress}")

    def _may_restart(self, process: Process) -> bool:
        spec = process.spec
        if not (spec.restarts and self._most and self.begun):
            return False
        # An error that trainer or API report themselves, such as a deleted queue, would come again or hide a loss.
        was_killed = (process.exit_code or 0) < 0 or process.exit_code == os.EX_TEMPFAIL
        if not (was_killed or spec.after_errors):
            return False
        return spec.restarts != TRAINERS or self._has_checkpoint()

    def _put_off(self, group: Sequence[Row], seconds: float) -> None:
        """Kill what is left of processes; they start again together."""
        for row in group:
            if row.process is not None:
                row.process.kill()
                row.process.close()
            row.process, row.state, row.at = None, "restarting", running_time() + seconds

    def _give_up(self, group: Sequence[Row]) -> None:
        """Kill what is left of processes, and forget them."""
        self._put_off(group, 0.0)
        for row in group:
            del self.table[row.spec.name]
            if self._replanner is not None:
                self._replanner.vacate(row.spec.name)

    def _start_due(self) -> None:
        """Start the processes whose time has come; those that belong together start together, or all later.

        Raises:
            ProcessFailedError: they could not be started several times.
        """
        now = running_time()
        groups: dict[str, list[Row]] = {}
        for row in self.table.values():
            if row.process is None and row.at <= now:
                groups.setdefault(row.spec.restarts, []).append(row)
        for name, group in groups.items():
            specs = [row.spec for row in group]
            placed = self._replanner.placed(specs) if self._replanner else specs
            if placed is None:
                if group[0].state != "waiting for a machine":
                    self._tell_user(f"{', '.join(spec.name for spec in specs)}: waiting for room on a machine")
                for row in group:
                    row.state, row.at = "waiting for a machine", now + PLACE_SECONDS
                continue
            try:
                for spec in placed:
                    self.start(spec)
            except ProcessFailedError:
                self._restarts[name] += 1
                if self._restarts[name] > self._most:
                    raise
                self._put_off(group, PLACE_SECONDS)

    # stop ---------------------------------------------------------------------------------------------------

    def stop_all(self) -> None:
        """End every process: first trainers and environments, then the servers that they use.

        Each gets SIGTERM and its time to stop; what is left of its process group or its descendants is then killed.
        This takes at most `SHUTDOWN_SECONDS`, or the longest `stop_seconds`. A second signal to the supervisor kills at
        once.
        """
        processes = self.processes
        if self._signals.numbers:
            saves = self._saves and any(process.may_save for process in processes)
            first = "the trainer saves a checkpoint, then " if saves else ""
            self._tell_user(f"stopping ({signal.Signals(self._signals.numbers[0]).name}): {first}all processes end")
        for process in processes:
            process.note_family()
        deadline = running_time() + max([SHUTDOWN_SECONDS, *(process.stop_seconds for process in processes)])
        for is_server in (False, True):
            group = [process for process in processes if (process.spec.ready_url is not None) == is_server]
            for process in group:
                process.terminate()
            until = min(deadline, running_time() + max((process.stop_seconds for process in group), default=0.0))
            while any(process.exit_code is None for process in group):
                if running_time() > until or len(self._signals.numbers) >= 2:
                    break
                time.sleep(POLL_SECONDS / 2)
        with ExitStack() as ends:  # each, whatever happens to the others
            for process in reversed(processes):
                ends.callback(process.close)
                ends.callback(process.kill)
        self._hear()
        self.table.clear()
