"""What the processes of a run do before the first trained step, and how long the start took."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from grpo_trainer.files import replace_file
from grpo_trainer.launch.watched import Watched
from grpo_trainer.phases import IN_WORDS, LOGGED, SERVER, STARTING, Wait


class StartReport(msgspec.Struct, frozen=True):
    """Durations of one start.

    Attributes:
        seconds: from the command to the first trained step.
        phases: seconds of each of the trainer's phases, which sum to `seconds`.
        servers: for each server, `ready`: the seconds from its own start to its first answer.
    """

    seconds: float
    phases: dict[str, float]
    servers: dict[str, dict[str, float]] = {}
    format: int = 1


class StartWatch:
    """Follows one start.

    Args:
        report: the file that the trainer writes at its first trained step.

    Attributes:
        waits: what the processes do now, until the first step is trained.
        is_over: the first step is trained.
    """

    def __init__(self, report: Path) -> None:
        self._report = report
        self._servers: dict[str, dict[str, float]] = {}
        self.waits: Sequence[Wait] = ()
        self.is_over = False
        report.unlink(missing_ok=True)  # left by an earlier start in the same folder

    def note_ready(self, name: str, seconds: float) -> None:
        """Record that a server is ready."""
        self._servers[name] = {"ready": round(seconds, 3)}

    def look(self, children: Sequence[Watched]) -> None:
        """Note what the processes do now; once the first step is trained, complete the report on this start."""
        if self.is_over:
            return
        if (found := read_report(self._report)) is None:
            self.waits = [*self._waits(children)]
            return
        self.waits = ()
        self.is_over = True
        whole = msgspec.json.encode(msgspec.structs.replace(found, servers=self._servers))
        with suppress(OSError):  # the run does not depend on this file
            replace_file(self._report, msgspec.json.format(whole, indent=1))

    def _waits(self, children: Sequence[Watched]) -> Iterator[Wait]:
        """Yield what servers that are not ready, and the trainer, do now."""
        now = time.monotonic()
        for child in children:
            if not child.ready:
                yield Wait(child.name, STARTING, now - child.started, child.progress)
            elif child.spec.ends_run:
                phase, since = child.phase or (STARTING, child.started)
                if phase == SERVER and any(each.name.startswith("server") for each in children):
                    continue  # that server's own wait covers it
                yield Wait(child.name, IN_WORDS.get(phase, phase), now - since, logged=phase in LOGGED)


def read_report(path: Path) -> StartReport | None:
    """Return the report in a file; None: there is no such file, or it is no report."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=StartReport)
    except (OSError, msgspec.MsgspecError):
        return None
