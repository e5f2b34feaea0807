"""What the status page shows: rewards over a run of any length, in little memory."""

from __future__ import annotations

from environments.api import wire
from environments.api.history import POINTS, SAMPLES, History
from environments.api.records import Group


def add(history: History, number: int, score: float, **fields: object) -> None:
    group = wire.ScoredData(tokens=[[1]], masks=[[1]], scores=[score], **fields)  # type: ignore[arg-type]
    history.add(Group(number, None, 1, 1, score), wire.pack(group), now=float(number))


def test_rewards_of_a_long_run_stay_few_and_keep_their_mean():
    history = History()
    count = 10 * POINTS
    for number in range(count):
        add(history, number, number / count)
    assert len(history.points) <= POINTS
    assert sum(point.groups for point in history.points) == count == history.groups
    mean = sum(point.mean * point.groups for point in history.points) / count
    assert abs(mean - (count - 1) / 2 / count) < 1e-9  # (0 + 1 + … + n-1) / n / n = (n - 1) / 2n
    assert history.points[0].low == 0.0
    assert history.points[-1].high == (count - 1) / count
    assert [point.at for point in history.points] == sorted(point.at for point in history.points)


def test_only_the_newest_groups_are_kept_and_their_text_is_cut():
    history = History()
    for number in range(SAMPLES + 3):
        add(history, number, 0.0, messages=[[{"role": "assistant", "content": f"{number}" + "x" * 10**6}]])
    assert [sample.id for sample in history.samples] == list(range(3, SAMPLES + 3))
    assert all(len(text) < 2000 for sample in history.samples for text in sample.texts)


def test_content_that_is_no_text_is_named_by_its_kind():
    history = History()
    add(history, 0, 0.0, messages=[[{"role": "user", "content": [{"type": "image"}]}]])
    assert history.samples[0].texts == ["user: (list)"]
