"""What a user sees of a run: lines, and on a terminal a live one."""

from __future__ import annotations

import io
import logging
import os
import pty
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import TextIO

import pytest
from rich.console import Console

from grpo_trainer.config.run import build_run
from grpo_trainer.files import METRICS_FILE, held_folder
from grpo_trainer.launch.plan import ProcessSpec, RunPlan
from grpo_trainer.launch.start import StartWatch
from grpo_trainer.logs.console import RunConsole
from grpo_trainer.logs.lines import live_line, sparkline, step_line, waits_line
from grpo_trainer.metrics.rows import NewRows
from grpo_trainer.phases import IN_WORDS, REPORT_FILE, STARTING, Wait
from grpo_trainer.run import supervise


def test_an_evaluation_is_one_line_on_the_console(tmp_path: Path) -> None:
    console = Console(file=(tmp_path / "out").open("w"), width=200)
    figures = {
        "accuracy": 0.5,
        "accuracy_low": 0.4,
        "accuracy_high": 0.6125,
        "samples": 96.0,
        "odd_low": 2.0,
        "step": 7.0,
    }
    RunConsole(console, 10).write(9, {f"eval/sums_0/{key}": value for key, value in figures.items()})
    console.file.flush()
    line = (tmp_path / "out").read_text().splitlines()[1]
    assert line == "Evaluation of sums_0 at step 7: accuracy 0.5 (0.4 to 0.613), samples 96, odd_low 2"


def test_the_console_says_why_the_loss_is_about_zero_once_something_was_learnt(tmp_path: Path) -> None:
    console = Console(file=(tmp_path / "out").open("w"), width=200)
    sink = RunConsole(console, 10)
    sink.write(1, {"train/loss": 0.0, "reward/mean": 0.0})
    console.file.flush()
    assert [line[:4] for line in (tmp_path / "out").read_text().splitlines()] == ["Step"]
    for step in (2, 3):
        sink.write(step, {"train/loss": 1e-6, "grpo/mean_ratio": 1.0, "reward/mean": 0.25})
    console.file.flush()
    text = (tmp_path / "out").read_text()
    assert "Step  2/10  reward 0.250" in text
    (explained,) = [line for line in text.splitlines() if not line.startswith("Step")]
    assert "loss" in explained and "reward" in explained


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


def test_the_console_says_how_long_the_run_still_takes(tmp_path: Path) -> None:
    console = Console(file=(tmp_path / "out").open("w"), width=200)
    sink = RunConsole(console, 100)
    for step, seconds in ((1, 90.0), (2, 10.0), (3, 20.0), (100, 10.0)):
        sink.write(step, {"reward/mean": 0.5, "train/seconds": seconds})
    console.file.flush()
    ends = [line.rpartition("  ")[2] for line in (tmp_path / "out").read_text().splitlines()]
    # after two: 98 x (10 + 10) / 2 = 980 s; after three: 97 x (10 + 20 + 20) / 3 = 1616.7 s; after the last nothing
    assert ends[1:3] == ["16 min left", "27 min left"]
    assert not ends[0].endswith("left") and not ends[3].endswith("left")


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


@pytest.mark.parametrize(
    ("values", "blocks"),
    [
        ([], ""),
        ([0.3], "▁"),
        ([0.0, 0.2, 0.4, 0.6, 1.0], "▁▂▄▅█"),  # 7 x 0.2 = 1.4 -> 1, 2.8 -> 3, 4.2 -> 4
        ([1.0, 0.5, 0.0], "█▅▁"),
        ([*[0.0] * 32, *[1.0] * 32], "▁▁▁▁▁▁▁▁████████"),  # 16 parts of four
    ],
)
def test_a_sparkline_is_the_course_of_the_means(values: list[float], blocks: str) -> None:
    assert sparkline(values) == blocks


def test_what_a_start_waits_for_in_one_line() -> None:
    server, trainer = Wait("server", STARTING, 20.4, 31.0, "50% loaded"), Wait("trainer", IN_WORDS["model"], 3.0)
    assert waits_line([server, trainer]) == (
        f"server: starting, 20 s (31 s last time); trainer: {IN_WORDS['model']}, 3 s: 50% loaded"
    )
    assert waits_line([]) == ""


def test_a_pipe_has_a_line_when_a_phase_begins_and_when_it_lasts() -> None:
    now: list[Wait] = []
    out = io.StringIO()
    view = RunConsole(Console(file=out, width=200), 10, lambda: now)
    begins = {0: "imports", 3: "model", 4: "compile"}
    for second in (tenth / 10 for tenth in range(600)):
        since = max(begin for begin in begins if begin <= second)
        now[:] = [Wait("server", STARTING, second, 31.0, "loads"), Wait("trainer", begins[since], second - since)]
        view.say_waits()
    assert out.getvalue().splitlines() == [
        "trainer: imports, 1 s",  # the model's phase takes less than a second
        "trainer: compile, 1 s",
        "server: starting, 10 s (31 s last time): loads",  # that it was started, was said before
        "trainer: compile, 10 s",
        "server: starting, 20 s (31 s last time): loads",
        "trainer: compile, 20 s",
        "server: starting, 40 s (31 s last time): loads",
        "trainer: compile, 40 s",
    ]


