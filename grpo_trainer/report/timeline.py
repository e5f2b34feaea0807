"""The timeline that `--trace` records, as lanes of the last steps and as one sentence: what does the run wait for?"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

LAST_STEPS = 3
STAGES = {
    "generate": "environment",
    "score": "environment",
    "post": "environment",
    "queue": "rollout API",
    "lease": "rollout API",
    "fetch": "trainer, thread",
    "prepare": "trainer, thread",
    "wait": "trainer",
    "forward_backward": "trainer",
    "optimizer": "trainer",
    "publish": "trainer",
    "save": "trainer, thread",
    "load adapter": "server",
    "fence": "server",
}
"""Every stage that is recorded, in the order of the lanes, and whose it is."""
OF_A_STEP = ("wait", "forward_backward", "optimizer", "publish")
"""What the trainer does or waits for, one after the other."""
BEHIND_A_WAIT = {"generate": "completions are generated", "score": "answers are scored", "post": "groups are posted"}
WIDTH, LEFT, ROW = 800, 150, 18


@dataclass(frozen=True)
class Interval:
    """A stage from `start` to `end`, in seconds of the clock that all processes share."""

    stage: str
    start: float
    end: float


def intervals(events: Iterable[Mapping[str, Any]]) -> list[Interval]:
    """The stages of a timeline's events. One that was begun and never ended, because its process died, is left out."""
    found: list[Interval] = []
    begun: dict[tuple[str, ...], float] = {}
    for event in events:
        lane = (str(event.get("pid")), str(event.get("name")), str(event.get("id2")))
        match event:
            case {"ph": "X", "name": str(name), "ts": int() | float() as ts, "dur": int() | float() as dur}:
                found.append(Interval(name, ts / 1e6, (ts + dur) / 1e6))
            case {"ph": "b", "name": str(name), "ts": int() | float() as ts}:
                begun[lane] = ts / 1e6
            case {"ph": "e", "name": str(name), "ts": int() | float() as ts} if lane in begun:
                found.append(Interval(name, begun.pop(lane), ts / 1e6))
    return sorted(found, key=lambda each: each.start)


def last_steps(found: Sequence[Interval], steps: int = LAST_STEPS) -> tuple[float, float] | None:
    """From when the trainer began to wait for the first of these steps to the end of the last; None: no step yet."""
    waits = [each.start for each in found if each.stage == "wait"]
    ends = [each.end for each in found if each.stage in OF_A_STEP]
    return (waits[-steps:][0], max(ends)) if waits else None


def covered(found: Iterable[Interval], within: Sequence[Interval]) -> float:
    """Seconds of `within`, whose intervals do not overlap, during which at least one of `found` runs."""
    union: list[tuple[float, float]] = []
    for each in sorted(found, key=lambda each: each.start):
        if union and each.start <= union[-1][1]:
            union[-1] = union[-1][0], max(union[-1][1], each.end)
        else:
            union.append((each.start, each.end))
    return sum(max(0.0, min(each.end, end) - max(each.start, start)) for each in within for start, end in union)


def sentence(found: Sequence[Interval]) -> str:
    """What the run spends or waits most of its time for."""
    stages = {name: [each for each in found if each.stage == name] for name in (*OF_A_STEP, *BEHIND_A_WAIT)}
    seconds = {name: sum(each.end - each.start for each in stages[name]) for name in OF_A_STEP}
    whole = sum(seconds.values())
    if not whole:
        return "No step was recorded."
    most = max(seconds, key=lambda name: seconds[name])
    if most != "wait":
        return (
            f"The trainer spends {seconds[most] / whole:.0%} of its time on {most}; "
            f"it waits for rollouts {seconds['wait'] / whole:.0%} of it."
        )
    behind = {name: covered(stages[name], stages["wait"]) for name in BEHIND_A_WAIT}
    name = max(behind, key=lambda name: behind[name])
    return (
        f"The trainer waits for rollouts {seconds['wait'] / whole:.0%} of its time; "
        f"{BEHIND_A_WAIT[name]} during {behind[name] / seconds['wait']:.0%} of the wait."
    )


def lanes(found: Sequence[Interval], window: tuple[float, float]) -> str:
    """An SVG with a lane for each stage that occurs in the window; where stages overlap, the lane is darker."""
    start, end = window
    seen = [each for each in found if each.end > start and each.start < end]
    names = [name for name in STAGES if any(each.stage == name for each in seen)]
    scale = (WIDTH - LEFT) / max(end - start, 1e-9)
    owners = list(dict.fromkeys(STAGES.values()))
    parts = []
    for row, name in enumerate(names):
        y = row * ROW
        parts.append(f'<text x="0" y="{y + 12}">{escape(name)} ({escape(STAGES[name])})</text>')
        for each in (each for each in seen if each.stage == name):
            left, right = max(each.start, start), min(each.end, end)
            x, width = LEFT + 20 + (left - start) * scale * 0.97, max((right - left) * scale * 0.97, 0.5)
            colour = owners.index(STAGES[name])
            parts.append(
                f'<rect class="a{colour}" x="{x:.1f}" y="{y + 2}" width="{width:.1f}" height="{ROW - 5}">'
                f"<title>{escape(name)} {each.end - each.start:.3f} s</title></rect>"
            )
    axis = f'<text x="{LEFT + 20}" y="{len(names) * ROW + 12}">0 s</text>'
    axis += f'<text x="{WIDTH}" y="{len(names) * ROW + 12}" text-anchor="end">{end - start:.2f} s</text>'
    height = (len(names) + 1) * ROW
    return f'<svg class="lanes" viewBox="0 0 {WIDTH} {height}" role="img">{"".join(parts)}{axis}</svg>'
