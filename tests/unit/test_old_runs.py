"""What runs of earlier versions left on disk (tests/data/formats) is read, with the values that those runs had."""

from __future__ import annotations

import hashlib
import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from environments.api.service import Service
from environments.api.settings import Settings
from environments.running.state import FOLDER as STATES
from environments.running.state import StateFiles
from grpo_common.roster import Member, Served, in_use, read_members, read_served
from grpo_trainer.cli import app
from grpo_trainer.config.options import build
from grpo_trainer.config.train import TrainConfig
from grpo_trainer.model.load import load_model
from grpo_trainer.model.lora import adapter_state
from grpo_trainer.phases import read_report
from grpo_trainer.policy import Policy, SharedWeights, build_policy
from grpo_trainer.report.read import read_run
from grpo_trainer.saving.checkpoint import Checkpoints
from grpo_trainer.saving.manifest import read_state
from grpo_trainer.trainer import Trainer
from tests.old_runs import FINISHED, HOME, MODEL, UNFINISHED, copy_of
from tests.stand_ins import registration
from vllm_server.protocol.bridge_config import FILE_NAME, BridgeConfigFile

ADAPTER = "580961a0de1138c29e56c8c2016bbf5474692486da8883e6fa2c5104f0dc57fe"
"""SHA-256 of the finished run's tensors, in the order of their names."""
WEIGHTS = "33953f00ff4eb6e167b8666f77536c7b55e5dd580d60ee4def01c7b36c5a591b"
"""The same of the unfinished run's."""


def digest(tensors: Mapping[str, torch.Tensor]) -> str:
    whole = hashlib.sha256()
    for name in sorted(tensors):
        whole.update(tensors[name].contiguous().numpy().tobytes())
    return whole.hexdigest()


