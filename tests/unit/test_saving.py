"""Checkpoints on their way to the disk: checksums, copies, the thread that writes, and when they are begun."""

from __future__ import annotations

import errno
import hashlib
import io
import logging
import os
import random
import shutil
import struct
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from grpo_common import folders
from grpo_trainer.config.train import CheckpointConfig, OptimizerConfig, TrainConfig
from grpo_trainer.errors import ConfigError
from grpo_trainer.files import whole_folder
from grpo_trainer.metrics.types import reduce
from grpo_trainer.optim.adamw import AdamW
from grpo_trainer.optim.steps import NormHistory
from grpo_trainer.policy import AllWeights
from grpo_trainer.saving.background import Schedule, Snapshot
from grpo_trainer.saving.checkpoint import Checkpoints, Progress, seed_generators
from grpo_trainer.saving.manifest import STATE_FILE, DamagedError, check_files, read_state, seal
from grpo_trainer.trainer import Trainer
from grpo_trainer.versions import VersionOffsets
from tests.unit.factories import batch, refusing, sample
from tests.unit.test_checkpoint import ROLLOUTS, names, same, weights
from tests.unit.test_checkpoint import trainer_of_all_weights as trainer
from tests.unit.tiny_lora import tiny_qwen


class Weights(AllWeights):
    """All weights; `before` and `after` are called around each write of them."""

    before: Callable[[], object] = staticmethod(lambda: None)
    after: Callable[[], object] = staticmethod(lambda: None)

    def write(self, folder: Path, tensors: Mapping[str, torch.Tensor]) -> None:
        self.before()
        super().write(folder, tensors)
        self.after()


def weights_of(one: Trainer) -> Weights:
    return Weights(one.model, None, torch.bfloat16)  # type: ignore[arg-type]


def saver(
    one: Trainer, folder: Path, *, policy: Weights | None = None, snapshot: Snapshot | None = None, **options: object
) -> Checkpoints:
    config = CheckpointConfig.model_validate({"save_path": folder, "resume": "auto", "keep_checkpoints": 0, **options})
    return Checkpoints(config, policy or weights_of(one), one.optimizer, snapshot=snapshot or Snapshot())


def disk_is_full() -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "there")


# ---------------------------------------------------------------- checksums


JUMPED = VersionOffsets().jumped(1, 2)


def sealed(folder: Path) -> Path:
    (folder / "inner").mkdir(parents=True)
    (folder / "weights").write_bytes(b"0123456789")
    (folder / "inner" / "more").write_bytes(b"abc")
    seal(folder, Progress(3, 4, ("x", "y"), JUMPED))
    return folder


@pytest.mark.parametrize(
    ("file", "content", "got", "wanted"),
    [
        ("weights", b"0123456788", *(f"checksum {hashlib.sha256(b'012345678' + x).hexdigest()}" for x in (b"8", b"9"))),
        ("weights", b"012345", "6 bytes", "10 bytes"),
        ("inner/more", None, "no such file", "3 bytes"),
    ],
)
def test_check_files_damaged(tmp_path: Path, file: str, content: bytes | None, got: str, wanted: str) -> None:
    path = sealed(tmp_path / "c")
    (path / file).unlink() if content is None else (path / file).write_bytes(content)
    with refusing(DamagedError, file, got=got, wanted=wanted):
        check_files(read_state(path))


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "{}", '{"step": 3}', '{"step": 1, "policy_version": 1, "files": 3}', "another digit"]
)
def test_read_state_of_a_damaged_file(tmp_path: Path, text: str) -> None:
    file = sealed(tmp_path / "c") / STATE_FILE
    file.write_text(file.read_text().replace('"step": 3', '"step": 5') if text == "another digit" else text)
    with refusing(DamagedError, STATE_FILE, words=["checksum"] if text == "another digit" else []):
        read_state(tmp_path / "c")


