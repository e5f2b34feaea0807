"""A folder is written by one process: a second one is refused before it has written anything, and hears by whom."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest
from rich.console import Console

from grpo_trainer import files, loop, run
from grpo_trainer.config.options import build
from grpo_trainer.config.run import build_run
from grpo_trainer.config.train import TrainConfig
from grpo_trainer.errors import ConfigError, FolderGoneError, from_os_error
from grpo_trainer.files import held_folder
from grpo_trainer.parallel.world import World
from tests.unit.factories import refusing

HOLDER = """
import sys
from pathlib import Path
from grpo_trainer.files import held_folder
with held_folder(Path(sys.argv[1]), "--save-path"):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def held(tmp_path: Path) -> Iterator[Callable[[Path], subprocess.Popen[str]]]:
    """Have another process hold a folder."""
    started: list[subprocess.Popen[str]] = []

    def hold(folder: Path) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", HOLDER, str(folder)]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        started.append(process)
        assert process.stdout is not None and process.stdout.readline() == "held\n"
        return process

    yield hold
    for process in started:
        process.kill()
        process.communicate()


def contents(folder: Path) -> dict[str, tuple[bytes, int]]:
    """All files below a folder: what is in them, and when it was written."""
    paths = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path): (path.read_bytes(), path.stat().st_mtime_ns) for path in paths}


def test_held_folder_refuses_a_second_holder(tmp_path: Path, held: Callable[[Path], subprocess.Popen[str]]) -> None:
    folder = tmp_path / "checkpoints"
    holder = held(folder)
    with refusing(ConfigError, f"--save-path {folder}", words=[str(holder.pid)]), held_folder(folder, "--save-path"):
        pass
    holder.kill()
    holder.wait()
    with held_folder(folder, "--save-path"), held_folder(tmp_path / "another", "--save-path"):
        pass
    with held_folder(folder, "--save-path"):
        pass


def test_a_child_does_not_hold_the_folder_of_its_parent(tmp_path: Path) -> None:
    code, pipe = "print(flush=True); input()", subprocess.PIPE
    with held_folder(tmp_path, "--save-path"):
        child = subprocess.Popen([sys.executable, "-c", code], stdin=pipe, stdout=pipe, close_fds=False)
        assert child.stdout is not None and child.stdout.readline() == b"\n"
    with held_folder(tmp_path, "--save-path"):
        pass
    child.communicate(b"\n")


def test_a_folder_that_is_gone_is_noticed_and_one_that_came_back_is_another(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with held_folder(folder, "--run-dir") as held:
        held.check()
        (folder / files.LOCK_FILE).unlink()  # nobody is disturbed by that
        held.check()
        folder.rename(tmp_path / "moved")
        for there in (False, True):
            if there:
                folder.mkdir()
            with refusing(
                FolderGoneError, f"--run-dir {folder}", got="another folder" if there else os.strerror(errno.ENOENT)
            ):
                held.check()
        folder.rmdir()
        (tmp_path / "moved").rename(folder)
        held.check()


def test_a_write_into_a_folder_that_is_gone_names_it(tmp_path: Path) -> None:
    with pytest.raises(OSError) as raised:
        files.write_bytes(tmp_path / "gone" / "file", b"")
    error = from_os_error(raised.value, "write")
    assert isinstance(error, FolderGoneError) and error.field == str(tmp_path / "gone" / "file")
    with pytest.raises(OSError) as raised:
        (tmp_path / "file").read_bytes()
    assert from_os_error(raised.value, "write") is None  # a file that is missed in a folder is no such thing


def test_a_file_system_without_locks_is_no_reason_to_stop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(number: int) -> Callable[[Path], NoReturn]:
        def hold(path: Path) -> NoReturn:
            raise OSError(number, os.strerror(number), str(path))

        return hold

    monkeypatch.setattr(files, "hold", fail(errno.ENOSYS))
    with held_folder(tmp_path, "--save-path"):
        pass
    monkeypatch.setattr(files, "hold", fail(errno.EROFS))
    with pytest.raises(OSError, match=str(tmp_path)), held_folder(tmp_path, "--save-path"):
        pass


def test_a_second_run_in_a_live_folder_touches_nothing(
    tmp_path: Path, held: Callable[[Path], subprocess.Popen[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    holder = held(folder)
    (folder / "config").mkdir()
    (folder / "config" / "trainer.toml").write_text("# the live run's")
    (folder / "metrics.jsonl").write_text("{}\n")
    (folder / "queue.sqlite").write_text("the live run's, too")
    for check in ("refuse_missing", "refuse_without_room"):
        monkeypatch.setattr(run, check, lambda *_, **__: None)
    before = contents(folder)
    flags: dict[str, Any] = {"model_name": "demo", "weight_bridge_mode": "lora_only", "resume": "auto"}
    with refusing(ConfigError, f"--run-dir {folder}", words=[str(holder.pid)]):
        run.run(build_run({}, {**flags, "training_steps": "7", "run_dir": str(folder)}), Console(quiet=True))
    assert contents(folder) == before


def test_held_folder_second_trainer(tmp_path: Path, held: Callable[[Path], subprocess.Popen[str]]) -> None:
    folder = tmp_path / "checkpoints"
    holder = held(folder)
    (folder / "step_1").mkdir()
    (folder / "step_1" / "state.json").write_text("{}")
    before = contents(tmp_path)
    values = {"model": "/no/model", "device": "cpu", "save_path": str(folder), "log_dir": str(tmp_path)}
    with refusing(ConfigError, f"--save-path {folder}", words=[str(holder.pid)]):
        loop.train(build(TrainConfig, values | {"resume": "auto"}), lambda _: World())
    assert contents(tmp_path) == before
