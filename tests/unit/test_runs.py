"""`grpo runs`: what a run's folder says of it."""

from __future__ import annotations

import fcntl
import io
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from rich.console import Console

from grpo_common.locks import hold, is_held
from grpo_trainer.errors import ConfigError
from grpo_trainer.files import LOCK_FILE
from grpo_trainer.metrics.rows import LAST_BYTES
from grpo_trainer.report import runs
from grpo_trainer.report.read import read_run
from grpo_trainer.report.runs import as_json, list_runs, print_runs
from tests.unit.test_report import row, write_run


def test_runs_are_found_two_levels_down_and_the_newest_comes_first(tmp_path: Path) -> None:
    for age, name in enumerate(("sums", "monday/words", "too/deep/down")):
        folder = write_run(tmp_path / name, [row(1)])
        os.utime(folder / "metrics.jsonl", (1000 - age, 1000 - age))
    (tmp_path / "latest").symlink_to(tmp_path / "sums")
    (tmp_path / "empty").mkdir()
    assert [run.folder for run in list_runs(tmp_path)] == [str(tmp_path / "sums"), str(tmp_path / "monday/words")]
    assert [run.folder for run in list_runs(tmp_path / "sums")] == [str(tmp_path / "sums")]


def test_what_a_run_is(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a", [row(n) for n in range(1, 8)], weight_bridge_mode="lora_only", model_name="m/n")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 8, "rew')
    (run,) = list_runs(tmp_path)
    # the reward of step n is n / 10; the last five are 3 to 7
    assert (run.mode, run.model, run.steps, run.total_steps, run.reward) == ("lora_only", "m/n", 7, 10, 0.5)
    assert json.loads(as_json([run]))[0]["state"] == "stopped"
    (folder / "config" / "trainer.toml").unlink()
    assert list_runs(tmp_path)[0].mode is None


@pytest.mark.parametrize(
    ("file", "text"),
    [("metrics.jsonl", b'{"step": 1\n'), ("metrics.jsonl", b"\xff\n"), ("config/trainer.toml", b"a =")],
)
def test_a_damaged_run_does_not_hide_the_others(tmp_path: Path, file: str, text: bytes) -> None:
    write_run(tmp_path / "sound", [row(1)])
    folder = write_run(tmp_path / "damaged", [row(1)])
    (folder / file).write_bytes(text)
    states = {Path(run.folder).name: run.state for run in list_runs(tmp_path)}
    assert states == {"sound": "stopped", "damaged": "damaged"}


def test_only_the_end_of_a_long_run_is_read(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a", [row(n) for n in range(1, 2000)], steps=1999)
    assert (folder / "metrics.jsonl").stat().st_size > 2 * LAST_BYTES
    (run,) = list_runs(tmp_path)
    assert (run.steps, run.reward, run.state) == (1999, 199.7, "done")  # 1997 / 10 is the middle of the last five


def test_a_lock_waits_for_one_who_looks(tmp_path: Path) -> None:
    looking = os.open(tmp_path / "lock", os.O_RDONLY | os.O_CREAT)
    fcntl.flock(looking, fcntl.LOCK_SH)
    threading.Timer(0.01, os.close, (looking,)).start()
    os.close(hold(tmp_path / "lock"))


@pytest.mark.parametrize("place", [".", "checkpoints"])
def test_a_run_whose_lock_is_held_is_running(tmp_path: Path, place: str) -> None:
    folder = write_run(tmp_path / "a", [])
    (folder / place).mkdir(exist_ok=True)
    lock = folder / place / LOCK_FILE
    assert not is_held(lock) and list_runs(tmp_path)[0].state == "stopped"
    handle = hold(lock)
    assert is_held(lock)
    assert [(run.state, run.steps, run.reward) for run in list_runs(tmp_path)] == [("running", 0, None)]
    os.close(handle)
    assert not is_held(lock), "looking does not hold it"


def test_another_users_run_is_known_by_what_everybody_may_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> bool:
        raise PermissionError(path)

    folder = write_run(tmp_path / "a", [row(1)])
    monkeypatch.setattr(os, "access", lambda path, _: "config" not in path.parts)  # modes keep nothing from root
    monkeypatch.setattr(runs, "is_held", refuse)
    (run,) = list_runs(tmp_path)
    assert (run.mode, run.steps, run.reward, run.state) == (None, 1, 0.1, "unknown")
    assert (read_run(folder).configs, read_run(folder).steps) == ({}, 1)


def test_the_table_names_runs_by_their_place(tmp_path: Path) -> None:
    write_run(tmp_path / "monday" / "words", [row(1)])
    out = io.StringIO()
    print_runs(list_runs(tmp_path), tmp_path, Console(file=out, width=100))
    assert out.getvalue().splitlines()[1].split() == ["monday/words", "none", "–", "1/10", "0.100", "stopped"]


def test_a_long_path_of_a_model_is_shortened_to_its_end(tmp_path: Path) -> None:
    write_run(
        tmp_path / "sums", [row(1)], weight_bridge_mode="lora_only", model_name="/home/someone/grpo/runs/demo-model"
    )
    out = io.StringIO()
    print_runs(list_runs(tmp_path), tmp_path, Console(file=out, width=80))
    assert [line.split()[2] for line in out.getvalue().splitlines()] == ["model", "…/demo-model"]


def test_the_command_writes_utf8_whatever_the_locale(tmp_path: Path) -> None:
    write_run(tmp_path / "größe→", [])
    # The locale C is on every machine; in it Python would choose UTF-8 by itself.
    other = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    command = [sys.executable, "-m", "grpo_trainer", "runs", str(tmp_path)]
    done = subprocess.run(command, env=os.environ | other, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()
    assert done.stdout.decode().splitlines()[1].split()[0] == "größe→"


def test_no_such_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        list_runs(tmp_path / "typo")
    assert (error.value.field, error.value.got) == ("FOLDER", str(tmp_path / "typo"))
