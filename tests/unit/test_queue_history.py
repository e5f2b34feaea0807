"""What the status page shows: rewards over a run of any length, in little memory."""

from __future__ import annotations

from environments.api import wire
from environments.api.history import PACE_STEPS, POINTS, SAMPLES, History
from environments.api.records import Group


def add(history: History, number: int, score: float, **fields: object) -> None:
    group = wire.ScoredData(tokens=[[1]], masks=[[1]], scores=[score], **fields)  # type: ignore[arg-type]
    history.add(Group(number, None, 1, 1, score), wire.pack(group), now=float(number))


def test_rewards_of_a_long_run_stay_few_and_keep_their_mean():
    history = History(start=0.0)
    count = 10 * POINTS  # one a second: 16 * POINTS is the first power of two times POINTS that holds all of them
    for number in range(count):
        add(history, number, number / count)
    assert history.seconds_per_point == 16 and len(history.points) == count // 16
    assert [point.at for point in history.points] == [16.0 * number for number in range(count // 16)]
    assert all((point.groups, point.tokens) == (16, 16) for point in history.points), "a group has one token"
    mean = sum(point.mean * point.groups for point in history.points) / count
    assert abs(mean - (count - 1) / 2 / count) < 1e-9  # (0 + 1 + … + n-1) / n / n = (n - 1) / 2n
    assert history.points[0].low == 0.0
    assert history.points[-1].high == (count - 1) / count


def test_the_pace_is_that_of_the_last_steps():
    history = History(start=0.0)
    for step, now in ((6, 0.0), (7, 100.0)):
        history.reached(step, now)
        assert history.seconds_per_step is None, "the first step has the start in it"
    for step, now in ((8, 110.0), (8, 115.0), (10, 130.0)):
        history.reached(step, now)
    assert history.seconds_per_step == 10.0  # from step 7 to step 10 in 30 s
    history.reached(3, now=200.0)
    assert history.seconds_per_step is None, "another trainer has begun"
    for step in range(4, 4 + 2 * PACE_STEPS):
        history.reached(step, now=200.0 + (step - 3) ** 2)
    # The last 50 of 100 steps end at 100 ** 2 = 10000 and begin at 50 ** 2 = 2500; 7500 / 50 = 150.
    assert history.seconds_per_step == 150.0


def test_only_the_newest_groups_are_kept_and_their_text_is_cut():
    history = History(start=0.0)
    for number in range(SAMPLES + 3):
        add(history, number, 0.0, messages=[[{"role": "assistant", "content": f"{number}" + "x" * 10**6}]])
    assert [sample.id for sample in history.samples] == list(range(3, SAMPLES + 3))
    assert all(len(text) < 2000 for sample in history.samples for text in sample.texts)


def test_content_that_is_no_text_is_named_by_its_kind():
    history = History(start=0.0)
    add(history, 0, 0.0, messages=[[{"role": "user", "content": [{"type": "image"}]}]])
    assert history.samples[0].texts == ["user: (list)"]
