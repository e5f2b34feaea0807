"""What was out of the ordinary in a run: steps, and lines of its logs."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from grpo_common.redaction import redacted_text

LOUD = re.compile(r"\b(WARNING|ERROR|CRITICAL)\b")
PLACES = re.compile(r"^\$ |^\(\w+ pid=\d+\) |\d+")
"""What differs between two lines that say the same: who said it, when, and its figures."""
STARTED, SHUTDOWN = "Application startup complete.", "[shutdown]"
"""What ends a server's start in its log, and what begins its end. vLLM warns of dozens of things before and after."""
COMMAND = "$ "
"""How the line begins with which the supervisor starts a process."""
UNUSUAL = {
    "train/skipped": "skipped: nothing to learn from, or a loss or gradient that is not finite",
    "rollout/dropped_stale_groups": "groups dropped as too old",
    "rollout/refused_groups": "groups left out that can't be trained on",
}
"""Counts among a step's metrics that are events if they are not 0."""
NEWEST_LINES, LOG_BYTES, MOST_OF_LINE = 60, 1 << 20, 400
"""Of each log: how many loud lines are shown, out of how much of its end, and how many characters of each."""


@dataclass(frozen=True)
class Event:
    """Something out of the ordinary.

    Attributes:
        routine: a warning of a server that was starting, or anything from one that was ending; there are always some.
    """

    source: str
    text: str
    routine: bool = False


def read_events(rows: Sequence[Mapping[str, Any]], logs: Path, secrets: Iterable[str] = ()) -> list[Event]:
    """Return the events of a run's rows of metrics.jsonl, then those of its folder of logs.

    Args:
        secrets: of the run's options; they are hidden wherever a log repeats them.
    """
    loud = (replace(event, text=redacted_text(event.text, secrets)[:MOST_OF_LINE]) for event in _loud_lines(logs))
    return [*_of_steps(rows), *loud]


def _of_steps(rows: Sequence[Mapping[str, Any]]) -> Iterator[Event]:
    """One for consecutive steps of which the same is to be said."""
    spans: dict[str, list[tuple[int, int, float]]] = {}  # first row, last row, how often
    for at, row in enumerate(rows):
        counts = {text: row.get(key) or 0 for key, text in UNUSUAL.items()}
        counts["losses not finite"] = int("train/loss" in row and row["train/loss"] is None)
        for text in (text for text, count in counts.items() if count > 0):
            own = spans.setdefault(text, [])
            first, _, before = own.pop() if own and own[-1][1] == at - 1 else (at, at, 0)
            own.append((first, at, before + counts[text]))
    found = sorted((first, last, count, text) for text, own in spans.items() for first, last, count in own)
    for first, last, count, text in found:
        a, b = rows[first]["step"], rows[last]["step"]
        yield Event(f"step {a}" if a == b else f"steps {a} to {b}", f"{count:g} × {text}")


def _loud_lines(folder: Path) -> list[Event]:
    """The newest warnings and errors of each process, equal ones once."""
    found = []
    for path in sorted(folder.glob("*.log")):
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - LOG_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
        loud = {PLACES.sub("", event.text): event for event in _loud(path.stem, lines)}
        found += list(loud.values())[-NEWEST_LINES:]
    return found


def _loud(source: str, lines: Sequence[str]) -> Iterator[Event]:
    starts = STARTED in "\n".join(lines)
    starting = starts and not any(line.startswith(COMMAND) for line in lines)  # a log that nobody else began
    ending = False
    for line in lines:
        if line.startswith(COMMAND):
            starting, ending = starts, False
        elif STARTED in line:
            starting = False
        ending = ending or SHUTDOWN in line
        if found := LOUD.search(line):
            routine = ending or (starting and found[1] == "WARNING")
            yield Event(source, line.strip()[: 10 * MOST_OF_LINE], routine)
