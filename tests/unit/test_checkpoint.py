"""Checkpoints: what is saved comes back bit for bit, and a folder is whole or not there."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import AutoPeftModelForCausalLM, PeftModel
from transformers import AutoModelForCausalLM

from grpo_trainer.config.bridge import ALL_LINEAR
from grpo_trainer.config.train import CheckpointConfig, TrainConfig
from grpo_trainer.errors import ConfigError
from grpo_trainer.files import whole_folder
from grpo_trainer.policy import Adapter, AllWeights
from grpo_trainer.saving.checkpoint import Checkpoints, Progress
from grpo_trainer.saving.manifest import STATE_FILE
from grpo_trainer.trainer import Trainer
from tests.unit.factories import batch, sample
from tests.unit.tiny_lora import fill_b, save_tiny, tiny_lora, tiny_qwen


def trainer_with(**options: Any) -> Trainer:
    config = TrainConfig(model_name="tiny", training_steps=100)
    return Trainer(tiny_lora(**options), config)


def checkpoints(trainer: Trainer, folder: Path, **options: object) -> Checkpoints:
    config = CheckpointConfig.model_validate({"save_path": folder, "resume": "auto", **options})
    model = trainer.model
    policy = Adapter(model) if isinstance(model, PeftModel) else AllWeights(model, None)  # type: ignore[arg-type]
    return Checkpoints(config, policy, trainer.optimizer)


def trainer_of_all_weights(seed: int = 0) -> Trainer:
    model = tiny_qwen(seed)
    model.requires_grad_(True)
    return Trainer(model, TrainConfig(model_name="tiny", training_steps=100))


ROLLOUTS = batch([sample([1, 2], [3, 4], 1.0), sample([1, 2], [5], 0.0)])


def weights(trainer: Trainer) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in trainer.parameters]


def test_a_resumed_trainer_goes_on_bit_for_bit(tmp_path: Path) -> None:
    straight = trainer_with()
    for step in range(4):
        straight.step(ROLLOUTS, step)
    first = trainer_with()
    for step in range(2):
        first.step(ROLLOUTS, step)
    checkpoints(first, tmp_path).save(Progress(2, 7))
    second = trainer_with()
    fill_b(second.model)  # type: ignore[arg-type]
    assert checkpoints(second, tmp_path).resume() == Progress(2, 7)
    for step in range(2, 4):
        second.step(ROLLOUTS, step)
    assert all(torch.equal(a, b) for a, b in zip(weights(straight), weights(second), strict=True))


@pytest.mark.parametrize("resume", ["never", "auto"])
def test_the_folder_is_there_before_anything_is_saved(tmp_path: Path, resume: str) -> None:
    folder = tmp_path / "run" / "checkpoints"
    assert checkpoints(trainer_with(), folder, resume=resume).resume() == Progress()
    assert folder.is_dir() and not list(folder.iterdir())


def test_a_folder_that_can_not_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("a file")
    with pytest.raises(ConfigError) as error:
        checkpoints(trainer_with(), tmp_path / "run" / "checkpoints").resume()
    assert (error.value.field, error.value.got) == ("--save-path", str(tmp_path / "run" / "checkpoints"))


def test_a_resumed_trainer_of_all_weights_goes_on_bit_for_bit_though_the_saved_model_is_rounded(tmp_path: Path) -> None:
    straight = trainer_of_all_weights()
    for step in range(4):
        straight.step(ROLLOUTS, step)
    first = trainer_of_all_weights()
    for step in range(2):
        first.step(ROLLOUTS, step)
    config = CheckpointConfig(save_path=tmp_path, resume="auto")
    policy = AllWeights(first.model, None, torch.bfloat16)  # type: ignore[arg-type]
    path = Checkpoints(config, policy, first.optimizer).save(Progress(2, 2))
    assert path.name == "step_2"
    assert AutoModelForCausalLM.from_pretrained(path, dtype="auto").dtype == torch.bfloat16
    second = trainer_of_all_weights(seed=5)
    assert checkpoints(second, tmp_path).resume() == Progress(2, 2)
    for step in range(2, 4):
        second.step(ROLLOUTS, step)
    assert all(torch.equal(a, b) for a, b in zip(weights(straight), weights(second), strict=True))


@pytest.mark.parametrize("resume", ["auto", "path"])
def test_a_checkpoint_of_another_mode_is_refused_with_both_named(tmp_path: Path, resume: str) -> None:
    path = checkpoints(trainer_with(), tmp_path).save(Progress(1, 1))
    wanted = "auto" if resume == "auto" else str(path)
    with pytest.raises(ConfigError) as error:
        checkpoints(trainer_of_all_weights(), tmp_path, resume=wanted).resume()
    assert error.value.field == f"--resume {path}"
    assert (error.value.got, error.value.wanted) == (Adapter.kind, AllWeights.kind)
    path = checkpoints(trainer_of_all_weights(), tmp_path).save(Progress(2, 2))
    wanted = "auto" if resume == "auto" else str(path)
    with pytest.raises(ConfigError) as error:
        checkpoints(trainer_with(), tmp_path, resume=wanted).resume()
    assert error.value.field == f"--resume {path}"
    assert (error.value.got, error.value.wanted) == (AllWeights.kind, Adapter.kind)


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    path = checkpoints(trainer_of_all_weights(), tmp_path).save(Progress(1, 1))
    other = trainer_of_all_weights()
    other.model.model.layers = other.model.model.layers[:1]  # type: ignore[union-attr, index]
    with pytest.raises(ConfigError) as error:
        checkpoints(other, tmp_path).resume()
    assert (error.value.field, error.value.got) == ("--resume", str(path))
    assert "--model-name" in error.value.summary


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


def test_what_is_served_outlives_pruning_and_goes_with_the_next(tmp_path: Path) -> None:
    saver = checkpoints(trainer_of_all_weights(), tmp_path, keep_checkpoints=1)
    saver.save(Progress(1, 1))
    saver.serving(saver.export(2))
    for step in (3, 4):
        saver.save(Progress(step, step))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_2", "step_4"]
    saver.serving(saver.export(6))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_4", "step_6"]


def test_random_generators_come_back(tmp_path: Path) -> None:
    trainer = trainer_with()
    saver = checkpoints(trainer, tmp_path)
    saver.save(Progress(1, 1))
    expected = torch.rand(3)
    saver.resume()
    assert torch.equal(torch.rand(3), expected)


def test_auto_takes_the_newest_by_number_and_nothing_from_an_empty_folder(tmp_path: Path) -> None:
    trainer = trainer_with()
    saver = checkpoints(trainer, tmp_path)
    assert saver.resume() == Progress()
    for step in (9, 10, 2):
        saver.save(Progress(step, step))
    assert saver.resume().step == 10


def test_auto_takes_the_final_adapter_of_a_run_that_is_to_go_further(tmp_path: Path) -> None:
    saver = checkpoints(trainer_with(), tmp_path)
    saver.save(Progress(9, 9))
    saver.save(Progress(10, 10), final=True)
    assert saver.resume() == Progress(10, 10)


@pytest.mark.parametrize(
    ("options", "field", "got", "wanted"),
    [
        ({"r": 16}, "--lora-r", "16", "8"),
        ({"alpha": 512}, "--lora-alpha", "512.0", "32.0"),
        (
            {"target_modules": ("v_proj", "up_proj")},
            *(
                "--lora-target-modules",
                str(["up_proj", "v_proj"]),
                str(sorted(ALL_LINEAR)),
            ),
        ),
    ],
)
def test_a_checkpoint_of_another_adapter_is_refused_by_name(
    tmp_path: Path, options: dict[str, object], field: str, got: str, wanted: str
) -> None:
    path = checkpoints(trainer_with(), tmp_path).save(Progress(1, 1))
    with pytest.raises(ConfigError) as error:
        checkpoints(trainer_with(**options), tmp_path, resume=str(path)).resume()
    assert (error.value.field, error.value.got, error.value.wanted) == (field, got, wanted)
    assert error.value.summary.startswith(f"--resume {path} ")


def test_a_checkpoint_of_other_trained_layers_is_refused_by_their_names(tmp_path: Path) -> None:
    """Their optimizer states have the same shapes."""

    def trainer_of_layer(number: int) -> Trainer:
        model = tiny_qwen(0).requires_grad_(False)
        model.get_submodule(f"model.layers.{number}").requires_grad_(True)
        return Trainer(model, TrainConfig(model_name="tiny", training_steps=100))

    first = trainer_of_layer(0)
    first.step(ROLLOUTS, 0)
    path = checkpoints(first, tmp_path).save(Progress(1, 1))
    with pytest.raises(ConfigError) as error:
        checkpoints(trainer_of_layer(1), tmp_path).resume()
    assert error.value.field == f"--resume {path}" and "--train-layer-indices" in error.value.fix
    assert error.value.got.startswith("12 ") and "model.layers.0." in error.value.got
    assert error.value.wanted.startswith("12 ") and "model.layers.1." in error.value.wanted
    with pytest.raises(ConfigError) as error:
        checkpoints(trainer_of_all_weights(), tmp_path).resume()
    assert error.value.got.startswith("0 ") and "model" not in error.value.got
    assert error.value.wanted.startswith("15 ") and "lm_head" in error.value.wanted
    assert checkpoints(trainer_of_layer(0), tmp_path).resume() == Progress(1, 1)


def test_an_older_checkpoint_is_not_continued_beside_newer_ones(tmp_path: Path) -> None:
    saver = checkpoints(trainer_with(), tmp_path)
    old = saver.save(Progress(1, 1))
    saver.save(Progress(2, 2))
    with pytest.raises(ConfigError) as error:
        checkpoints(trainer_with(), tmp_path, resume=str(old)).resume()
    assert (error.value.field, error.value.got) == (f"--resume {old}", "adapter_step_2")


def test_hyperparameters_are_those_of_the_flags_not_of_the_checkpoint(tmp_path: Path) -> None:
    trainer = trainer_with()
    trainer.step(ROLLOUTS, 0)
    checkpoints(trainer, tmp_path).save(Progress(1, 1))
    config = TrainConfig(model_name="tiny", adam_beta2=0.9, weight_decay=0.1)
    second = Trainer(tiny_lora(), config)
    checkpoints(second, tmp_path).resume()
    (group,) = second.optimizer.param_groups
    assert group["betas"] == (0.9, 0.9) and group["weight_decay"] == 0.1
    assert len(second.optimizer.state_dict()["state"]) == len(second.parameters)  # the moments did come


def test_saving_asks_no_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def asked(*arguments: object, **options: object) -> None:
        raise AssertionError(f"a hub was asked: {arguments}")

    monkeypatch.setattr("peft.utils.save_and_load.check_file_exists_on_hf_hub", asked)
    trainer = trainer_with()
    trainer.model.peft_config["default"].base_model_name_or_path = "some/model"  # type: ignore[index, union-attr]
    checkpoints(trainer, tmp_path).save(Progress(1, 1))


def test_a_path_that_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        checkpoints(trainer_with(), tmp_path, resume=str(tmp_path / "nothing")).resume()
    assert (error.value.field, error.value.got) == ("--resume", str(tmp_path / "nothing"))
    assert STATE_FILE in error.value.wanted


def test_old_checkpoints_are_pruned_and_the_final_one_stays(tmp_path: Path) -> None:
    options = {"keep_checkpoints": 2, "checkpoint_interval": 2, "background_writes": False}
    saver = checkpoints(trainer_with(), tmp_path, **options)
    for step in range(1, 9):
        saver.maybe_save(Progress(step, step))
    saver.save(Progress(8, 8), final=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter_final", "adapter_step_6", "adapter_step_8"]


def test_peft_loads_what_was_saved(tmp_path: Path) -> None:
    trainer = trainer_with()
    base = save_tiny(tmp_path / "base")
    trainer.model.peft_config["default"].base_model_name_or_path = str(base)  # type: ignore[index, union-attr]
    fill_b(trainer.model)  # type: ignore[arg-type]
    path = checkpoints(trainer, tmp_path / "run").save(Progress(1, 1))
    loaded = AutoPeftModelForCausalLM.from_pretrained(path)
    tokens = torch.tensor([[1, 2, 3]])
    with torch.no_grad():
        ours = trainer.model.eval()(input_ids=tokens).logits
        theirs = loaded.eval()(input_ids=tokens).logits
    torch.testing.assert_close(ours, theirs)


def test_a_full_disk_is_an_error_that_names_the_file_and_leaves_no_remains(small_disk: Path) -> None:
    (small_disk / "ballast").write_bytes(b"0" * 1_000_000)
    with pytest.raises(OSError) as error:
        checkpoints(trainer_with(r=64), small_disk / "run").save(Progress(1, 1))
    assert error.value.errno == errno.ENOSPC and str(small_disk / "run") in str(error.value.filename)
    assert not list((small_disk / "run").iterdir())


def test_a_write_that_fails_leaves_the_old_folder_and_no_remains(tmp_path: Path) -> None:
    target = tmp_path / "x"
    with whole_folder(target) as folder:
        (folder / "a").write_text("old")
    with pytest.raises(OSError, match="full"), whole_folder(target) as folder:
        (folder / "a").write_text("new")
        raise OSError("full")
    assert (target / "a").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["x"]
