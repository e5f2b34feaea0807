"""Checkpoints: what is saved comes back bit for bit, and a folder is whole or not there."""

from __future__ import annotations

import errno
import os
import re
import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from peft import PeftModel
from torch import nn
from transformers import AutoModelForCausalLM

from grpo_trainer.config.bridge import ALL_LINEAR
from grpo_trainer.config.train import CheckpointConfig, OptimizerConfig, TrainConfig
from grpo_trainer.errors import ConfigError, DiskFullError, from_os_error
from grpo_trainer.optim.adamw import AdamW
from grpo_trainer.parallel.shard_states import STATES_FOLDER, Place, read_states, save_states, whole_parts
from grpo_trainer.parallel.world import World
from grpo_trainer.policy import Adapter, AllWeights
from grpo_trainer.saving.checkpoint import Checkpoints, Progress
from grpo_trainer.saving.manifest import refuse_to_mix_checkpoints
from grpo_trainer.trainer import Trainer
from tests.unit.factories import batch, refusing, sample
from tests.unit.tiny_lora import tiny_lora, tiny_qwen


def trainer_with(**options: Any) -> Trainer:
    return Trainer(tiny_lora(**options), TrainConfig(model_name="tiny", training_steps=100))


def trainer_of_all_weights(seed: int = 0, **options: Any) -> Trainer:
    model = tiny_qwen(seed).requires_grad_(True)
    return Trainer(model, TrainConfig(model_name="tiny", training_steps=100, **options))


def checkpoints(trainer: Trainer, folder: Path, dtype: torch.dtype = torch.float32, **options: object) -> Checkpoints:
    config = CheckpointConfig.model_validate({"save_path": folder, "resume": "auto", **options})
    model: Any = trainer.model
    policy = Adapter(model) if isinstance(model, PeftModel) else AllWeights(model, None, dtype)
    return Checkpoints(config, policy, trainer.optimizer)


ROLLOUTS = batch([sample([1, 2], [3, 4], 1.0), sample([1, 2], [5], 0.0)])


def weights(trainer: Trainer) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in trainer.parameters]


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("made", [trainer_with, trainer_of_all_weights], ids=["adapter", "all weights"])
def test_resume_goes_on_bit_for_bit(tmp_path: Path, made: Callable[[], Trainer]) -> None:
    straight, first, second = made(), made(), made()
    for step in range(4):
        straight.step(ROLLOUTS, step)
    for step in range(2):
        first.step(ROLLOUTS, step)
    path = checkpoints(first, tmp_path, torch.bfloat16).save(Progress(2, 7))
    if made is trainer_of_all_weights:
        assert AutoModelForCausalLM.from_pretrained(path, dtype="auto").dtype == torch.bfloat16
    second.step(ROLLOUTS, 9)  # it is elsewhere
    assert checkpoints(second, tmp_path).resume() == Progress(2, 7)
    for step in range(2, 4):
        second.step(ROLLOUTS, step)
    assert same(weights(straight), weights(second))


@pytest.mark.parametrize("is_adapter", [True, False])
def test_resume_refuses_another_mode_or_model(tmp_path: Path, is_adapter: bool) -> None:
    saved, resumed = trainer_with(), trainer_of_all_weights()
    kinds = Adapter.kind, AllWeights.kind
    if not is_adapter:
        saved, resumed, kinds = resumed, saved, kinds[::-1]
    path = checkpoints(saved, tmp_path).save(Progress(1, 1))
    for resume in ("auto", str(path)):
        with refusing(ConfigError, f"--resume {path}", got=kinds[0], wanted=kinds[1]):
            checkpoints(resumed, tmp_path, resume=resume).resume()
    if not is_adapter:
        saved.model.model.layers = saved.model.model.layers[:1]  # type: ignore[union-attr, index]
        with refusing(ConfigError, "--resume", got=str(path), words=["--model-name"]):
            checkpoints(saved, tmp_path).resume()


