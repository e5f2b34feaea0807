"""The restart bridges against a server that loads what was exported: versions, restarts, and what the proof sees."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, PreTrainedModel

from grpo_trainer.alignment.probes import FAILED
from grpo_trainer.alignment.proof import BASE_MODEL, OTHER_WEIGHTS, Proof
from grpo_trainer.config.bridge import BridgeConfig
from grpo_trainer.config.train import CheckpointConfig, TrainConfig
from grpo_trainer.errors import BridgeError
from grpo_trainer.metrics.types import reduce
from grpo_trainer.policy import AllWeights
from grpo_trainer.saving.checkpoint import Checkpoints
from grpo_trainer.trainer import Trainer
from grpo_trainer.weights.checkpoint_restart import CheckpointModels, Launched, MergedModels, RestartBridge
from tests.unit.factories import refusing
from tests.unit.test_proof import INFO, answer, next_logprobs, sampled
from tests.unit.tiny_lora import fill_b, save_tiny, tiny_lora
from vllm_server.protocol import BridgeInfo, GenerateResponse


class FakeServer:
    """An owned server and its client in one; `fault` says what a launch from version 1 on does wrong."""

    log_path = Path("server.log")

    def __init__(self, fault: str = "") -> None:
        self.fault = fault
        self.model: PreTrainedModel | None = None
        self.info: BridgeInfo = INFO
        self.calls: list[str] = []

    def start(self, model: str, version: int) -> str:
        assert self.model is None, "two servers at a time"
        wanted = model
        self.calls.append(f"start {Path(model).name} v{version}")
        if version and self.fault == "not restarted":
            model, version = self.info.model_name, self.info.policy_version
        boot = self.info.boot_id if version and self.fault == "same boot" else f"boot {len(self.calls)}"
        said = version + 1 if version and self.fault == "wrong version" else version
        self.info = msgspec.structs.replace(INFO, boot_id=boot, policy_version=said, model_name=model)
        self.model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
        if version and self.fault == "other weights":
            layer: Any = self.model.get_submodule("model.layers.1.mlp.up_proj")
            with torch.no_grad():
                layer.weight.mul_(1.5)
        return wanted

    def wait_ready(self) -> float:
        return 1.0

    def stop(self) -> float:
        if self.model is not None:
            self.calls.append("stop")
        self.model = None
        return 0.5

    def wait_until_ready(self) -> BridgeInfo:
        return self.info

    def close(self) -> None:
        self.stop()

    def generate(self, prompt: list[int], *, max_tokens: int, **_: Any) -> GenerateResponse:
        assert self.model is not None
        found = sampled(partial(next_logprobs, self.model), prompt, max_tokens)
        return answer(prompt, *found, self.info.policy_version)


class Bridge:
    """A bridge over a fake server, and how to train a step."""

    def __init__(
        self,
        mode: str,
        folder: Path,
        fault: str = "",
        *,
        interval: int = 2,
        last: int = 100,
        keep: int = 0,
        others: tuple[str, ...] = (),
    ):
        base = str(save_tiny(folder / "base"))
        self.root = folder / "run"
        self.servers = [FakeServer(each) for each in (fault, *others)]
        self.server = self.servers[0]
        self.model, self.change, models = (lora if mode == "lora_restart" else full)(base, self.root, keep)
        options = BridgeConfig(vllm_restart_interval=interval)
        fakes: list[Any] = [*self.servers]
        launched = [Launched(fake, fake, Proof(self.model, fake, "float32")) for fake in fakes]
        self.bridge = RestartBridge(options, models, launched, 64, last)

    def folders(self) -> list[str]:
        return sorted(path.name for path in self.root.iterdir()) if self.root.exists() else []


Made = tuple[PeftModel | PreTrainedModel, Callable[[int], None], Any]


def lora(base: str, root: Path, keep: int) -> Made:
    model = tiny_lora()
    return model, lambda step: fill_b(model, step), MergedModels(base, model, None, torch.float32, root, keep)


def checkpoints(base: str, root: Path, **options: Any) -> tuple[PreTrainedModel, Checkpoints]:
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    optimizer = Trainer(model, TrainConfig(model_name=base)).optimizer
    return model, Checkpoints(CheckpointConfig(save_path=root, **options), AllWeights(model, None), optimizer)


def full(base: str, root: Path, keep: int) -> Made:
    model, saver = checkpoints(base, root, keep_checkpoints=keep)
    layer: Any = model.get_submodule("model.layers.0.mlp.up_proj")

    @torch.no_grad()
    def change(step: int) -> None:
        layer.weight.add_(0.1)

    return model, change, CheckpointModels(base, saver)


@pytest.mark.parametrize(("mode", "name"), [("lora_restart", "merged_step"), ("none", "step")])
def test_restart_bridge_restarts_every_few_versions(tmp_path: Path, mode: str, name: str) -> None:
    """Each publish says which version the servers have, and new ones generate with the trainer's weights."""
    made = Bridge(mode, tmp_path, interval=2, last=6, others=("",))
    served = []
    with made.bridge as bridge:
        assert bridge.connect(0) == 0
        noise = bridge.prove()  # each restart is proved, too
        assert noise is not None and noise < 1e-5
        assert bridge.publish(0).version == 0
        for version in range(1, 7):
            made.change(version)
            published = bridge.publish(version)
            served.append(published.version)
            numbers = reduce(published.metrics)
            assert numbers["publish/version"] == version and numbers["publish/served_version"] == served[-1]
            assert numbers.get("publish/stop_time") == (0.5 if version in (2, 4) else None)
    assert served == [0, 2, 2, 4, 4, 4]  # the last version is nobody's: training is over
    calls = ["start base v0", "stop", f"start {name}_2 v2", "stop", f"start {name}_4 v4", "stop"]
    assert [server.calls for server in made.servers] == [calls] * 2


