"""Durations of the phases of a start, from the command to the first trained step.

Exactly one phase is active at each moment, so the phases sum to the whole. `grpo run` passes its own start time to the
trainer, which counts from there. A trainer that was started by hand counts from its own start.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from grpo_common.status import OWN, TRAINED
from grpo_trainer.files import replace_file

log = logging.getLogger(__name__)

REPORT_FILE = "start.json"
"""Name of the report in a run's folder; it is written after the first trained step."""
REPORT_FORMAT = 1
"""Number of the report's format."""
SERVER = "server"
"""The phase in which a trainer waits for an inference server."""
FIRST_STEP = "step"
"""The last phase; before it there is nothing to save."""
COMMAND_VARIABLE = "GRPO_COMMAND_TIME"
"""Environment variable with the start time, in Unix seconds, of the command that started this process."""
PATIENCE_SECONDS = 10.0
"""Seconds of a wait after which a process reports what it waits for."""
LONGEST_SILENCE_SECONDS = 60.0
STARTING = "starting"
"""What a process does of which no phase is known yet."""
IN_WORDS = {
    "imports": "imports torch and transformers",
    "model": "loads the model",
    "compile": "tries and compiles the forward pass",
    SERVER: "waits for the server",
    "resume": "loads the checkpoint, if there is one",
    "connect": "opens the bridge",
    "proof": "proves the bridge",
    "publish": "publishes the first version",
    "rollouts": "waits for the first batch",
    FIRST_STEP: "takes the first step",
}
"""What the trainer does in each phase."""
LOGGED = (SERVER, "rollouts")
"""Phases of which the trainer itself logs that they last, and why."""


def report_at(reported: float) -> float:
    """Return the seconds of a wait at which it is reported next: at 10, 20, 40 and 80 s, then every minute.

    Args:
        reported: seconds of the wait at the last report; 0: there was none.
    """
    return reported + min(max(reported, PATIENCE_SECONDS), LONGEST_SILENCE_SECONDS)


@dataclass(frozen=True)
class Wait:
    """What a process does before the first trained step, and for how long.

    Attributes:
        name: of the process.
        what: it does or waits for.
        seconds: since it began to.
        note: the last log line that says what it does.
        logged: the process itself logs that it lasts.
    """

    name: str
    what: str
    seconds: float
    note: str = ""
    logged: bool = False

    def __str__(self) -> str:
        return f"{self.name}: {self.what}, {self.seconds:.0f} s"


class Phases:
    """Seconds by phase. Nothing is counted before `begin` and after `end`.

    Attributes:
        seconds: phase -> seconds so far, in the order of first entry.
    """

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._name: str | None = None
        self._since = 0.0
        self.seconds: dict[str, float] = {}

    def begin(self, name: str, since: float) -> None:
        """Begin the first phase, at a Unix time."""
        self.seconds = {}
        self._name, self._since = name, since

    def enter(self, name: str, at: float | None = None) -> None:
        """End the present phase and begin another one, now or at a Unix time."""
        if self._name is None or name == self._name:
            return
        now = self._clock() if at is None else at
        self.seconds[self._name] = self.seconds.get(self._name, 0.0) + max(0.0, now - self._since)
        self._name, self._since = name, now
        OWN.update(phase=name, since=now)
        log.info("start: %s", name)

    @contextmanager
    def of(self, name: str) -> Iterator[None]:
        """Enter a phase for the block, and return to the phase before."""
        before = self._name
        self.enter(name)
        try:
            yield
        finally:
            if before is not None:
                self.enter(before)

    def waits(self) -> list[Wait]:
        """Return the present phase, as what the trainer waits for; nothing before `begin` and after `end`."""
        name = self._name
        return [] if name is None else [Wait("trainer", IN_WORDS.get(name, name), self._clock() - self._since)]

    def end(self) -> dict[str, float] | None:
        """End the last phase, and return the seconds by phase; None if nothing was counted, or after the first call."""
        if self._name is None:
            return None
        last, self._name = self._name, None
        self.seconds[last] = self.seconds.get(last, 0.0) + max(0.0, self._clock() - self._since)
        return self.seconds


START = Phases()
"""Phases of this process's start; a global, so that any code that waits for another process can enter a phase."""


def begin_start() -> None:
    """Begin to count the start of this trainer process, whose imports are running."""
    own = process_start()
    START.begin("command", min(own, float(os.environ.get(COMMAND_VARIABLE) or own)))
    START.enter("imports", own)


def process_start() -> float:
    """Return when this process was started, in Unix seconds."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return time.time() - max(0.0, age)


class StartReport(msgspec.Struct, frozen=True):
    """Durations of one start: `start.json`, which the trainer writes and the supervisor completes."""

    seconds: float
    """From the command to the first trained step."""
    phases: dict[str, float]
    """Seconds of each of the trainer's phases, which sum to `seconds`."""
    servers: dict[str, dict[str, float]] = {}
    """For each server, `ready`: the seconds from its start to its first answer."""
    format: int = REPORT_FORMAT


def report_start(folder: Path, say: Callable[[str], None]) -> None:
    """Report once, at the first trained step, how long the start took, and write that into the run's folder."""
    seconds = START.end()
    if seconds is None:
        return
    say(f"the first step was trained {sum(seconds.values()):.1f} s after the command: {in_words(seconds)}")
    phases = {name: round(taken, 3) for name, taken in seconds.items()}
    try:
        _write_report(folder / REPORT_FILE, StartReport(round(sum(seconds.values()), 3), phases))
    except OSError as error:  # the run does not depend on the report
        log.warning("could not write the report on the start: %s", error)
    OWN.update(phase=TRAINED, since=time.time())


def complete_report(path: Path, servers: dict[str, dict[str, float]]) -> None:
    """Add the servers' times to the report that a trainer has written, if it has."""
    if (report := read_report(path)) is not None:
        with suppress(OSError):
            _write_report(path, msgspec.structs.replace(report, servers=servers))


def read_report(path: Path) -> StartReport | None:
    """Return the report in a file; None: there is no such file, or it is no report."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=StartReport)
    except (OSError, msgspec.MsgspecError):
        return None


def _write_report(path: Path, report: StartReport) -> None:
    replace_file(path, msgspec.json.format(msgspec.json.encode(report), indent=1))


def in_words(seconds: Mapping[str, float]) -> str:
    """Return phases and their seconds on one line, without those that took no time."""
    return ", ".join(f"{name} {taken:.1f}" for name, taken in seconds.items() if taken >= 0.05)