@pytest.mark.parametrize(
    ("folder", "resume", "field", "got"),
    [
        ("a file/checkpoints", "auto", "--save-path", "{0}"),
        ("run", "{0}/nothing", "--resume", "{0}/nothing"),  # no checkpoint
        ("run", "{0}/adapter_step_1", "--resume {0}/adapter_step_1", "adapter_step_2"),  # there is a newer one
    ],
)
def test_resume_refuses_paths(tmp_path: Path, folder: str, resume: str, field: str, got: str) -> None:
    (tmp_path / "a file").touch()
    saver = checkpoints(trainer_with(), tmp_path / "run")
    for step in (1, 2):
        saver.save(Progress(step, step))
    place = tmp_path / folder
    with refusing(ConfigError, field.format(place), got=got.format(place)):
        checkpoints(trainer_with(), place, resume=resume.format(place)).resume()


@pytest.mark.parametrize("has_links", [True, False])
def test_a_run_from_anothers_checkpoint_has_it_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_links: bool
) -> None:
    if not has_links:
        monkeypatch.setattr(os, "link", Mock(side_effect=OSError(errno.EXDEV, "another file system")))
    path = checkpoints(trainer_of_all_weights(), tmp_path / "a").save(Progress(3, 3))
    number = path.stat().st_ino
    branch = checkpoints(trainer_of_all_weights(1), tmp_path / "b", resume=str(path))
    assert branch.resume() == Progress(3, 3) and branch.safe_path == tmp_path / "b" / "step_3"
    assert branch.save(Progress(3, 3)) == branch.safe_path
    assert checkpoints(trainer_of_all_weights(1), tmp_path / "b").resume() == Progress(3, 3)
    assert checkpoints(trainer_of_all_weights(1), tmp_path / "b", resume=str(path)).resume() == Progress(3, 3)
    other = checkpoints(trainer_of_all_weights(2), tmp_path / "c").save(Progress(3, 3))
    with refusing(ConfigError, f"--resume {other}", got="step_3"):  # it would replace the run's own
        checkpoints(trainer_of_all_weights(), tmp_path / "b", resume=str(other)).resume()
    shutil.rmtree(tmp_path / "b" / "step_3")
    (tmp_path / "b" / "step_3").symlink_to(path)
    assert checkpoints(trainer_of_all_weights(1), tmp_path / "b").resume() == Progress(3, 3)
    assert (tmp_path / "b" / "step_3").is_symlink() and path.stat().st_ino == number, "it is the other run's as it was"


def test_a_new_run_is_refused_where_checkpoints_are(tmp_path: Path) -> None:
    saver = checkpoints(trainer_with(), tmp_path)
    saver.save(Progress(0, 0))
    refuse_to_mix_checkpoints(tmp_path, "never", "--save-path")
    saver.save(Progress(1, 1))
    refuse_to_mix_checkpoints(tmp_path, "auto", "--save-path")
    with refusing(ConfigError, "--save-path", words=["adapter_step_1", "--resume auto"]):
        refuse_to_mix_checkpoints(tmp_path, "never", "--save-path")


def test_weights_written_for_the_server_are_not_written_again_for_the_checkpoint(tmp_path: Path) -> None:
    saver = checkpoints(trainer_of_all_weights(), tmp_path)
    served = saver.export(3)
    assert not saver.resume().step  # a model alone is no checkpoint
    written = (served / "model.safetensors").stat().st_mtime_ns
    saver.save(Progress(3, 3))
    assert (served / "model.safetensors").stat().st_mtime_ns == written
    again = checkpoints(trainer_of_all_weights(seed=1), tmp_path)
    assert again.resume() == Progress(3, 3)
    assert again.export(3) == served  # what was resumed is served as it lies there


def test_after_a_skipped_step_no_checkpoint_is_overwritten_by_what_is_served(tmp_path: Path) -> None:
    trainer = trainer_of_all_weights()
    saver = checkpoints(trainer, tmp_path)
    saver.save(Progress(step=4, policy_version=3))
    trainer.step(ROLLOUTS, 4)
    assert saver.export(4).name == "version_4"
    assert saver.save(Progress(step=5, policy_version=4)).name == "step_5"
    assert saver.export(5).name == "version_5"
    assert checkpoints(trainer_of_all_weights(), tmp_path).resume() == Progress(5, 4)
    again = checkpoints(trainer_of_all_weights(), tmp_path, resume=str(tmp_path / "step_5"))
    assert again.resume() == Progress(5, 4) and again.export(4) == tmp_path / "step_5"


