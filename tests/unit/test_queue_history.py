"""What the status page shows: the last steps, their pace, the newest groups; in little memory."""

from __future__ import annotations

from environments.api import wire
from environments.api.history import PACE_STEPS, SAMPLES, STEPS, History, Point
from environments.api.records import Group


def add(history: History, number: int, score: float, **fields: object) -> None:
    group = wire.ScoredData(tokens=[[1]], masks=[[1]], scores=[score], **fields)  # type: ignore[arg-type]
    history.add(Group(number, None, 1, 1, score), wire.pack(group), now=float(number))


def test_history_points_are_the_last_steps_in_which_groups_came():
    history = History(start=10.0)
    history.reached(3, now=12.0)
    for now, score in ((12.0, 0.5), (13.0, 0.0), (14.0, 1.0)):
        add(history, int(now), score)
    history.reached(4, now=15.0)
    history.reached(5, now=16.0)
    add(history, 18, 2.0)
    # Step 3 from 12 - 10 = 2 s on for 3 s, with a mean of 1.5 / 3; no group came in step 4.
    assert history.points(20.0) == [Point(3, 2.0, 3.0, 3, 3, 0.5, 0.0, 1.0), Point(5, 6.0, 4.0, 1, 1, 2.0, 2.0, 2.0)]
    history.reached(4, now=21.0)  # resumed: step 5 comes again
    assert [point.step for point in history.points(21.0)] == [3]
    for step in range(4, 2 * STEPS):
        history.reached(step, now=30.0 + step)
        add(history, 30 + step, 0.0)
    assert [point.step for point in history.points(900.0)] == list(range(STEPS, 2 * STEPS))


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


def test_the_pace_of_a_new_run_is_known_after_two_steps():
    history = History(start=5.0)
    for step, now in ((0, 6.0), (1, 20.0), (2, 23.0)):
        assert history.seconds_per_step is None
        history.reached(step, now)
    assert history.seconds_per_step == 3.0  # step 1 has the start in it


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
