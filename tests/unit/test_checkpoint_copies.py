"""Copies of checkpoints at a URL: a run whose machine is lost continues from them on another one."""

from __future__ import annotations

from pathlib import Path
from uuid import uuid4

import fsspec
import pytest
import torch

from grpo_trainer.config.options import build
from grpo_trainer.config.train import TrainConfig
from grpo_trainer.errors import ConfigError
from grpo_trainer.saving.checkpoint import Progress
from grpo_trainer.saving.manifest import STATE_FILE
from tests.unit.test_checkpoint import checkpoints, trainer_with, weights


@pytest.fixture(params=["memory", "folder"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return f"memory://{uuid4().hex}/run" if request.param == "memory" else str(tmp_path / "other disk")


def names(url: str) -> list[str]:
    files, root = fsspec.url_to_fs(url)
    return sorted(str(path).rstrip("/").split("/")[-1] for path in files.ls(root, detail=False))


def test_another_machine_continues_from_the_newest_copy(url: str, tmp_path: Path) -> None:
    first = trainer_with()
    saving = checkpoints(first, tmp_path / "lost", checkpoint_url=url, keep_checkpoints=0)
    saving.save(Progress(2, 2))
    with torch.no_grad():
        first.parameters[0].add_(1.0)
    saving.save(Progress(3, 3))
    other = trainer_with()
    said: list[str] = []
    progress = checkpoints(other, tmp_path / "new", checkpoint_url=url).resume(said.append)
    assert progress == Progress(3, 3)
    assert all(torch.equal(one, same) for one, same in zip(weights(other), weights(first), strict=True))
    assert said[0].split()[:2] == ["fetched", "adapter_step_3"]
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["adapter_step_3"]


def test_a_checkpoint_that_is_here_is_taken_before_an_older_copy(url: str, tmp_path: Path) -> None:
    checkpoints(trainer_with(), tmp_path, checkpoint_url=url).save(Progress(2, 2))
    checkpoints(trainer_with(), tmp_path).save(Progress(4, 4))
    said: list[str] = []
    assert checkpoints(trainer_with(), tmp_path, checkpoint_url=url).resume(said.append) == Progress(4, 4)
    assert len(said) == 1


def test_a_copy_that_broke_off_is_none(url: str, tmp_path: Path) -> None:
    saving = checkpoints(trainer_with(), tmp_path / "lost", checkpoint_url=url)
    saving.save(Progress(2, 2))
    saving.save(Progress(3, 3))
    files, root = fsspec.url_to_fs(url)
    files.rm_file(f"{root}/adapter_step_3/{STATE_FILE}")
    assert checkpoints(trainer_with(), tmp_path / "new", checkpoint_url=url).resume() == Progress(2, 2)


def test_the_newest_copies_are_kept_and_the_final_one(url: str, tmp_path: Path) -> None:
    """Two of steps 1 to 4; the final one comes on top."""
    saving = checkpoints(trainer_with(), tmp_path, checkpoint_url=url, keep_checkpoints=2)
    for step in (1, 2, 3, 4):
        saving.save(Progress(step, step))
    assert names(url) == ["adapter_step_3", "adapter_step_4"]
    saving.save(Progress(5, 5), final=True)
    assert names(url) == ["adapter_final", "adapter_step_3", "adapter_step_4"]


def test_a_copy_that_fails_does_not_end_training(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    place = tmp_path / "a file"
    place.write_text("")
    saving = checkpoints(trainer_with(), tmp_path / "here", checkpoint_url=str(place / "folder"))
    assert saving.save(Progress(2, 2)).is_dir()
    (warning,) = [record for record in caplog.records if record.levelname == "WARNING"]
    assert str(place) in warning.getMessage() and saving.safe == Progress(2, 2)


class NoNetworkError(Exception):
    """As the errors of botocore and gcsfs, this is no OSError."""


def test_a_drivers_own_error_does_not_end_training(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"memory://{uuid4().hex}/run"

    def refuse(*_: object, **__: object) -> None:
        raise NoNetworkError(url)

    monkeypatch.setattr(type(fsspec.url_to_fs(url)[0]), "exists", refuse)
    saving = checkpoints(trainer_with(), tmp_path / "here", checkpoint_url=url)
    assert saving.save(Progress(2, 2)).is_dir()
    (warning,) = [record for record in caplog.records if record.levelname == "WARNING"]
    assert warning.getMessage().count(url) == 2
    with pytest.raises(ConfigError) as refused:
        checkpoints(trainer_with(), tmp_path / "new", checkpoint_url=url).resume()
    assert refused.value.field == "--checkpoint-url"


def test_a_new_run_does_not_mix_with_the_copies_of_another(url: str, tmp_path: Path) -> None:
    checkpoints(trainer_with(), tmp_path / "one", checkpoint_url=url).save(Progress(2, 2))
    with pytest.raises(ConfigError) as refused:
        checkpoints(trainer_with(), tmp_path / "two", checkpoint_url=url, resume="never").resume()
    assert refused.value.field == "--checkpoint-url" and refused.value.got == "adapter_step_2"


def test_a_url_without_a_driver_is_refused_before_anything_loads() -> None:
    with pytest.raises(ConfigError) as refused:
        build(TrainConfig, {"model": "m", "checkpoint_url": "nosuch://bucket/run"})
    assert refused.value.field == "--checkpoint-url" and refused.value.got == "nosuch://bucket/run"