def test_checkpoints_that_are_served_outlive_pruning_and_go_with_the_next(tmp_path: Path) -> None:
    saver = checkpoints(trainer_of_all_weights(), tmp_path, keep_checkpoints=1)
    saver.save(Progress(1, 1))
    saver.serving(saver.export(2))
    for step in (3, 4):
        saver.save(Progress(step, step))
    assert names(tmp_path) == ["step_2", "step_4"]
    saver.serving(saver.export(6))
    assert names(tmp_path) == ["step_4", "step_6"]


@pytest.mark.parametrize("resume", ["never", "auto"])
def test_checkpoints_keep_newest_final_and_a_users_copy(tmp_path: Path, resume: str) -> None:
    folder = tmp_path / "run" / "checkpoints"
    options = {"keep_checkpoints": 2, "checkpoint_interval": 2, "background_writes": False}
    assert checkpoints(trainer_with(), folder, resume=resume).resume() == Progress()
    assert folder.is_dir() and not list(folder.iterdir()), "the folder is there before anything is saved"
    saver = checkpoints(trainer_with(), folder, **options)
    saver.save(Progress(90, 90)).rename(folder / "adapter_step_90_best")
    for step in range(1, 11):
        saver.maybe_save(Progress(step, step))
    saver = checkpoints(trainer_with(), folder, **options)
    assert saver.resume().step == 10
    assert names(folder) == ["adapter_step_10", "adapter_step_8", "adapter_step_90_best"]
    saver.save(Progress(11, 11), final=True)
    assert saver.resume() == Progress(11, 11)
    assert names(folder) == ["adapter_final", "adapter_step_10", "adapter_step_8", "adapter_step_90_best"]


@pytest.mark.parametrize(
    ("options", "field", "got", "wanted"),
    [
        ({"r": 16}, "--lora-r", "16", "8"),
        ({"alpha": 512}, "--lora-alpha", "512.0", "32.0"),
        ({"target_modules": ("v_proj",)}, "--lora-target-modules", "['v_proj']", str(sorted(ALL_LINEAR))),
    ],
)
def test_resume_of_another_adapter(
    tmp_path: Path, options: dict[str, object], field: str, got: str, wanted: str
) -> None:
    path = checkpoints(trainer_with(), tmp_path).save(Progress(1, 1))
    with refusing(ConfigError, field, got=got, wanted=wanted, words=[f"--resume {path} "]):
        checkpoints(trainer_with(**options), tmp_path, resume=str(path)).resume()


def test_resume_refuses_other_trained_layers_by_their_names(tmp_path: Path) -> None:
    """Their optimizer states have the same shapes."""

    def trainer_of_layer(number: int) -> Trainer:
        model = tiny_qwen(0).requires_grad_(False)
        model.get_submodule(f"model.layers.{number}").requires_grad_(True)
        return Trainer(model, TrainConfig(model_name="tiny", training_steps=100))

    first = trainer_of_layer(0)
    first.step(ROLLOUTS, 0)
    path = checkpoints(first, tmp_path).save(Progress(1, 1))
    for other, got, wanted in (
        (trainer_of_layer(1), r"12 .*model\.layers\.0\.", r"12 .*model\.layers\.1\."),
        (trainer_of_all_weights(), "0 ", "15 .*lm_head"),
    ):
        with refusing(ConfigError, f"--resume {path}", words=["--train-layer-indices"]) as error:
            checkpoints(other, tmp_path).resume()
        assert re.match(got, error.value.got) and re.match(wanted, error.value.wanted)
    assert checkpoints(trainer_of_layer(0), tmp_path).resume() == Progress(1, 1)


