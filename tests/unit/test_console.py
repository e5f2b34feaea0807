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

from grpo_common.status import VARIABLE
from grpo_trainer.config.run import build_run
from grpo_trainer.errors import StoppedError
from grpo_trainer.files import METRICS_FILE, held_folder
from grpo_trainer.launch.plan import ProcessSpec, RunPlan
from grpo_trainer.logs.console import Output, RunConsole, live_line, sparkline, step_line
from grpo_trainer.metrics.rows import NewRows, keep_steps
from grpo_trainer.run import supervise
from grpo_trainer.saving.manifest import STATE_FILE
from tests.unit.test_supervisor import SAYS


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


def test_a_trainer_whose_reader_was_killed_goes_on() -> None:
    reads, writes = os.pipe()
    os.close(reads)
    file = os.fdopen(writes, "w")
    console = RunConsole(Output(file=file), 100)
    for step in (1, 2):
        console.write(step, {"reward/mean": 0.5})
    with suppress(BrokenPipeError):
        file.close()


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


def test_rows_that_another_process_appends_are_read_once_and_whole(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "time": 1}\n{"st')
    rows = NewRows(path)
    assert rows.read() == [{"step": 1, "time": 1}] and rows.read() == []
    with path.open("a") as file:
        file.write('ep": 2, "time": 2}\n')
    assert rows.read() == [{"step": 2, "time": 2}]
    rows.close()


def test_rows_of_a_trainer_that_restarted_are_read_and_those_before_are_not_read_again(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(f'{{"step": {step}, "time": {step}}}\n' for step in (1, 2, 3)))
    rows = NewRows(path)
    assert [row["step"] for row in rows.read()] == [1, 2, 3]
    keep_steps(path, 2)
    assert rows.read() == []
    with path.open("a") as file:
        file.write('{"step": 3, "time": 9}\n')
    assert rows.read() == [{"step": 3, "time": 9}]
    path.unlink()
    assert rows.read() == []
    rows.close()


TRAINER = (
    SAYS
    + """
import json, pathlib
folder = pathlib.Path(sys.argv[1])
with (folder / "metrics.jsonl").open("a") as file:
    for step, reward in ((2, 0.5), (3, None), (4, 1.0)):
        row = {"step": step, "time": time.time(), "reward/mean": reward, "train/seconds": 2.0}
        file.write(json.dumps(row | ({"eval/sums/accuracy": 0.25, "eval/sums/step": 3} if step == 4 else {})) + "\\n")
OWN.update(phase="trained")
print("resumed", flush=True)
log.warning("careful")
"""
)


def run_stand_in(folder: Path, console: Console, program: str = TRAINER) -> None:
    """A run whose trainer is a small program: three steps after one of an earlier process."""
    (folder / METRICS_FILE).write_text('{"step": 1, "time": 1.0, "reward/mean": 0.0}\n')
    config = build_run(
        {}, {"model_name": "demo", "weight_bridge_mode": "lora_only", "training_steps": "4", "run_dir": str(folder)}
    )
    env = {VARIABLE: str(folder / "status" / "trainer.json")}
    trainer = ProcessSpec("trainer", (sys.executable, "-c", program, str(folder)), env, ends_run=True)
    with held_folder(folder, "--run-dir") as held:
        supervise(config, RunPlan(((trainer,),), {}, {}), console, held)


def test_a_run_that_is_piped_has_a_line_a_step(tmp_path: Path) -> None:
    out = io.StringIO()
    run_stand_in(tmp_path, Console(file=out, width=100))
    lines = out.getvalue().splitlines()
    assert [line for line in lines if line.startswith("Step")] == [
        step_line(2, 4, {"reward/mean": 0.5}),
        step_line(3, 4, {"reward/mean": float("nan")}, 2.0),
        step_line(4, 4, {"reward/mean": 1.0}),
    ]
    assert {"resumed", "trainer: WARNING careful"} < {*lines}
    assert any(line.startswith("Evaluation") for line in lines)


@pytest.mark.parametrize("saved", [False, True])
def test_a_run_that_is_stopped_goes_on_only_if_something_was_saved(tmp_path: Path, saved: bool) -> None:
    if saved:
        (tmp_path / "checkpoints" / "adapter_step_1").mkdir(parents=True)
        (tmp_path / "checkpoints" / "adapter_step_1" / STATE_FILE).touch()
    stops = f"import os, signal, time; os.kill({os.getpid()}, signal.SIGINT); time.sleep(60)"
    with pytest.raises(StoppedError) as stopped:
        run_stand_in(tmp_path, Console(quiet=True), stops)
    assert ("grpo run --resume " in stopped.value.fix) == saved


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
    last = terminal.text.rindex(live_line(4, 4, {"reward/mean": 1.0}, [0.0, 0.5, 1.0], [2.0, 2.0, 2.0]))
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
