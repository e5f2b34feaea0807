"""Under a run something is deleted, or its environment goes wrong: one message, nothing else lost, nothing left."""

from __future__ import annotations

import re
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.processes import alive, family, tail
from tests.runs import finished, rows, started, wait_for_step

pytestmark = pytest.mark.timeout(600)

ODD = "tests.integration.odd_environment"


def newest(run_dir: Path) -> Path:
    """The newest whole checkpoint."""
    whole = [path.parent for path in run_dir.glob("checkpoints/adapter_step_*/state.json")]
    return max(whole, key=lambda path: int(path.name.rpartition("_")[2]))


def the_message(log: Path) -> str:
    """What `grpo run` says at its end: one message, and no traceback."""
    said = log.read_text()
    assert said.count("\ngrpo: ") == 1 and "Traceback" not in said, tail(log)
    return said.partition("\ngrpo: ")[2]


def left_nothing(members: dict[int, str], run_dir: Path) -> None:
    assert not alive(list(members)), members
    assert not list(run_dir.rglob(".*.tmp")), "a half-written file"


def goes_on(demo_model: Path, run_dir: Path, log: Path, steps: int) -> None:
    """Resumed, the run comes to its end."""
    with started(demo_model, run_dir, log, training_steps=steps, resume="auto") as process:
        assert finished(process, log) == 0, tail(log)
    assert rows(run_dir)[-1]["step"] == steps


def delete_queue(run_dir: Path) -> None:
    (run_dir / "queue.sqlite").unlink()


def delete_run(run_dir: Path) -> None:
    """Whole, however much is written into it meanwhile."""
    run_dir.rename(run_dir.with_name("deleted"))
    shutil.rmtree(run_dir.with_name("deleted"), ignore_errors=True)


@pytest.mark.parametrize(
    ("delete", "names"),
    [(delete_queue, r"^api: .*\n(?:.*\n)*.*--store {}/queue\.sqlite"), (delete_run, r"^--run-dir {}: ")],
)
def test_without_its_queue_or_its_folder_a_run_ends_saved(
    demo_model: Path, tmp_path: Path, delete: Callable[[Path], None], names: str
) -> None:
    run_dir, log = tmp_path / "run", tmp_path / "log"
    with started(demo_model, run_dir, log, training_steps=500, checkpoint_interval=1000) as process:
        wait_for_step(run_dir, 3, process, log)
        members = family(process.pid)
        delete(run_dir)
        assert finished(process, log, 60) == 1, tail(log)
    message = the_message(log)
    assert re.search(names.format(re.escape(str(run_dir))), message), message
    assert f"grpo run --resume {run_dir}" in message
    left_nothing(members, run_dir)
    step = int(newest(run_dir).name.rpartition("_")[2])
    assert step >= 3
    goes_on(demo_model, run_dir, log, step + 1)


def test_without_its_adapters_or_a_checkpoint_a_run_goes_on(demo_model: Path, tmp_path: Path) -> None:
    run_dir, log = tmp_path / "run", tmp_path / "log"
    options = {"training_steps": 500, "checkpoint_interval": 1000, "lora_transport": "disk"}
    with started(demo_model, run_dir, log, **options) as process:
        wait_for_step(run_dir, 2, process, log)
        process.send_signal(signal.SIGINT)
        assert finished(process, log, 60) == 130, tail(log)
    saved = newest(run_dir)
    step = rows(run_dir)[-1]["step"]
    with started(demo_model, run_dir, log, **options, resume="auto") as process:
        wait_for_step(run_dir, step + 1, process, log)
        members = family(process.pid)
        shutil.rmtree(saved)
        (run_dir / "adapters").rename(tmp_path / "deleted")  # at once, although it is being written to
        wait_for_step(run_dir, step + 6, process, log)
        again = newest(run_dir)
        process.send_signal(signal.SIGINT)
        assert finished(process, log, 60) == 130, tail(log)
    assert step < int(again.name.rpartition("_")[2]) < rows(run_dir)[-1]["step"]
    warned = [line for line in log.read_text().splitlines() if line.startswith("trainer: ") and "WARNING" in line]
    assert len([line for line in warned if str(saved) in line]) == 1, warned
    assert 1 <= len([line for line in warned if str(run_dir / "adapters") in line]) <= 2, warned
    assert (run_dir / "adapters").is_dir()
    left_nothing(members, run_dir)


@pytest.mark.parametrize(
    ("wrong", "names"),
    [
        ("nan", "a score that is not finite"),
        ("empty", r"\b16 groups\b.*\bempty\b"),
        ("blocks", r"event loop"),
        ("crashes", r"exit code 3"),
    ],
)
def test_an_environment_that_goes_wrong_ends_the_run_saved_and_by_name(
    demo_model: Path, tmp_path: Path, wrong: str, names: str
) -> None:
    run_dir, log = tmp_path / "run", tmp_path / "log"
    own = {"env": ODD, "env__wrong": wrong, "env__score_timeout": 10, "training_steps": 500, "max_restarts": 0}
    with started(demo_model, run_dir, log, **own) as process:
        wait_for_step(run_dir, 1, process, log)
        members = family(process.pid)
        assert finished(process, log, 120) == 1, tail(log)
    message = the_message(log)
    assert message.startswith("env-odd_environment: ") and re.search(names, message), message
    assert f"grpo run --resume {run_dir}" in message
    warned = re.findall(r"^env-odd_environment: .* WARNING ", log.read_text(), re.MULTILINE)
    assert len(warned) <= 40, "16 groups by name, the code that blocks at most once for each, and a line a step"
    left_nothing(members, run_dir)
    assert int(newest(run_dir).name.rpartition("_")[2]) == rows(run_dir)[-1]["step"]