def test_resume_takes_hyperparameters_from_the_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Saving asks no hub about the base model."""
    monkeypatch.setattr("peft.utils.save_and_load.check_file_exists_on_hf_hub", lambda *_, **__: pytest.fail("asked"))
    trainer = trainer_with()
    trainer.model.peft_config["default"].base_model_name_or_path = "some/model"  # type: ignore[index, union-attr]
    trainer.step(ROLLOUTS, 0)
    checkpoints(trainer, tmp_path).save(Progress(1, 1))
    second = Trainer(tiny_lora(), TrainConfig(model_name="tiny", adam_beta2=0.9, weight_decay=0.1))
    checkpoints(second, tmp_path).resume()
    (group,) = second.optimizer.param_groups
    assert group["betas"] == (0.9, 0.9) and group["weight_decay"] == 0.1
    assert len(second.optimizer.state_dict()["state"]) == len(second.parameters)  # the moments did come


def test_a_full_disk_is_an_error_that_names_the_file_and_leaves_no_remains(small_disk: Path) -> None:
    (small_disk / "ballast").write_bytes(b"0" * 1_000_000)
    with pytest.raises(OSError) as error:
        checkpoints(trainer_with(r=64), small_disk / "run").save(Progress(1, 1))
    assert error.value.errno == errno.ENOSPC and str(small_disk / "run") in str(error.value.filename)
    assert not list((small_disk / "run").iterdir())


# states that are cut over processes ----------------------------------------------------------------------------------


def trained(name: str, width: int = 6) -> tuple[nn.Module, AdamW]:
    """Three layers, of which the second has no gradient, two steps on."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(width, width + 1) for _ in range(3)))
    optimizer = AdamW(list(model.parameters()), OptimizerConfig(optimizer=name))  # type: ignore[arg-type]
    for _ in range(2):
        for layer in (model[0], model[2]):
            for parameter in layer.parameters():
                parameter.grad = torch.randn_like(parameter)
        optimizer.step()
    return model, optimizer


@pytest.mark.parametrize("name", ["adamw", "adamw_8bit"])
def test_states_come_back_under_the_names_of_parameters(tmp_path: Path, name: str) -> None:
    model, optimizer = trained(name)
    parts = whole_parts(model)
    save_states(World(), tmp_path, parts, optimizer, Place(0, 1))
    other = [parts[5], parts[0], parts[2]]  # in another order, and not all; the third has no states
    found = read_states(tmp_path, other, Place(0, 1))
    assert sorted(found) == [0, 1]
    for number, part in ((0, parts[5]), (1, parts[0])):
        states = optimizer.state[part.own]
        assert found[number].keys() == states.keys()
        for key, value in states.items():
            got = found[number][key]
            assert type(got) is type(value)
            assert torch.equal(torch.as_tensor(got), torch.as_tensor(value)), key
    (file,) = (tmp_path / STATES_FOLDER).glob("*.distcp")
    file.unlink()
    with refusing(ConfigError, f"--resume {tmp_path}", words=["FileNotFoundError: "]):
        read_states(tmp_path, other, Place())


@pytest.mark.parametrize(("rows", "processes"), [(5, 2), (4, 2), (1, 2), (7, 3), (3, 4), (0, 2)])
def test_rows_are_cut_as_torch_cuts_them(rows: int, processes: int) -> None:
    cut = [list(Place(rank, processes).rows(rows)) for rank in range(processes)]
    chunks = torch.arange(rows).chunk(processes) if rows else ()
    assert [one for one in cut if one] == [chunk.tolist() for chunk in chunks]
    assert Place.parsed(str(Place(1, processes))) == Place(1, processes)


def test_states_that_can_not_be_written_are_an_error_that_names_the_place(tmp_path: Path) -> None:
    model, optimizer = trained("adamw", width=128)
    (tmp_path / STATES_FOLDER).write_text("a file, where a folder is to be")
    with pytest.raises(FileExistsError, match=r"\b0: ") as raised:
        save_states(World(), tmp_path, whole_parts(model), optimizer, Place())
    assert raised.value.filename == str(tmp_path / STATES_FOLDER)
    (tmp_path / STATES_FOLDER).unlink()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))  # torch's own word on it: unexpected pos
    try:
        with pytest.raises(OSError, match=rf"\b0: {os.strerror(errno.EFBIG)}") as raised:
            save_states(World(), tmp_path, whole_parts(model), optimizer, Place())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    said = from_os_error(raised.value, "write")
    assert isinstance(said, DiskFullError) and said.field == str(tmp_path / STATES_FOLDER)
