"""Durations of the phases of a start, from the command to the first trained step.

Exactly one phase is active at each moment, so the phases sum to the whole. `grpo run` passes its own start time to the
trainer, which counts from there. A trainer that was started by hand counts from its own start.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from grpo_common.status import OWN, TRAINED

log = logging.getLogger(__name__)

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
    """Return the seconds of a wait at which it is reported after the last time: 10, 20, 40, 80, then every minute."""
    return reported + min(max(reported, PATIENCE_SECONDS), LONGEST_SILENCE_SECONDS)


@dataclass(frozen=True)
class Wait:
    """What a process does before the first trained step, and for how long."""

    name: str
    what: str
    seconds: float
    note: str = ""  # the last log line that says what it does
    logged: bool = False  # the process itself logs that it lasts

    def __str__(self) -> str:
        return f"{self.name}: {self.what}, {self.seconds:.0f} s"


class Phases:
    """Seconds by phase. Nothing is counted before `begin` and after `end`."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._name: str | None = None
        self._since = self._began = 0.0
        self.seconds: dict[str, float] = {}
        """By phase, in the order of first entry."""
        self.passed: dict[str, float] = {}
        """By phase that has ended: seconds from the beginning to its first end."""

    def begin(self, name: str, since: float) -> None:
        """Begin the first phase, at a Unix time."""
        self.seconds, self.passed = {}, {}
        self._name, self._since, self._began = name, since, since

    def enter(self, name: str, at: float | None = None) -> None:
        """End the present phase and begin another one, now or at a Unix time."""
        if self._name is None or name == self._name:
            return
        now = self._clock() if at is None else at
        self.seconds[self._name] = self.seconds.get(self._name, 0.0) + max(0.0, now - self._since)
        self.passed.setdefault(self._name, max(0.0, now - self._began))
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


def report_start(say: Callable[[str], None]) -> None:
    """Say once, at the first trained step, how long the start took."""
    if (seconds := START.end()) is not None:
        phases = ", ".join(f"{name} {taken:.1f}" for name, taken in seconds.items() if taken >= 0.05)
        say(f"the first step was trained {sum(seconds.values()):.1f} s after the command: {phases}")
        OWN.update(phase=TRAINED, since=time.time())