def test_seal_syncs_all_before_the_state_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fsync, folder = os.fsync, tmp_path / "c"
    is_sealed: dict[int, bool] = {}

    def noted(handle: int) -> None:
        is_sealed[os.fstat(handle).st_ino] = (folder / STATE_FILE).exists()
        fsync(handle)

    monkeypatch.setattr(os, "fsync", noted)
    sealed(folder)
    found = {path.name: is_sealed.get(path.stat().st_ino) for path in (folder, *folder.rglob("*"))}
    assert found == {"inner": False, "weights": False, "more": False, STATE_FILE: True, "c": True}
    check_files(state := read_state(folder))
    assert state.progress == Progress(3, 4, ("x", "y"), JUMPED)


# ---------------------------------------------------------------- damaged checkpoints of a run


def test_resume_takes_the_newest_whole_checkpoint(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Damaged ones are put aside, unless one of them was named."""
    caplog.set_level(logging.INFO)
    one = trainer()
    checkpoints = saver(one, tmp_path)
    kept = []
    for step in range(1, 5):
        one.step(ROLLOUTS, step)
        kept.append(weights(one))
        checkpoints.save(Progress(step, step))
    noticed = [record.getMessage() for record in caplog.records if getattr(record, "notice", False)]
    assert [str(tmp_path / f"step_{step}") in line for step, line in enumerate(noticed, 1)] == [True] * 4
    newest = tmp_path / "step_4" / "trainer_state.pt"
    data = newest.read_bytes()
    newest.write_bytes(data[:-9] + bytes([data[-9] ^ 1]) + data[-8:])
    (tmp_path / "step_3" / "model.safetensors").unlink()
    with refusing(ConfigError, f"--resume {newest}", words=["checksum ", "--resume auto"]):
        saver(trainer(), tmp_path, resume=str(newest.parent)).resume()
    other = trainer()
    assert saver(other, tmp_path).resume() == Progress(2, 2)
    assert same(weights(other), kept[1])
    assert names(tmp_path) == ["damaged_step_3", "damaged_step_4", "step_1", "step_2"]
    lines = [record.getMessage() for record in caplog.records]
    damaged = [line for line in lines if line.startswith("CHECKPOINT DAMAGED: ")]
    for line, step, file in zip(damaged, (4, 3), ("trainer_state.pt", "model.safetensors"), strict=True):
        assert f"step_{step}: {file}: " in line and f"damaged_step_{step}" in line
    assert f"{tmp_path / 'step_2'}: step 2, " in lines[-1]


def test_what_killed_processes_left_is_removed(tmp_path: Path) -> None:
    (tmp_path / ".step_3.0a1b2c3d.tmp").mkdir()
    (tmp_path / ".step_3.0a1b2c3d.tmp" / "model.safetensors").write_bytes(b"x")
    (tmp_path / ".other").mkdir()
    assert saver(trainer(), tmp_path).resume() == Progress()
    assert [path.name for path in tmp_path.iterdir()] == [".other"]


def test_a_replacement_that_was_cut_off_gives_the_old_checkpoint_its_name_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a file system that can't exchange names."""
    saver(first := trainer(), tmp_path).save(Progress(1, 1))
    (tmp_path / "step_1").rename(tmp_path / ".step_1.0a1b2c3d.tmp.aside.tmp")
    (tmp_path / ".step_1.0a1b2c3d.tmp").mkdir()
    assert saver(first, tmp_path).resume() == Progress(1, 1)
    assert [path.name for path in tmp_path.iterdir()] == ["step_1"]

    rename, number = Path.rename, 0

    def failing(self: Path, target: Path) -> Path:
        nonlocal number
        number += 1
        if number == 2:
            raise OSError(errno.EIO, "broken")
        return rename(self, target)

    monkeypatch.setattr(folders.ctypes, "CDLL", lambda _: SimpleNamespace())
    monkeypatch.setattr(Path, "rename", failing)
    with pytest.raises(OSError, match="broken"), whole_folder(tmp_path / "step_1"):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["step_1"] and read_state(tmp_path / "step_1")


def test_whole_folder_is_never_missing_and_syncs_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, synced = tmp_path / "c", list[tuple[Path, bool]]()
    remove, there = shutil.rmtree, list[str]()

    def rmtree(path: Path, **options: Any) -> None:
        remove(path, **options)
        there.append((target / "f").read_text())

    monkeypatch.setattr(shutil, "rmtree", rmtree)
    monkeypatch.setattr(folders, "sync", lambda path: synced.append((path, target.is_dir())))
    for text in ("old", "new"):
        with whole_folder(target) as folder:
            (folder / "f").write_text(text)
            assert text == "old" or (target / "f").read_text() == "old"
            assert synced == [(tmp_path, True)] * (text == "new")
    assert there == ["new"]  # when the old folder was removed, the new one had its name
    (tmp_path / "link").symlink_to("c")
    with whole_folder(tmp_path / "link") as folder:
        (folder / "f").write_text("newest")
    assert (target / "f").read_text() == "newest" and (tmp_path / "link").is_symlink()
    assert {path.name for path in tmp_path.iterdir()} == {"c", "link"}


def test_a_run_that_never_saves_settles_its_batches_at_once_and_replaces_no_deleted_checkpoint(tmp_path: Path) -> None:
    saver(trainer(), tmp_path).save(Progress(5, 5))
    checkpoints = saver(trainer(), tmp_path, checkpoint_interval="never")
    assert checkpoints.resume() == Progress(5, 5)
    shutil.rmtree(tmp_path / "step_5")
    assert checkpoints.maybe_save(Progress(1000, 1000, ("a",))) == {}
    assert checkpoints.settled(Progress(1000, 1000, ("a",))) == ("a",)
    checkpoints.close()
    assert not list(tmp_path.glob("step_*"))


# ---------------------------------------------------------------- in the background


def draw() -> tuple[float, float, list[float]]:
    """From each generator."""
    return random.random(), float(np.random.rand()), torch.rand(2).tolist()


def test_what_is_saved_is_what_the_weights_were_when_it_was_asked_for(tmp_path: Path) -> None:
    seed_generators(3)
    first = draw()
    seed_generators(3)
    assert draw() == first
    one = trainer()
    one.step(ROLLOUTS, 0)
    slow, go_on = weights_of(one), threading.Event()
    slow.before = lambda: go_on.wait(30)
    checkpoints = saver(one, tmp_path, policy=slow, checkpoint_interval=1)
    kept = weights(one)
    draw()  # a new trainer seeds the generator: its state must be another one
    assert "train/save_time" in checkpoints.maybe_save(Progress(1, 1, ("a",)))
    assert checkpoints.safe is None and not checkpoints.settled(Progress(1, 1, ("a",)))
    wanted = draw()
    one.step(ROLLOUTS, 1)
    go_on.set()
    checkpoints.close()
    assert checkpoints.safe == Progress(1, 1, ("a",)) and checkpoints.settled(Progress(2, 2, ("a", "b"))) == ("a",)
    other = trainer()
    assert saver(other, tmp_path).resume() == Progress(1, 1, ("a",))
    assert same(weights(other), kept) and not same(weights(one), kept)
    assert draw() == wanted


def test_checkpoints_raise_at_a_later_step_that_a_write_failed(tmp_path: Path) -> None:
    one = trainer()
    policy, training_goes_on = weights_of(one), threading.Event()
    policy.before = lambda: training_goes_on.wait(30) and disk_is_full()
    checkpoints = saver(one, tmp_path, policy=policy, checkpoint_interval=1000)
    checkpoints.maybe_save(Progress(1000, 1000))
    training_goes_on.set()
    with pytest.raises(OSError) as error:
        for step in range(1001, 2000):  # none of which is saved
            checkpoints.maybe_save(Progress(step, step))
            time.sleep(0.03)
    assert error.value.errno == errno.ENOSPC
    assert checkpoints.safe is None and not names(tmp_path)


def test_checkpoints_newest_deleted_another_is_written(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    checkpoints = saver(trainer(), tmp_path, checkpoint_interval=10, background_writes=False)
    checkpoints.maybe_save(Progress(10, 10))
    shutil.rmtree(tmp_path / "step_10")
    for step in (11, 12):
        checkpoints.maybe_save(Progress(step, step))
    assert [path.name for path in tmp_path.glob("step_*")] == ["step_11"]
    assert checkpoints.safe is not None and checkpoints.safe.step == 11
    shutil.rmtree(tmp_path / "step_11")
    assert checkpoints.save(Progress(11, 11)) == tmp_path / "step_11"  # it says what is there
    check_files(read_state(tmp_path / "step_11"))
    warned = [record.args for record in caplog.records if record.levelno == logging.WARNING]
    assert warned == [(tmp_path / "step_10",), (tmp_path / "step_11",)]
    folder = checkpoints.export(13)  # so are weights for a server
    shutil.rmtree(folder)
    assert checkpoints.export(13) == folder and folder.is_dir()
    shutil.rmtree(folder)
    assert checkpoints.save(Progress(13, 13)) == folder
    check_files(read_state(folder))


def test_checkpoints_of_a_finished_run_never_write_into_the_final_one(tmp_path: Path) -> None:
    def content() -> dict[str, bytes]:
        return {file.name: file.read_bytes() for file in path.iterdir()}

    path = saver(trainer(), tmp_path).save(Progress(2, 2), final=True)
    written = content()
    again = trainer()
    policy = weights_of(again)
    resumed = saver(again, tmp_path, policy=policy)
    assert resumed.resume() == Progress(2, 2)
    torch.rand(3)
    policy.before = lambda: pytest.fail("nothing is to be written")
    assert resumed.save(Progress(2, 2), final=True) == path
    policy.before, policy.after = lambda: None, disk_is_full
    with pytest.raises(OSError) as error:
        resumed.save(Progress(3, 2), final=True)  # one step more, which was skipped: the weights are the folder's
    assert error.value.errno == errno.ENOSPC
    assert content() == written and names(tmp_path) == [path.name]
    policy.after = lambda: None
    assert resumed.save(Progress(3, 2), final=True) == path
    check_files(read_state(path))
    assert read_state(path).progress == Progress(3, 2)


def test_snapshot_without_room_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    checkpoints = saver(trainer(), tmp_path, snapshot=Snapshot(available=lambda: 1000), checkpoint_interval=1)
    for step in (1, 2):
        checkpoints.maybe_save(Progress(step, step))
        assert checkpoints.safe == Progress(step, step)  # at once
    (warning,) = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert warning.name == "grpo_trainer.saving.background" and isinstance(warning.args, tuple)
    assert warning.args[1] == 1000 / 1e9, "what there is, in GB"


@pytest.mark.parametrize("available", [1 << 30, 1000])
def test_snapshot_makes_memory_for_a_large_copy_in_the_background(tmp_path: Path, available: int) -> None:
    """The first checkpoint is put off."""
    asked_in: list[threading.Thread] = []

    def room() -> int:
        asked_in.append(threading.current_thread())
        return available

    one = trainer()
    one.step(ROLLOUTS, 0)
    checkpoints = saver(one, tmp_path, snapshot=Snapshot(available=room, at_once=0), checkpoint_interval=1)
    step = 1
    while "train/save_time" not in checkpoints.maybe_save(Progress(step, step)):
        step += 1
        assert step < 1000
        time.sleep(0.01)
    assert step > 1 and asked_in[0] is not threading.main_thread()
    checkpoints.close()
    other = trainer()
    assert saver(other, tmp_path).resume() == Progress(step, step)
    assert same(weights(other), weights(one))


def test_snapshot_copy_has_the_same_values_and_nothing_of_its_original() -> None:
    snapshot = Snapshot(available=lambda: 1 << 30)

    def copied(tree: dict[str, Any]) -> Any:
        copy = snapshot.take(tree)
        assert copy is not None
        return copy.whole()

    tree = {
        "a": torch.arange(6.0).view(2, 3).t(),
        "b": [torch.ones(3, dtype=torch.bfloat16), (torch.tensor(5), 7, "x")],
        "empty": torch.zeros(0, 4),
    }
    copy = copied(tree)
    assert torch.equal(copy["a"], tree["a"]) and copy["a"].shape == (3, 2)
    assert copy["b"][0].dtype == torch.bfloat16 and copy["b"][1] == (torch.tensor(5), 7, "x")
    tree["a"].zero_()
    assert copy["a"].sum() == 15 and copy["empty"].shape == (0, 4)
    assert copy["a"].untyped_storage().nbytes() == 24  # its own bytes, not those of all
    again = copied({"a": torch.full((2,), 9.0)})
    assert copy["a"].flatten()[0] == again["a"][0] == 9.0  # the same memory once more


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_update_changes_nothing_before_it_has_waited_for_a_copy(dtype: torch.dtype) -> None:
    """Whichever optimizer: the fused one changes all in one go, the others their states before the weights."""
    model = tiny_qwen().to(dtype).requires_grad_(True)  # type: ignore[arg-type]
    one = Trainer(model, TrainConfig(model_name="tiny", training_steps=100))

    def state() -> bytes:
        file = io.BytesIO()
        torch.save((weights(one), one.optimizer.state_dict()["state"]), file)
        return file.getvalue()

    one.step(ROLLOUTS, 1)
    before = state()
    at_the_wait: list[bytes] = []
    one.optimizer.hold = lambda: at_the_wait.append(state())
    for step in (2, 3):
        one.step(ROLLOUTS, step)
    assert at_the_wait == [before] and state() != before


def test_resume_knows_the_norms_before_and_skips_a_step_that_explodes(tmp_path: Path) -> None:
    def one_that_skips() -> tuple[Trainer, Checkpoints]:
        one = trainer(grad_spike_factor=100.0)
        config = CheckpointConfig(save_path=tmp_path, resume="auto")
        return one, Checkpoints(config, AllWeights(one.model, None), one.optimizer, one.norms)  # type: ignore[arg-type]

    one, checkpoints = one_that_skips()
    for step in range(NormHistory.NEEDED):
        assert one.step(ROLLOUTS, step).updated
    checkpoints.save(Progress(NormHistory.NEEDED, NormHistory.NEEDED))
    resumed, checkpoints = one_that_skips()
    checkpoints.resume()
    before = weights(resumed)
    explosive = batch([sample([1, 2], [3, 4], 1.0, advantages=[1e5, 1e5]), sample([1, 2], [5], 0.0, advantages=[-1e5])])
    result = resumed.step(explosive, NormHistory.NEEDED)
    assert not result.updated and reduce(result.metrics)["train/skipped"] == 1
    assert same(weights(resumed), before)
    assert one_that_skips()[0].step(explosive, 0).updated  # nothing before it to compare with


# when checkpoints are begun ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("written", "steps", "seconds", "of_environments"),
    [
        *(("20", 20, 0.0, 20), (20, 20, 0.0, 20), ("0", 0, 0.0, 0), ("never", 0, 0.0, 0)),
        *(("90s", 0, 90.0, 1), ("10m", 0, 600.0, 1), ("1.5h", 0, 5400.0, 1), ("0m", 0, 0.0, 0)),
    ],
)
def test_interval_in_steps_or_time(written: Any, steps: int, seconds: float, of_environments: int) -> None:
    config = CheckpointConfig(checkpoint_interval=written)
    found = config.interval_steps, config.interval_seconds, config.environment_interval
    assert found == (steps, seconds, of_environments)
    assert CheckpointConfig.model_validate(config.model_dump(mode="json")) == config
    assert config.saves is (written != "never")


@pytest.mark.parametrize("written", ["-1", "10 minutes", "m", "1.5", "10d", "", True])
def test_what_is_no_interval_is_refused(written: Any) -> None:
    with pytest.raises(ValueError, match="10m") as error:
        CheckpointConfig(checkpoint_interval=written)
    (found,) = error.value.errors()  # type: ignore[attr-defined]
    assert isinstance(found["ctx"]["error"], ConfigError) and found["loc"] == ("checkpoint_interval",)


def test_schedule_after_a_resumed_checkpoint_and_after_a_wait() -> None:
    schedule = Schedule(3, 0.0)
    schedule.begun(7)
    assert [schedule.is_due(step) for step in (8, 9)] == [False, True]
    now = [100.0]
    schedule = Schedule(0, 600.0, lambda: now[0])

    def due_at(*times: float) -> list[bool]:
        found = []
        for now[0] in times:
            found.append(schedule.is_due(5))
        return found

    assert due_at(100.0, 699.0, 700.0, 712.0) == [False, False, True, True]
    schedule.begun(5, waited=0.5)  # 0.5 s are 2 % of 25 s, which is less than 600 s
    assert due_at(1311.0, 1312.0) == [False, True]
    schedule.begun(6, waited=26.0)  # 26 s are 2 % of 1300 s
    assert due_at(1312.0 + 1299.0, 1312.0 + 1301.0) == [False, True]


class OneWeight:
    """A policy of one number. Each write waits until the test lets it end.

    Attributes:
        most: how many writes there were at one time.
    """

    kind, step_prefix, final_name, marker = "a weight", "step_", "model_final", "weight"

    def __init__(self) -> None:
        self.model: Any = nn.Linear(1, 1, bias=False)
        self.may_end = threading.Semaphore(0)
        self._under_way = self.most = 0

    def become(self, value: float) -> None:
        with torch.no_grad():
            self.model.weight.fill_(value)

    def tensors(self) -> dict[str, Tensor]:
        return {"weight": self.model.weight.detach()}

    def write(self, folder: Path, tensors: Mapping[str, Tensor]) -> None:
        self._under_way += 1
        self.most = max(self.most, self._under_way)
        assert self.may_end.acquire(timeout=60)
        (folder / "weight").write_bytes(struct.pack("<f", tensors["weight"].item()))
        self._under_way -= 1

    def exact(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {}

    def load(self, path: Path, exact: Mapping[str, Tensor]) -> None:
        raise AssertionError("nothing is loaded here")


@given(st.sampled_from(["10m", 1, 3]), st.lists(st.tuples(st.integers(0, 700), st.booleans()), min_size=1, max_size=12))
def test_checkpoints_write_one_at_a_time_and_lose_none(interval: str | int, steps: list[tuple[int, bool]]) -> None:
    """Each step takes a given number of seconds; a write that has begun ends during the step or later."""
    with tempfile.TemporaryDirectory() as name:
        folder, now, policy = Path(name), [0.0], OneWeight()
        config = CheckpointConfig(save_path=folder, checkpoint_interval=interval, keep_checkpoints=0)
        optimizer = AdamW([*policy.model.parameters()], OptimizerConfig())
        checkpoints = Checkpoints(config, policy, optimizer, clock=lambda: now[0])
        begun, is_writing, last_step, last_at = [], False, 0, 0.0
        for step, (seconds, ends) in enumerate(steps, 1):
            now[0] += seconds
            policy.become(step)
            if is_writing and ends:
                policy.may_end.release()
                checkpoints.close()  # which waits for it
                is_writing = False
            saved = checkpoints.maybe_save(Progress(step, step, (f"batch {step}",)))
            is_due = (
                any(each % interval == 0 for each in range(last_step + 1, step + 1))
                if isinstance(interval, int)
                else now[0] - last_at >= 600.0
            )
            wanted = not is_writing and is_due
            assert ("train/save_time" in saved) == wanted
            if wanted:
                begun.append(step)
                is_writing, last_step, last_at = True, step, now[0]
        last = len(steps)
        policy.become(-1.0)
        policy.may_end.release(2)
        checkpoints.save(Progress(last + 1, last + 1), final=True)  # waits for the one before
        checkpoints.close()
        assert policy.most == 1
        found = {path.name: struct.unpack("<f", (path / "weight").read_bytes()) for path in folder.iterdir()}
        assert found == {**{f"step_{step}": (float(step),) for step in begun}, "model_final": (-1.0,)}
        for step in begun:
            state = read_state(folder / f"step_{step}")
            check_files(state)
            assert state.progress == Progress(step, step, (f"batch {step}",))
