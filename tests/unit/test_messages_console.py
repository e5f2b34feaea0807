"""The lines of a run as text: a step, the live line, what a start waits for."""

from __future__ import annotations

import io

from rich.console import Console

from grpo_trainer.logs.console import RunConsole, live_line, step_line, waits_line
from grpo_trainer.phases import IN_WORDS, LOGGED, STARTING, Wait


def test_a_step_in_a_line() -> None:
    numbers = {
        "reward/mean": 0.25, "train/loss": -0.5, "grpo/mean_ratio": 1.01, "rollout/staleness_mean": 1.0,
        "batch/zero_variance_share": 0.5, "train/tokens_per_second": 1234.0, "train/data_fetch_time": 0.1,
        "train/step_time": 0.2, "train/sync_time": 0.003, "publish/version": 7.0, "publish/served_version": 5.0,
    }  # fmt: skip
    assert step_line(7, 10, numbers) == (
        "Step  7/10  reward 0.250  loss -0.5000  ratio 1.010  stale 1.0  zero-var 50%  1,234 tok/s  "
        "wait 0.10 step 0.20 publish 0.003 s  v5"
    )


def test_a_step_without_anything_to_learn_from_says_so_and_shows_no_number_that_there_is_not() -> None:
    numbers = {"reward/mean": 1.0, "train/loss": 0.0, "train/skipped": 1.0, "batch/zero_variance_share": 1.0}
    line = "Step 1/1  reward 1.000  nothing to learn: no group has a spread of rewards  zero-var 100%"
    assert step_line(1, 1, numbers) == line


def test_the_live_line() -> None:
    numbers = {"reward/mean": 0.7123, "health/kl": 0.0, "train/loss": 0.1}
    # seconds of a step: (2.0 + 2.1 + 2.1) / 3 = 2.07, as the longest counts as the second longest; 90 of them: 186 s
    assert live_line(30, 120, numbers, [0.0, 0.5, 1.0], [2.0, 2.1, 8.0]) == (
        "step 30/120  2.07 s a step  3 min left  reward 0.712 ▁▅█  healthy"
    )
    unhealthy = numbers | {"health/kl": 1.0, "health/ratio": 1.0}
    assert live_line(119, 120, unhealthy, [0.5] * 3, [80.0, 82.0, 84.0]) == (
        "step 119/120  81 s a step  81 s left  reward 0.712 ▁▁▁  OUT OF RANGE: KL, ratio"
    )


def test_the_live_line_shows_no_number_that_is_not_known_yet() -> None:
    assert live_line(1, 120, {"reward/mean": 0.25}, [0.25], [5.0]) == "step 1/120  reward 0.250 ▁"
    assert live_line(2, 120, {}, [], []) == "step 2/120"


def test_what_a_start_waits_for_in_one_line() -> None:
    server, trainer = Wait("server", STARTING, 20.4, "50% loaded"), Wait("trainer", IN_WORDS["model"], 3.0)
    assert waits_line([server, trainer]) == (f"server: starting, 20 s; trainer: {IN_WORDS['model']}, 3 s: 50% loaded")
    assert waits_line([]) == ""


def test_a_pipe_has_a_line_when_a_phase_begins_and_when_it_lasts() -> None:
    now: list[Wait] = []
    out = io.StringIO()
    view = RunConsole(Console(file=out, width=200), 10, lambda: now)
    begins = {0: "imports", 3: "model", 4: "compile", 50: "rollouts"}
    for second in (tenth / 10 for tenth in range(700)):
        since = max(begin for begin in begins if begin <= second)
        phase = Wait("trainer", begins[since], second - since, logged=begins[since] in LOGGED)
        now[:] = [Wait("server", STARTING, second, "loads"), phase]
        view.say_waits()
    assert out.getvalue().splitlines() == [
        "trainer: imports, 1 s",  # the model's phase takes less than a second
        "trainer: compile, 1 s",
        "server: starting, 10 s: loads",  # that it was started, was said before
        "trainer: compile, 10 s",
        "server: starting, 20 s: loads",
        "trainer: compile, 20 s",
        "server: starting, 40 s: loads",
        "trainer: compile, 40 s",
        "trainer: rollouts, 1 s",  # the trainer's own log says when that lasts
    ]