ANOTHER_MODEL = [("policy_version", "0", "1"), ("model_name", "{folder}/base", "{folder}/run/{name}_1")]


@pytest.mark.parametrize("is_second", [False, True])
@pytest.mark.parametrize(
    ("mode", "name", "fault", "parts"),
    [
        ("lora_restart", "merged_step", "not restarted", ANOTHER_MODEL),
        ("lora_restart", "merged_step", "same boot", [("boot_id", "boot 1", "another")]),
        ("none", "step", "wrong version", [("policy_version", "2", "1")]),
        ("none", "step", "other weights", []),
    ],
)
def test_restart_bridge_catches_each_planted_fault_of_a_relaunch(
    tmp_path: Path, mode: str, name: str, fault: str, parts: list[tuple[str, str, str]], is_second: bool
) -> None:
    """Of the only server, and of one of two."""
    made = Bridge(mode, tmp_path, *(() if is_second else (fault,)), interval=1, others=(fault,) * is_second)
    with made.bridge as bridge:
        bridge.connect(0)
        bridge.prove()
        made.change(1)
        with pytest.raises(BridgeError) as error:
            bridge.publish(1)
    assert all(server.model is None for server in made.servers)
    if fault == "other weights":
        assert error.value.field.endswith(f"{FAILED} (version 1)") and OTHER_WEIGHTS in error.value.summary
        return
    found = [(each.field.split()[-1], each.got.split(",")[0], each.wanted) for each in error.value.problems]
    assert found == [tuple(part.format(folder=tmp_path, name=name) for part in each) for each in parts]


def test_restart_bridge_tells_a_server_without_the_adapter_apart(tmp_path: Path) -> None:
    made = Bridge("lora_restart", tmp_path, interval=1)
    with made.bridge as bridge:
        bridge.connect(0)
        made.change(1)
        with refusing(BridgeError, f"{FAILED} (version 0)", words=[BASE_MODEL]):
            bridge.prove()


@pytest.mark.parametrize(
    ("mode", "name", "keep", "left"),
    [
        *(("lora_restart", "merged_step", *each) for each in ((0, [3]), (1, [3]), (2, [2, 3]))),
        *(("none", "step", *each) for each in ((0, [1, 2, 3]), (1, []), (2, []))),
    ],
)
def test_restart_bridge_keeps_models(tmp_path: Path, mode: str, name: str, keep: int, left: list[int]) -> None:
    made = Bridge(mode, tmp_path, interval=1, keep=keep)
    with made.bridge as bridge:
        bridge.connect(0)
        for version in range(1, 4):
            made.change(version)
            bridge.publish(version)
    assert made.folders() == [f"{name}_{version}" for version in left]


def test_restart_bridge_counts_models_of_a_killed_process_and_leaves_strangers_alone(tmp_path: Path) -> None:
    root = tmp_path / "run"
    for name in ("merged_step_3", "merged_step_6", ".merged_step_6.0a1b2c3d.tmp", "merged_step_old", "merged_step_8"):
        (root / name).mkdir(parents=True)
        if name != "merged_step_8":  # no model: somebody else's
            (root / name / "config.json").touch()
    made = Bridge("lora_restart", tmp_path, interval=1, keep=2)
    before = ["merged_step_3", "merged_step_6", "merged_step_8", "merged_step_old"]
    assert made.folders() == before
    with made.bridge as bridge:
        made.change(1)
        bridge.connect(6)  # the same again
        assert made.folders() == before
        made.change(2)
        bridge.publish(7)
    assert made.folders() == ["merged_step_6", "merged_step_7", "merged_step_8", "merged_step_old"]


@pytest.mark.parametrize(("keep", "left"), [(0, ["step_2", "version_9"]), (2, [])])
def test_restart_bridge_exports_of_a_killed_process(tmp_path: Path, keep: int, left: list[str]) -> None:
    """They go when its run goes on."""
    root = tmp_path / "run"
    for name in ("step_2", "version_9"):
        (root / name).mkdir(parents=True)
        (root / name / "config.json").touch()
    (root / "step_by_hand").mkdir()
    checkpoints(str(save_tiny(tmp_path / "base")), root, keep_checkpoints=keep, resume="auto")[1].resume()
    assert sorted(path.name for path in root.iterdir()) == sorted([*left, "step_by_hand"])
