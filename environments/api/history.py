"""What the status page shows: rewards over time and the newest groups, in little memory."""

from collections import deque
from typing import Any

from msgspec import Struct

from environments.api import wire
from environments.api.records import Group

SAMPLES = 8
POINTS = 240
_TEXT = 1200
_SEQUENCES = 8


class Point(Struct, frozen=True):
    """Mean, lowest and highest mean score of `groups` consecutive groups; `at` is when the last one came."""

    at: float
    groups: int
    mean: float
    low: float
    high: float


class Sample(Struct, frozen=True):
    """A group as the page shows it: its texts (cut), scores and lengths."""

    id: int
    at: float
    env_id: int | None
    scores: list[float]
    lengths: list[int]
    texts: list[str]
    policy_version: int | None


class Overview(Struct, frozen=True):
    """What the status page asks for once a second."""

    project: str | None
    group: str | None
    status: wire.Status
    rewards: list[Point]
    samples: list[Sample]


class History:
    """Rewards of the whole run in at most `POINTS` points, and the newest `SAMPLES` groups."""

    def __init__(self) -> None:
        self.points: list[Point] = []
        self.samples: deque[Sample] = deque(maxlen=SAMPLES)
        self.groups = 0
        self._per_point = 1

    def add(self, group: Group, packed: wire.PackedGroup, now: float) -> None:
        """Note a group that has come."""
        self.groups += 1
        score = group.mean_score
        last = self.points[-1] if self.points else None
        if last is None or last.groups >= self._per_point:
            self.points.append(Point(now, 1, score, score, score))
        else:
            mean = last.mean + (score - last.mean) / (last.groups + 1)
            self.points[-1] = Point(now, last.groups + 1, mean, min(last.low, score), max(last.high, score))
        if len(self.points) > POINTS:
            self._halve()
        self.samples.append(_sample(group, packed, now))

    def _halve(self) -> None:
        """Merge neighbours: the run is twice as long, the line as fine as before."""
        self._per_point *= 2
        pairs = [self.points[i : i + 2] for i in range(0, len(self.points), 2)]
        self.points = [
            Point(
                at=pair[-1].at,
                groups=sum(each.groups for each in pair),
                mean=sum(each.mean * each.groups for each in pair) / sum(each.groups for each in pair),
                low=min(each.low for each in pair),
                high=max(each.high for each in pair),
            )
            for pair in pairs
        ]


def _sample(group: Group, packed: wire.PackedGroup, now: float) -> Sample:
    conversations = (packed.messages or [])[:_SEQUENCES]
    return Sample(
        id=group.id,
        at=now,
        env_id=group.env_id,
        scores=packed.scores[:_SEQUENCES],
        lengths=packed.lengths[:_SEQUENCES],
        texts=[_text(conversation) for conversation in conversations],
        policy_version=group.oldest_version,
    )


def _text(conversation: list[dict[str, Any]]) -> str:
    """The conversation's end: what the policy said is last."""
    lines = []
    for message in conversation[-6:]:
        role, content = message["role"], message["content"]
        shown = content[-_TEXT:] if isinstance(content, str) else f"({type(content).__name__})"
        lines.append(f"{role[:40] if isinstance(role, str) else '?'}: {shown}")
    return "\n".join(lines)[-_TEXT:]
