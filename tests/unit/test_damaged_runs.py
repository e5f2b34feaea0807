"""A run's folder: one process holds it; nothing ends in a traceback if files are damaged, and none is emptied."""

from __future__ import annotations

import codecs
import errno
import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from rich.console import Console
from typer.testing import CliRunner

from environments.base import BaseEnv
from environments.config import BaseEnvConfig, Settings, parse_settings
from environments.config import ConfigError as EnvironmentConfigError
from environments.demo_model.folder import MARKER, Recipe, finished_before
from environments.items import Shuffled
from environments.running.state import FOLDER as STATES
from environments.running.state import DataSet, StateFiles, keep, refuse_changed
from grpo_common.errors import UserError
from grpo_common.roster import read_members, read_served
from grpo_trainer import files, loop, run
from grpo_trainer.cli import app
from grpo_trainer.config.options import build
from grpo_trainer.config.run import build_run, read_toml
from grpo_trainer.config.train import TrainConfig
from grpo_trainer.doctor.checks import Case, run_folder
from grpo_trainer.dry_run import look_ahead
from grpo_trainer.errors import ConfigError, FolderGoneError, from_os_error
from grpo_trainer.files import held_folder
from grpo_trainer.logs.console import RunConsole
from grpo_trainer.logs.sinks import RUN_ID_FILE, build_metric_log, run_id
from grpo_trainer.machine import look
from grpo_trainer.metrics.rows import NewRows, Rows, keep_steps, read_file, read_rows
from grpo_trainer.parallel.world import World
from grpo_trainer.policy import Policy, build_policy
from grpo_trainer.record import write_record
from grpo_trainer.report.page import report_path, write_report
from grpo_trainer.report.runs import as_json, list_runs
from grpo_trainer.saving.checkpoint import Checkpoints
from grpo_trainer.saving.manifest import newest_whole, refuse_unreadable
from grpo_trainer.trainer import Trainer
from tests.old_runs import FINISHED, MODEL, UNFINISHED, config_of, content, copy_of
from tests.stand_ins import scripted
from tests.unit.factories import refusing
from tests.unit.test_report import html_of, row, write_run

TORN = b'{"step": 3, "reward/me'


def line(step: int, **more: object) -> bytes:
    return json.dumps(row(step, **more)).encode() + b"\n"


# rows ---------------------------------------------------------------------------------------------------------


DAMAGED_LINES = {
    **{"torn": TORN, "zeros": b"\0" * 40, "no UTF-8": b"\xff\xfe", "a list": b"[1]", "a number": b"3", "empty": b""},
    **{"a step of text": b'{"step": "a"}', "no step": b'{"reward": 1}', "a step below 0": b'{"step": -1}'},
    **{"a long number": b"9" * 5000, "nested": b"[" * 100_000},
}


@pytest.mark.parametrize("damage", DAMAGED_LINES.values(), ids=DAMAGED_LINES)
def test_rows_leave_out_and_count_a_line_that_is_none(tmp_path: Path, damage: bytes) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(line(1) + damage + b"\n" + line(2) + TORN)
    found = read_file(path)
    assert [each["step"] for each in found.rows] == [1, 2] and found.unreadable == 1
    new = NewRows(path)
    assert [each["step"] for each in new.read()] == [1, 2] and not new.read()
    new.close()


