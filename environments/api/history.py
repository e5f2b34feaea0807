"""What the status page shows: rewards and tokens over time, the pace of the steps, the newest groups and refusals."""

from collections import deque
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from environments.api import wire
from environments.api.records import Group

SAMPLES = 8
REFUSALS = 20
POINTS = 240
PACE_STEPS = 50
"""Number of last steps whose mean time is the pace."""
_TEXT = 1200
_SEQUENCES = 8


class Point(Struct, frozen=True):
    """Groups that came in the interval from `at` on (seconds since the start): mean, lowest and highest mean score."""

    at: float
    groups: int
    tokens: int
    mean: float
    low: float
    high: float

    def merged(self, later: "Point", at: float) -> "Point":
        """Both as one, of an interval from `at` on."""
        groups = self.groups + later.groups
        mean = (self.mean * self.groups + later.mean * later.groups) / groups
        tokens, low, high = self.tokens + later.tokens, min(self.low, later.low), max(self.high, later.high)
        return Point(at, groups, tokens, mean, low, high)


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

    `run` is the folder that `--run-dir` names; `now` and `at` are seconds since its start; each of `points` covers
    `seconds_per_point`.
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
    seconds_per_point: float
    samples: list[Sample]
    refusals: list[Refusal]
    refused: int


class History:
    """Groups of the whole run in at most `POINTS` points, and the newest `SAMPLES` of them.

    Args:
        start: time from which it counts, on the clock of all later times.
    """

    def __init__(self, start: float) -> None:
        self.start = start
        self.points: list[Point] = []
        self.seconds_per_point = 1.0
        self.samples: deque[Sample] = deque(maxlen=SAMPLES)
        self.groups = 0
        self.refusals: deque[Refusal] = deque(maxlen=REFUSALS)
        self.refused = 0
        self._step: int | None = None
        self._steps: deque[tuple[int, float]] = deque(maxlen=PACE_STEPS + 1)

    def add(self, group: Group, packed: wire.PackedGroup, now: float) -> None:
        """Note a group that has come."""
        self.groups += 1
        score = group.mean_score
        while now - self.start >= POINTS * self.seconds_per_point:
            self.seconds_per_point *= 2
            points, self.points = self.points, []
            for point in points:
                self._put(point)
        self._put(Point(now - self.start, 1, sum(packed.lengths), score, score, score))
        self.samples.append(_sample(group, packed))

    def _put(self, point: Point) -> None:
        at = point.at // self.seconds_per_point * self.seconds_per_point
        if self.points and self.points[-1].at >= at:
            self.points[-1] = self.points[-1].merged(point, at)
        else:
            self.points.append(replace(point, at=at))

    def refuse(self, request: str, status: int, detail: str, now: float, count: int = 1) -> None:
        """Note a request that is refused, or several in one entry."""
        self.refused += count
        self.refusals.append(Refusal(now - self.start, request[:100], status, detail[:400]))

    def reached(self, step: int, now: float) -> None:
        """Note the trainer's step, which may be the one noted before; the first one says nothing of the pace."""
        if self._step is None or step < self._step:
            self._steps.clear()  # another trainer, or one that was resumed
        elif step > self._step:
            self._steps.append((step, now))
        self._step = step

    @property
    def seconds_per_step(self) -> float | None:
        """Mean over the last `PACE_STEPS` steps; None before two are done, as the first one has the start in it."""
        if len(self._steps) < 2:
            return None
        (first, begin), (last, end) = self._steps[0], self._steps[-1]
        return (end - begin) / (last - first)


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