def test_rows_that_another_process_appends_are_read_once_and_whole(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"st')
    rows = NewRows(path)
    assert rows.read() == [{"step": 1}] and rows.read() == []
    with path.open("a") as file:
        file.write('ep": 2}\n')
    assert rows.read() == [{"step": 2}]
    rows.close()


TRAINER = """
import json, pathlib, sys, time
folder = pathlib.Path(sys.argv[1])
with (folder / "metrics.jsonl").open("a") as file:
    for step, reward in ((2, 0.5), (3, None), (4, 1.0)):
        row = {"step": step, "time": time.time(), "reward/mean": reward, "train/seconds": 2.0}
        file.write(json.dumps(row | ({"eval/sums/accuracy": 0.25, "eval/sums/step": 3} if step == 4 else {})) + "\\n")
(folder / "start.json").write_text('{"seconds": 1, "phases": {}}')
print("resumed", flush=True)
print("x WARNING careful", file=sys.stderr, flush=True)
"""


def run_stand_in(folder: Path, console: Console) -> None:
    """A run whose trainer is a small program: three steps after one of an earlier process."""
    (folder / METRICS_FILE).write_text('{"step": 1, "time": 1.0, "reward/mean": 0.0}\n')
    config = build_run(
        {}, {"model_name": "demo", "weight_bridge_mode": "lora_only", "training_steps": "4", "run_dir": str(folder)}
    )
    trainer = ProcessSpec("trainer", (sys.executable, "-c", TRAINER, str(folder)), ends_run=True)
    with held_folder(folder, "--run-dir") as held:
        supervise(config, RunPlan(((trainer,),), {}, {}), console, held, StartWatch(folder / REPORT_FILE, None))


def test_a_run_that_is_piped_has_a_line_a_step(tmp_path: Path) -> None:
    out = io.StringIO()
    run_stand_in(tmp_path, Console(file=out, width=100))
    lines = out.getvalue().splitlines()
    assert [line for line in lines if line.startswith("Step")] == [
        step_line(2, 4, {"reward/mean": 0.5}),
        step_line(3, 4, {"reward/mean": float("nan")}, 2.0),
        step_line(4, 4, {"reward/mean": 1.0}),
    ]
    assert {"resumed", "trainer: x WARNING careful"} < {*lines}
    assert any(line.startswith("Evaluation of sums") for line in lines)


class Terminal:
    """A pseudo-terminal. A context manager; `text` is known after it."""

    def __enter__(self) -> TextIO:
        self._master, slave = pty.openpty()
        self._pieces: list[bytes] = []
        self._reader = threading.Thread(target=self._read)
        self._reader.start()
        self._file = os.fdopen(slave, "w")
        return self._file

    def _read(self) -> None:
        with suppress(OSError):  # the other end is closed
            while piece := os.read(self._master, 1 << 16):
                self._pieces.append(piece)

    def __exit__(self, *_: object) -> None:
        self._file.close()
        self._reader.join()
        os.close(self._master)

    @property
    def text(self) -> str:
        return b"".join(self._pieces).decode()


def test_a_run_on_a_terminal_has_one_live_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    terminal = Terminal()
    with terminal as file:
        run_stand_in(tmp_path, Console(file=file, width=100))
    # Each step took 2 s; of the rewards 0, 0.5, None and 1 the sparkline has three.
    last = terminal.text.rindex("step 4/4  2.00 s a step  reward 1.000 ▁▅█  healthy")
    assert "Step " not in terminal.text
    above = [terminal.text.index(line) for line in ("resumed", "WARNING careful", "Evaluation of sums")]
    assert max(above) < last


def test_log_records_are_printed_above_the_live_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    terminal, logger = Terminal(), logging.getLogger()
    with terminal as file:
        monkeypatch.setattr(sys, "stderr", file)
        handler = logging.StreamHandler(file)
        monkeypatch.setattr(logger, "handlers", [*logger.handlers, handler])
        with RunConsole(Console(file=file, width=100), 3) as view:
            view.write(1, {"reward/mean": 0.5})
            logger.warning("careful")
        assert handler.stream is file
    assert terminal.text.index("\x1b[2Kcareful\r\n") < terminal.text.rindex("step 1/3")  # the live line is erased first