def test_rows_with_odd_figures_or_a_byte_order_mark(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    odd = b'{"step": 1, "a": NaN, "b": 1e999, "c": "x", "d": [1], "e": true, "f": 2, "g": 1' + b"0" * 400 + b"}\n"
    path.write_bytes(odd)
    assert read_rows(path) == [{"step": 1, **dict.fromkeys("abcdeg"), "f": 2}]
    assert read_file(tmp_path / "none") == Rows([])
    path.write_bytes(codecs.BOM_UTF8 + line(1) + line(2))
    assert [each["step"] for each in read_rows(path)] == [1, 2]


def test_keep_steps_keeps_what_it_can_not_read(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(line(1) + b"\xff\n" + line(2) + TORN)
    keep_steps(path, 1)
    assert path.read_bytes() == line(1) + b"\xff\n" + TORN + b"\n", "a new row does not end up in the torn line"
    before = path.stat().st_mtime_ns
    keep_steps(path, 1)
    assert path.stat().st_mtime_ns == before


# reports and lists --------------------------------------------------------------------------------------------


def test_report_and_list_of_damaged_runs(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "sound", [row(1)])
    (folder / "config" / "env-sums.toml").write_text('api_key = "hunter2"\na = = 1\n')
    html = html_of(folder)
    assert "config/env-sums.toml" in html and "hunter2" not in html, "it is named, and not shown"
    folder = write_run(tmp_path / "torn", [row(1)])
    with (folder / "metrics.jsonl").open("ab") as file:
        file.write(TORN + line(5))
        file.write(line(6))
    found = {Path(run.folder).name: (run.state, run.steps, run.total_steps) for run in list_runs(tmp_path)}
    assert found == {"sound": ("stopped", 1, 10), "torn": ("damaged", 6, 10)}


def test_a_run_folder_that_cant_be_made_is_refused_by_run_dry_run_and_doctor(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", tmp_path / "file" / "x", Path("/proc/x/y")):
        config = build_run({}, {"run_dir": str(folder), "model_name": str(MODEL)})
        for refused in (functools.partial(look_ahead, config, print), functools.partial(run.run, config, Console())):
            with refusing(ConfigError, f"--run-dir {folder}"):
                refused()
        assert run_folder(Case(look(), config)).status == "fail"


# resuming -----------------------------------------------------------------------------------------------------


def test_resume_with_damaged_checkpoints_only_names_them_and_changes_nothing(tmp_path: Path) -> None:
    checkpoints = copy_of(FINISHED, tmp_path) / "checkpoints"
    for name, text in (("adapter_step_3", b"garbage"), ("adapter_final", b"\0\xff")):
        (checkpoints / name / "state.json").write_bytes(text)
    before = content(tmp_path)
    for refused in (refuse_unreadable, lambda folder: newest_whole(folder, print)):
        with pytest.raises(ConfigError) as error:
            refused(checkpoints)
        assert "adapter_step_3" in error.value.got and "adapter_final" in error.value.got
    flags = {"resume": "auto", "run_dir": str(tmp_path / "finished"), "model_name": str(MODEL)}
    done = CliRunner().invoke(app, ["run", *(w for k, v in flags.items() for w in (f"--{k.replace('_', '-')}", v))])
    assert done.exit_code and isinstance(done.exception, ConfigError) and "adapter_final" in str(done.exception)
    assert run_folder(Case(look(), build_run({}, flags))).status == "fail"
    assert content(tmp_path) == before


@pytest.mark.parametrize(
    "damage",
    [
        b"[1]",
        b"\xff",
        b"{}",
        b'"x"',
        b"[" * 100_000,
        *(b'{"position": %s}' % each for each in (b'"3"', b"-1", b"true")),
    ],
)
def test_states_of_environments_and_demo_models_may_be_damaged(tmp_path: Path, damage: bytes) -> None:
    """Or can't be restored: an older one is taken."""
    (tmp_path / MARKER).write_bytes(damage)
    assert finished_before(tmp_path, None) is None and finished_before(tmp_path, Recipe()) is None
    states = StateFiles(tmp_path, "sums")
    states.save(3, {"position": 2})
    (tmp_path / "sums" / "step-4.json").write_bytes(damage)
    (tmp_path / "sums" / "step-x.json").write_bytes(b"{}")
    env = scripted(BaseEnv[str])
    env.items = Shuffled(["a", "b", "c"], seed=0)
    assert states.newest(9, env.restore) == {"position": 2} and env.state() == {"position": 2}
    assert states.newest(2) is None


@pytest.mark.parametrize("damage", [b"{}", b"[3]", b"\xff", b"[" * 9000, b'{"data": [{"x": 1}]}', b'{"data": 3}'])
def test_records_of_a_resumed_run_may_be_damaged(tmp_path: Path, damage: bytes) -> None:
    folder = copy_of(FINISHED, tmp_path)
    (folder / "data").mkdir()
    for name in ("versions.json", "data/own.json"):
        (folder / name).write_bytes(damage)
    config = build_run({}, {"resume": "auto", "run_dir": str(folder), "model_name": str(MODEL)})
    write_record(config, [])
    assert (folder / "damaged_versions.json").read_bytes() == damage
    assert len(json.loads((folder / "versions.json").read_bytes())) == 1
    data = [DataSet("rows.jsonl", 5, "ab")]
    refuse_changed(folder / "data" / "own.json", data, allowed=False)
    keep(folder / "data" / "own.json", data)
    with pytest.raises(EnvironmentConfigError):
        refuse_changed(folder / "data" / "own.json", [DataSet("rows.jsonl", 5, "cd")], allowed=False)


def test_files_of_users_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_bytes(codecs.BOM_UTF8 + b'training_steps = 7\n[env]\ntokenizer_name = "m"\n')
    assert read_toml(path)["training_steps"] == 7
    path.write_bytes(codecs.BOM_UTF8 + b'[env]\ntokenizer_name = "m"\n')
    parsed = parse_settings(Settings[BaseEnvConfig], "env", ["--config", str(path)])
    assert parsed.env.tokenizer_name == "m"


@pytest.mark.parametrize("name", ["../../evil", "a/b", "..", ".", ".a", "a b", "a;b", "\x1b"])
def test_a_name_of_an_environment_is_no_path(tmp_path: Path, name: str) -> None:
    """It becomes the name of files in the run's folder, and in that of states."""
    with pytest.raises(ConfigError) as error:
        build_run({"environments": [{"name": name}]}, {"model_name": "m"})
    assert name in error.value.got or repr(name) in error.value.got
    StateFiles(tmp_path / "own", name).save(1, {})
    (saved,) = tmp_path.rglob("step-1.json")
    assert saved.parent.parent == tmp_path / "own"


# fuzz ---------------------------------------------------------------------------------------------------------

FILES = sorted(
    {path.relative_to(run) for run in (FINISHED, UNFINISHED) for path in run.rglob("*") if path.is_file()}, key=str
)
PIECES = (
    *(b"\0", b"\xff\xfe", b"\n", b"{", b'"', b"[" * 2000, b"9" * 400, b"null", b"-", b"\xed\xa0\x80"),
    *(b'"\\ud800"', b"1e999"),
)
DAMAGE = st.one_of(
    st.tuples(st.just("cut"), st.floats(0, 1), st.just(b"")),
    st.tuples(
        st.sampled_from(["insert", "overwrite", "line"]),
        st.floats(0, 1),
        st.sampled_from(PIECES) | st.binary(max_size=40),
    ),
)
DAMAGES = st.lists(st.tuples(st.sampled_from(FILES), DAMAGE), min_size=1, max_size=3)


Damage = list[tuple[Path, tuple[str, float, bytes]]]


def damage_files(folder: Path, damage: Damage) -> None:
    for file, (how, place, piece) in [(folder / path, what) for path, what in damage if (folder / path).is_file()]:
        data = file.read_bytes()
        at = int(place * len(data))
        match how:
            case "cut":
                file.write_bytes(data[: max(1, at)])
            case "insert":
                file.write_bytes(data[:at] + piece + data[at:])
            case "overwrite":
                file.write_bytes(data[:at] + piece + data[at + len(piece) :])
            case _:
                at = data.find(b"\n", at) + 1
                file.write_bytes(data[:at] + piece + b"\n" + data[at:])


def read_everything(folder: Path) -> None:
    """What `report`, `runs`, `doctor`, `servers` and the resuming environment read."""
    with suppress(UserError):
        write_report([folder], report_path([folder], None))
    (folder / "report.html").unlink(missing_ok=True)
    as_json(list_runs(folder.parent))
    for read in (read_members, read_served):
        with suppress(UserError):
            read(folder / "servers")
    for step in (3, 9):
        StateFiles(folder / "checkpoints" / STATES, "arithmetic").newest(step)
    for resume in ("auto", str(folder)):
        with suppress(UserError):
            config = build_run({}, {"resume": resume, "run_dir": str(folder), "model_name": str(MODEL)})
            run_folder(Case(look(), config))


@given(st.sampled_from([FINISHED, UNFINISHED]), DAMAGES)
def test_readers_of_a_damaged_run_fuzz(run: Path, damage: Damage) -> None:
    """Nothing but an error with one message, and every file as it was."""
    with TemporaryDirectory() as place:
        folder = copy_of(run, Path(place))
        damage_files(folder, damage)
        before = content(folder)
        read_everything(folder)
        assert content(folder) == before


@functools.cache
def finished_trainer() -> tuple[Policy, Trainer]:
    """For all examples: whatever is resumed replaces what the one before it left."""
    config = config_of(FINISHED, Path("/none"))
    policy = build_policy(config)
    return policy, Trainer(policy.model, config)


@example([(Path("metrics.jsonl"), ("insert", 0.0, b"\n")), (Path("metrics.jsonl"), ("cut", 0.0, b""))])
@given(DAMAGES)
def test_resuming_a_damaged_run_fuzz(damage: Damage) -> None:
    """Training goes on from a whole checkpoint or ends with an error; what was in a file is somewhere."""
    with TemporaryDirectory() as place:
        folder = copy_of(FINISHED, Path(place))
        (folder / RUN_ID_FILE).write_text("0123456789ab\n")
        damage_files(folder, damage)
        before = content(folder)
        config = config_of(FINISHED, folder)
        policy, trainer = finished_trainer()
        with suppress(UserError):
            progress = Checkpoints(config, policy, trainer.optimizer, trainer.norms).resume()
            assert progress.step in (3, 4)
            keep_steps(folder / "samples.jsonl", progress.step)
            build_metric_log(config, RunConsole(Console(quiet=True), 9), progress.step).close()
            run_id(config, progress.step)
        after = {*content(folder).values()}
        for path, data in ((path, data) for path, data in before.items() if data.strip()):
            moved = [folder / path, folder / "checkpoints" / f"damaged_{path.parent.name}" / path.name]
            kept = next((each for each in moved if each.is_file()), None)
            assert data in after or (path.suffix == ".jsonl" and kept and kept.stat().st_size), path


# a folder is written by one process, and a second one is refused before it has written anything -----------------------


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
    hold = mock.Mock(side_effect=OSError(errno.ENOSYS, "", str(tmp_path)))
    monkeypatch.setattr(files, "hold", hold)
    with held_folder(tmp_path, "--save-path"):
        pass
    hold.side_effect = OSError(errno.EROFS, "", str(tmp_path))
    with pytest.raises(OSError, match=str(tmp_path)), held_folder(tmp_path, "--save-path"):
        pass


def test_a_second_run_in_a_live_folder_touches_nothing(tmp_path: Path, held: Any, busy_port: int) -> None:
    folder = tmp_path / "run"
    holder = held(folder)
    (folder / "metrics.jsonl").write_text("{}\n")
    (folder / "queue.sqlite").write_text("the live run's, too")
    before = content(folder)
    flags: dict[str, Any] = {"model_name": "demo", "resume": "auto", "api.port": busy_port}
    with refusing(ConfigError, f"--run-dir {folder}", words=[str(holder.pid)]):
        run.run(build_run({}, {**flags, "run_dir": str(folder)}), Console(quiet=True))
    assert content(folder) == before


def test_held_folder_second_trainer(tmp_path: Path, held: Callable[[Path], subprocess.Popen[str]]) -> None:
    folder = tmp_path / "checkpoints"
    holder = held(folder)
    (folder / "step_1").mkdir()
    (folder / "step_1" / "state.json").write_text("{}")
    before = content(tmp_path)
    values = {"model": "/no/model", "device": "cpu", "save_path": str(folder), "log_dir": str(tmp_path)}
    with refusing(ConfigError, f"--save-path {folder}", words=[str(holder.pid)]):
        loop.train(build(TrainConfig, values | {"resume": "auto"}), lambda _: World())
    assert content(tmp_path) == before
    holder.kill()
    holder.wait()
    with held_folder(folder, "--save-path"), held_folder(tmp_path / "another", "--save-path"):
        pass
    with held_folder(folder, "--save-path"):
        pass
