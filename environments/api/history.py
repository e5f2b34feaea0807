"""What the status page shows: rewards and tokens of the last steps, their pace, the newest groups and refusals."""

from collections import deque
from typing import Any

import msgspec
from msgspec import Struct

from environments.api import wire
from environments.api.records import Group

SAMPLES = 8
REFUSALS = 20
STEPS = 240
PACE_STEPS = 50
"""Number of last steps whose mean time is the pace."""
_TEXT = 1200
_SEQUENCES = 8


class Point(Struct):
    """Groups that came within `seconds` from `at` on (since the start), while the trainer had reached `step`.

    `mean`, `low` and `high` are of the groups' mean scores.
    """

    step: int
    at: float
    seconds: float = 0.0
    groups: int = 0
    tokens: int = 0
    mean: float = 0.0
    low: float = 0.0
    high: float = 0.0


class Sample(Struct, frozen=True):
    """A group as the page shows it: its texts (cut), scores and lengths."""

    id: int
    env_id: int | None
    scores: list[float]
    lengths: list[int]
    texts: list[str]
    policy_version: int | None


class Refusal(Struct, frozen=True):
    """A request that was refused, `at` seconds after the start."""

    at: float
    request: str
    status: int
    detail: str


class Overview(Struct, frozen=True):
    """What the status page asks for every two seconds.

    `run` is the folder that `--run-dir` names; `now` and `at` are seconds since the start.
    """

    run: str | None
    has_report: bool
    project: str | None
    group: str | None
    now: float
    seconds_per_step: float | None
    seconds_left: float | None
    status: wire.Status
    points: list[Point]
    samples: list[Sample]
    refusals: list[Refusal]
    refused: int


class History:
    """The last `STEPS` steps, and the newest `SAMPLES` groups.

    Args:
        start: time from which it counts, on the clock of all later times.
    """

    def __init__(self, start: float) -> None:
        self.start = start
        self.samples: deque[Sample] = deque(maxlen=SAMPLES)
        self.groups = 0
        self.refusals: deque[Refusal] = deque(maxlen=REFUSALS)
        self.refused = 0
        self._points: deque[Point] = deque([Point(0, 0.0)], maxlen=STEPS)
        self._paced_from: float | None = None  # when the trainer came; its first step has its start in it

    def add(self, group: Group, packed: wire.PackedGroup, now: float) -> None:
        """Note a group that has come."""
        point, score = self._point(now), group.mean_score
        point.low = min(point.low, score) if point.groups else score
        point.high = max(point.high, score) if point.groups else score
        point.groups += 1
        point.mean += (score - point.mean) / point.groups
        point.tokens += sum(packed.lengths)
        self.groups += 1
        self.samples.append(_sample(group, packed))

    def refuse(self, request: str, status: int, detail: str, now: float, count: int = 1) -> None:
        """Note a request that is refused, or several in one entry."""
        self.refused += count
        self.refusals.append(Refusal(now - self.start, request[:100], status, detail[:400]))

    def reached(self, step: int, now: float) -> None:
        """Note the step of a trainer that has registered; it may be the one noted before."""
        last = self._point(now)
        if self._paced_from is None or step < last.step:  # a trainer has come, or one was resumed
            self._paced_from = now - self.start
        while step < last.step and self._points and self._points[-1].step >= step:
            self._points.pop()  # it comes again
        if not self._points or self._points[-1].step != step:
            self._points.append(Point(step, now - self.start))

    def points(self, now: float) -> list[Point]:
        """Return the steps in which groups came, oldest first."""
        self._point(now)
        return [point for point in self._points if point.groups]

    @property
    def seconds_per_step(self) -> float | None:
        """Mean over the last `PACE_STEPS` steps; None before two are done, as the first one has the start in it."""
        begun = self._paced_from or 0.0
        steps = [point for point in self._points if point.at > begun][-PACE_STEPS - 1 :]
        return (steps[-1].at - steps[0].at) / (steps[-1].step - steps[0].step) if len(steps) > 1 else None

    def _point(self, now: float) -> Point:
        """Return the point of the step that goes on."""
        self._points[-1].seconds = now - self.start - self._points[-1].at
        return self._points[-1]


def _sample(group: Group, packed: wire.PackedGroup) -> Sample:
    conversations = (packed.messages or [])[:_SEQUENCES]
    return Sample(
        id=group.id,
        env_id=group.env_id,
        scores=packed.scores[:_SEQUENCES],
        lengths=packed.lengths[:_SEQUENCES],
        texts=[_text(conversation) for conversation in conversations],
        policy_version=group.oldest_version,
    )


def _text(conversation: list[dict[str, Any]] | msgspec.Raw) -> str:
    """The conversation's end: what the policy said is last."""
    if isinstance(conversation, msgspec.Raw):  # of a group in MessagePack, whose messages stay encoded
        conversation = msgspec.msgpack.decode(conversation, type=list[dict[str, Any]])
    lines = []
    for message in conversation[-6:]:
        role, content = message["role"], message["content"]
        shown = content[-_TEXT:] if isinstance(content, str) else f"({type(content).__name__})"
        lines.append(f"{role[:40] if isinstance(role, str) else '?'}: {shown}")
    return "\n".join(lines)[-_TEXT:]