def command(*words: object) -> str:
    done = CliRunner().invoke(app, [str(word) for word in words], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


def config_of(folder: Path) -> TrainConfig:
    """A run's own options, with its model and its checkpoints where they are now."""
    options = tomllib.loads((folder / "config" / "trainer.toml").read_text())
    options |= {"model_name": str(MODEL), "save_path": str(folder / "checkpoints"), "resume": "auto", "device": "cpu"}
    return build(TrainConfig, options)


def trainer_of(config: TrainConfig, policy: Policy) -> tuple[Trainer, Checkpoints]:
    trainer = Trainer(policy.model, config)
    return trainer, Checkpoints(config, policy, trainer.optimizer, trainer.norms)


def check_optimizer(trainer: Trainer, saved: Mapping[str, Any], steps: int) -> None:
    """That the optimizer has the states of the file, bit for bit, after that many steps."""
    loaded = trainer.optimizer.state_dict()["state"]
    assert loaded.keys() == saved["state"].keys() == set(range(len(trainer.parameters)))
    for number, state in saved["state"].items():
        assert state["step"] == loaded[number]["step"] == steps
        for name in ("exp_avg", "exp_avg_sq"):
            assert state[name].any() and torch.equal(state[name], loaded[number][name])


def test_report_and_list(tmp_path: Path) -> None:
    finished, unfinished = copy_of(FINISHED, tmp_path), copy_of(UNFINISHED, tmp_path)
    for folder, prompt in ((finished, "0+1="), (unfinished, "2+3=")):
        command("report", folder)
        assert prompt in (folder / "report.html").read_text(), "the samples are on the page"
    found = {Path(run["folder"]).name: run for run in json.loads(command("runs", tmp_path, "--json"))}
    kept = ("mode", "model", "steps", "total_steps", "reward", "state")
    assert {name: tuple(run[key] for key in kept) for name, run in found.items()} == {
        # (0.4375 + 0.5 + 0.375 + 0.4375) / 4
        "finished": ("lora_only", f"{HOME}/model", 4, 4, 0.4375, "done"),
        # (0.25 + 0.4375 + 0.375 + 0.4375 + 0.25) / 5
        "unfinished": ("shared_vllm", f"{HOME}/model", 5, 1000, 0.35, "stopped"),
    }


def test_rows_samples_and_options() -> None:
    finished = read_run(FINISHED)
    assert (finished.steps, finished.total_steps, finished.final_step, finished.is_done) == (4, 4, 4, True)
    assert finished.numbers("reward/mean") == [0.4375, 0.5, 0.375, 0.4375]
    assert finished.numbers("publish/version") == [1.0, 2.0, 3.0, 4.0]
    assert finished.numbers("env/arithmetic/groups_sent") == [9, 4, 2, 1]
    assert len(finished.samples) == 8, "two of each step"
    first = {"step": 1, "version": 0, "environment": "arithmetic", "prompt": "0+1=", "reward": 1.0}
    assert first.items() <= finished.samples[0].items()
    assert finished.samples[0]["pieces"] == ["1", "<|endoftext|>"]
    assert set(finished.checkpoints) == {"adapter_step_3", "adapter_final"}
    options = {"weight_bridge_mode": "lora_only", "lora_r": 8, "lr": 0.001, "arithmetic.group_size": "4"}
    assert options.items() <= finished.settings.items()
    unfinished = read_run(UNFINISHED)
    assert (unfinished.steps, unfinished.final_step, unfinished.is_done) == (5, None, False)
    assert unfinished.numbers("reward/mean") == [0.25, 0.4375, 0.375, 0.4375, 0.25]


def test_start_roster_and_state_of_an_environment() -> None:
    report = read_report(FINISHED / "start.json")
    assert report is not None and (report.seconds, report.phases["imports"]) == (188.47, 47.365)
    assert report.servers["server"]["ready"] == 104.351
    url = "http://127.0.0.1:28911"
    assert read_members(FINISHED / "servers") == (Member("server", url, "this machine", "running", 1),)
    assert read_served(FINISHED / "servers") == {url: Served(1, 4, "")}
    assert in_use(FINISHED / "servers") == {url: 1}
    states = StateFiles(UNFINISHED / "checkpoints" / STATES, "arithmetic")
    assert states.newest(3) == {"position": 19}


def test_the_adapter_is_resumed(tmp_path: Path) -> None:
    folder = copy_of(FINISHED, tmp_path)
    config = config_of(folder)
    trainer, checkpoints = trainer_of(config, build_policy(config))
    progress = checkpoints.resume()
    path = folder / "checkpoints" / "adapter_final"
    assert checkpoints.safe_path == path
    assert (progress.step, progress.policy_version, len(progress.batches)) == (4, 4, 4)
    assert digest(load_file(path / "adapter_model.safetensors")) == ADAPTER
    saved = torch.load(path / "trainer_state.pt", weights_only=True)
    assert isinstance(trainer.model, PeftModel) and digest(adapter_state(trainer.model)) == ADAPTER
    check_optimizer(trainer, saved["optimizer"], steps=4)
    before = read_state(folder / "checkpoints" / "adapter_step_3").progress
    assert (before.step, before.policy_version) == (3, 3)


def test_all_weights_are_resumed_from_the_checkpoint_before_the_kill(tmp_path: Path) -> None:
    folder = copy_of(UNFINISHED, tmp_path)
    config = config_of(folder)
    source = msgspec.json.decode((folder / "config" / FILE_NAME).read_bytes(), type=BridgeConfigFile)
    assert (source.schema_version, source.num_params) == (1, 10)
    policy = SharedWeights(load_model(config).requires_grad_(True), None, source)
    trainer, checkpoints = trainer_of(config, policy)
    progress = checkpoints.resume()
    policy.write_loaded()
    path = folder / "checkpoints" / "step_3"
    assert checkpoints.safe_path == path
    batches = ("da1043760e009b29", "dea9cfae8f05fc76", "b3db034ea7eb50a3")
    assert (progress.step, progress.policy_version, progress.batches) == (3, 3, batches)
    assert digest({name: each.detach() for name, each in trainer.model.named_parameters()}) == WEIGHTS
    saved = torch.load(path / "trainer_state.pt", weights_only=True)
    check_optimizer(trainer, saved["optimizer"], steps=3)
    assert sum(each.numel() for each in trainer.parameters) == 8256


async def test_leased_groups_return_to_the_queue(tmp_path: Path) -> None:
    """Steps 4 and 5 were trained and not saved, step 6 was running: three batches of four groups of four."""
    path = copy_of(UNFINISHED, tmp_path) / "queue.sqlite"

    def counts(service: Service) -> tuple[int, int, int]:
        status = service.status()
        return status.current_step, status.queue_size, status.leased_groups

    service = Service(Settings(store=path))
    assert counts(service) == (5, 0, 12)
    assert [each.name for each in service.status().environments] == ["arithmetic_0"]
    await service.register(registration(16, starting_step=3))
    assert counts(service) == (3, 12, 0)
    ids = []
    for _ in range(3):
        batch = await service.next_batch(lease=60.0)
        assert batch is not None and batch.lease is not None
        ids += service.queue.leases[batch.lease.batch_id].groups
    assert counts(service) == (3, 0, 12) and await service.next_batch(lease=60.0) is None
    service.close()
    assert ids == list(range(13, 25))


async def test_the_finished_queue_is_empty(tmp_path: Path) -> None:
    path = copy_of(FINISHED, tmp_path) / "queue.sqlite"

    service = Service(Settings(store=path))
    found = service.status()
    service.close()
    assert (found.current_step, found.queue_size, found.leased_groups) == (4, 0, 0)


@pytest.mark.parametrize("run", [FINISHED, UNFINISHED], ids=("adapter", "all weights"))
def test_export(tmp_path: Path, run: Path) -> None:
    folder, out = copy_of(run, tmp_path), tmp_path / "out"
    adapter = run == FINISHED
    base = ("--model-name", MODEL) if adapter else ()
    assert command("export", folder, out, *base).strip() == str(out)
    file = "adapter_model.safetensors" if adapter else "model.safetensors"
    assert digest(load_file(out / file)) == (ADAPTER if adapter else WEIGHTS)
    assert not (out / "state.json").exists() and not (out / "trainer_state.pt").exists()
    if adapter:
        command("export", folder, tmp_path / "merged", "--merge", *base)
        out = tmp_path / "merged"
    model = AutoModelForCausalLM.from_pretrained(out)
    assert model.num_parameters() == 8256
