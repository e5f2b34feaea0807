"""The bridge over shared memory, against a server that has the trainer's own tensors: fences, versions, proof."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import msgspec
import pytest
import torch
from transformers import Qwen2ForCausalLM

from grpo_trainer.alignment.probes import FAILED
from grpo_trainer.alignment.proof import OTHER_WEIGHTS, STALE, UNSEEN
from grpo_trainer.config.train import CheckpointConfig, TrainConfig
from grpo_trainer.errors import BridgeError, ConfigError, ModelError, ServerError, TrainingError
from grpo_trainer.metrics.types import reduce
from grpo_trainer.parallel.world import World
from grpo_trainer.policy import AllWeights, SharedWeights, choose_trained
from grpo_trainer.saving.checkpoint import Checkpoints, Progress
from grpo_trainer.trainer import Trainer
from grpo_trainer.weights import shared_weights
from grpo_trainer.weights.shared_weights import SharedBridge
from tests.shared_contract import same_weights
from tests.unit.factories import batch, refusing, sample
from tests.unit.test_checkpoint import ROLLOUTS
from tests.unit.test_proof import INFO, answer, next_logprobs, sampled
from tests.unit.tiny_lora import tiny_qwen
from vllm_server.protocol import (
    PROOF_VERSION,
    BridgeDebug,
    BridgeInfo,
    GenerateResponse,
    UpdateBeginRequest,
    UpdateBeginResponse,
    UpdateEndRequest,
    UpdateEndResponse,
)


def sharing(theirs: Qwen2ForCausalLM) -> Qwen2ForCausalLM:
    """A second model on the first one's parameters."""
    ours = tiny_qwen(seed=99)
    for name, parameter in theirs.named_parameters():
        module = ours.get_submodule(name.rpartition(".")[0])
        setattr(module, name.rpartition(".")[2], torch.nn.Parameter(parameter.data))
    ours.tie_weights()
    return ours


class SharingServer:
    """A server and its client in one; `fault_of_it` says what it does wrong."""

    def __init__(self, fault_of_it: str = "", version: int = 0, updates: int = 0) -> None:
        self.model = tiny_qwen().eval()
        self.fault_of_it = fault_of_it
        self.info: BridgeInfo = msgspec.structs.replace(
            INFO, shared_weights=True, policy_version=version, update_count=updates
        )
        self.told: list[str] = []
        self.held = False
        self.torn: str | None = None
        self.asked: dict[tuple[int, ...], GenerateResponse] = {}

    def trainers_model(self) -> Qwen2ForCausalLM:
        ours = sharing(self.model)
        if self.fault_of_it == "other place":
            mlp: Any = ours.get_submodule("model.layers.1.mlp")
            mlp.gate_proj.weight, mlp.up_proj.weight = mlp.up_proj.weight, mlp.gate_proj.weight
        if self.fault_of_it == "a copy":
            self.model = tiny_qwen().eval()
        return ours

    def wait_until_there(self) -> BridgeInfo:
        return self.info

    def wait_until_settled(self) -> BridgeDebug:
        return BridgeDebug(
            info=self.info, uptime_seconds=1.0, paused=False, updating=False, fault=self.torn, last_stall_seconds=0.0,
            in_flight={},
        )  # fmt: skip

    def begin_update(self, request: UpdateBeginRequest) -> UpdateBeginResponse:
        assert not self.held
        assert request.boot_id == self.info.boot_id
        self.held = True
        self.told.append(f"begin {request.in_flight}")
        return UpdateBeginResponse(token="t", pause_seconds=0.25)

    def end_update(self, request: UpdateEndRequest) -> UpdateEndResponse:
        if self.fault_of_it == "gone":
            raise ServerError("no answer")
        assert self.held and request.token == "t"
        self.held = False
        if self.fault_of_it == "ends while it is written" and request.version == PROOF_VERSION:
            raise ServerError("no answer")
        self.told.append("torn" if request.torn else f"end {request.version}")
        self.torn = "torn" if request.torn else None
        if not request.torn:
            self.info = msgspec.structs.replace(self.info, policy_version=request.version)
            if self.fault_of_it != "stale cache" and (self.fault_of_it, request.version) != ("keeps the change", 0):
                self.asked.clear()
        return UpdateEndResponse(policy_version=request.version, stall_seconds=0.5)

    def generate(self, prompt: list[int], *, max_tokens: int, **_: Any) -> GenerateResponse:
        assert not self.held, "asked while it is held still"
        version = 9 if self.fault_of_it == "wrong version" else self.info.policy_version
        if self.fault_of_it == "ends while it is asked" and version == PROOF_VERSION:
            raise ServerError("no answer")
        if tuple(prompt) not in self.asked:
            found = sampled(partial(next_logprobs, self.model), prompt, max_tokens, torch.Generator().manual_seed(0))
            self.asked[tuple(prompt)] = answer(prompt, *found)
        return msgspec.structs.replace(self.asked[tuple(prompt)], policy_version=version)

    def close(self) -> None:
        self.told.append("close")


class Made:
    """A bridge over such a server, and a trainer on its weights."""

    def __init__(self, server: SharingServer | None = None, **options: Any) -> None:
        self.server = server or SharingServer()
        self.model = self.server.trainers_model()
        self.config = TrainConfig.model_validate(
            {"model_name": "tiny", "weight_bridge_mode": "shared_vllm", "lr": 1e-2, **options}
        )
        choose_trained(self.model, self.config)
        source: Any = SimpleNamespace(boot_id=self.server.info.boot_id)
        self.policy = SharedWeights(self.model, None, source)
        client: Any = self.server
        self.bridge = SharedBridge(self.config, self.policy, {"http://server": client}, 64)
        self.trainer = Trainer(self.model, self.config)

    def checkpoints(self, folder: Path) -> Checkpoints:
        return Checkpoints(CheckpointConfig(save_path=folder, resume="auto"), self.policy, self.trainer.optimizer)

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: parameter.detach().clone() for name, parameter in self.model.named_parameters()}


@pytest.fixture
def made() -> Made:
    """Connected to its server with version 0."""
    connected = Made()
    connected.bridge.connect(0)
    return connected


@pytest.mark.parametrize("in_flight", ["keep", "recompute", "abort"])
def test_a_step_is_a_fence_and_a_version(in_flight: str) -> None:
    made = Made(in_flight=in_flight)
    with made.bridge as bridge:
        assert bridge.connect(0) == 0
        assert reduce(bridge.publish(0).metrics) == {"train/sync_time": 0.0, "publish/version": 0}
        for version in (1, 2):
            before = made.weights()
            assert made.trainer.step(ROLLOUTS, version, bridge.updating).updated
            assert not same_weights(made.weights(), before)
            with torch.no_grad():  # the server computes with what the trainer wrote
                tokens = torch.tensor([[1, 2, 3]])
                assert torch.equal(made.model.eval()(tokens).logits, made.server.model(tokens).logits)
            published = bridge.publish(version)
            assert published.version == version == made.server.info.policy_version
            numbers = reduce(published.metrics)
            assert (numbers["publish/pause_time"], numbers["publish/stall_time"]) == (0.25, 0.5)  # as the server says
            assert 0 < numbers["publish/write_time"] < numbers["train/sync_time"]
    begin = f"begin {in_flight}"
    assert made.server.told == [begin, "end 1", begin, "end 2", "close"]


class Meeting(World):
    """A process that is alone, and notes at each meeting whether its server is paused."""

    def __init__(self, server: SharingServer, fails: bool = False) -> None:
        super().__init__()
        self.server = server
        self.fails = fails
        self.paused: list[bool] = []

    def barrier(self) -> None:
        self.paused.append(self.server.held)
        if self.fails and self.server.held:
            raise TrainingError("another process ended")


@pytest.mark.parametrize("fails", [False, True])
def test_the_servers_resume_when_all_processes_have_written(fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    made = Made()
    world, client = Meeting(made.server, fails), made.server
    done: list[bool] = []
    bridge = SharedBridge(made.config, made.policy, {"http://server": client}, 64, world)  # type: ignore[dict-item]
    monkeypatch.setattr(bridge, "finish_kernels", lambda: done.append(made.server.held))
    with bridge:
        bridge.connect(0)
        with pytest.raises(TrainingError) if fails else nullcontext(), bridge.updating():
            assert world.paused == [False, False] and done == [False], "no server waits for a process that is late"
    assert world.paused == [False, False, True] and done == [False, True]
    assert made.server.told == ["begin keep", "torn" if fails else "end 1", "close"]


@pytest.mark.parametrize("torn", [None, "torn"])
def test_a_server_is_as_it_was_if_the_fence_of_another_does_not_open(torn: str | None) -> None:
    made, other, world = Made(SharingServer(version=3)), SharingServer(version=3), World()
    made.server.torn, made.policy.loaded = torn, {}
    other.info = msgspec.structs.replace(other.info, boot_id="other")
    servers: Any = {"http://one": made.server, "http://other": other}
    silent = patch.object(other, "begin_update", side_effect=ServerError("no answer"))
    with patch.object(world, "gather", lambda boot: [boot, "other"]), silent, pytest.raises(BridgeError):
        SharedBridge(made.config, made.policy, servers, 64, world).connect(0)
    assert made.server.told == ["begin keep", torn or "end 3"]


def test_step_that_is_skipped_is_no_version(made: Made) -> None:
    poisoned = batch([sample([1], [2], 1.0, logprobs=[float("nan")]), sample([1], [3], 0.0)])
    before = made.weights()
    result = made.trainer.step(poisoned, 0, made.bridge.updating)
    assert not result.updated and same_weights(made.weights(), before)
    assert made.bridge.publish(0).version == 0
    with refusing(BridgeError, "version", got="1", wanted="0"):
        made.bridge.publish(1)
    assert not made.server.told


@pytest.mark.parametrize(("fault", "told"), [("", ["begin keep", "torn"]), ("gone", ["begin keep"])])
def test_bridge_raises_the_writes_own_reason_even_if_the_server_is_gone(fault: str, told: list[str]) -> None:
    made = Made(SharingServer(fault), proof=False)
    made.bridge.connect(0)
    assert made.bridge.prove() is None and not made.server.told, "no proof changes nothing"
    with pytest.raises(ZeroDivisionError), made.bridge.updating():
        raise ZeroDivisionError
    assert made.server.told == told


# ---------------------------------------------------------------- the proof


@pytest.mark.parametrize(
    ("fault", "tried", "what"),
    [
        ("a copy", " (synthetic change)", UNSEEN),
        ("stale cache", " (synthetic change)", UNSEEN),
        ("keeps the change", " (change undone)", STALE),
        ("other place", " (version 0)", OTHER_WEIGHTS),
        ("wrong version", ": version", ""),
        ("ends while it is written", "", ""),  # a run with other servers goes on with the trainer's weights
        ("ends while it is asked", "", ""),
    ],
)
def test_proof_catches_each_planted_fault_and_the_weights_are_as_before(fault: str, tried: str, what: str) -> None:
    made = Made(SharingServer(fault))
    made.bridge.connect(0)
    before = made.weights()
    error = refusing(BridgeError, f"{FAILED}{tried}", words=[what]) if tried else pytest.raises(ServerError)
    with error:
        made.bridge.prove()
    assert same_weights(made.weights(), before) and not made.server.held and made.server.info.policy_version == 0


def test_a_checkpoint_is_written_within_a_fence_and_goes_on_bit_for_bit(tmp_path: Path) -> None:
    first = Made()
    first.bridge.connect(0)
    for step in range(2):
        first.trainer.step(ROLLOUTS, step, first.bridge.updating)
    path = first.checkpoints(tmp_path).save(Progress(2, 2))
    assert path.name == "step_2" and (path / "model.safetensors").is_file()
    for step in range(2, 4):
        first.trainer.step(ROLLOUTS, step, first.bridge.updating)

    second = Made()
    before = second.weights()
    progress = second.checkpoints(tmp_path).resume()
    assert progress == Progress(2, 2)
    assert same_weights(second.weights(), before), "the server reads them: not without a fence"
    assert second.bridge.connect(2) == 2
    assert second.server.told == ["begin keep", "end 2"]
    assert second.bridge.publish(2).version == 2
    for step in range(2, 4):
        second.trainer.step(ROLLOUTS, step, second.bridge.updating)
    assert same_weights(second.weights(), first.weights())


# ---------------------------------------------------------------- starting again


@pytest.mark.parametrize("masters", [False, True], ids=["rounded", "masters"])
def test_a_step_that_no_fence_let_in_is_whole_in_the_checkpoint(masters: bool, tmp_path: Path) -> None:
    """The optimizer's states contain it already, so the saved weights must, too."""

    def made() -> Made:
        server = SharingServer()
        server.model.bfloat16()
        return Made(server, master_weights=masters)

    @contextmanager
    def refused() -> Iterator[None]:
        raise ServerError("gone")
        yield

    whole, ended, resumed = made(), made(), made()
    for one, last in ((whole, whole.bridge.updating), (ended, refused)):
        torch.manual_seed(0)
        one.bridge.connect(0)
        one.trainer.step(ROLLOUTS, 0, one.bridge.updating)
        with nullcontext() if one is whole else pytest.raises(ServerError):
            one.trainer.step(ROLLOUTS, 1, last)
        if one is whole:
            one.trainer.step(ROLLOUTS, 2, one.bridge.updating)
    served = ended.weights()
    ended.checkpoints(tmp_path).save(Progress(2, 2))
    assert same_weights(ended.weights(), served)
    resumed.checkpoints(tmp_path).resume()
    resumed.bridge.connect(2)
    resumed.trainer.step(ROLLOUTS, 2, resumed.bridge.updating)
    assert same_weights(resumed.weights(), whole.weights())


@pytest.mark.parametrize(("served", "becomes"), [(0, 2), (1, 2), (2, 3), (17, 18)])
def test_a_resumed_version_is_none_that_the_server_has_seen(tmp_path: Path, served: int, becomes: int) -> None:
    first = Made()
    first.checkpoints(tmp_path).save(Progress(2, 2))
    second = Made(SharingServer(version=served))
    second.server.torn = "an update is torn"  # a whole write makes it well
    second.checkpoints(tmp_path).resume()
    assert second.bridge.connect(2) == becomes == second.server.info.policy_version
    assert second.server.torn is None
    with second.bridge.updating():
        pass
    assert second.bridge.publish(becomes + 1).version == becomes + 1


def test_a_checkpoint_of_all_weights_that_another_mode_wrote_is_of_use(tmp_path: Path) -> None:
    other = tiny_qwen(seed=5)
    other.requires_grad_(True)
    trainer = Trainer(other, TrainConfig(model_name="tiny"))
    config = CheckpointConfig(save_path=tmp_path)
    Checkpoints(config, AllWeights(other, None), trainer.optimizer).save(Progress(3, 3))
    made = Made()
    made.checkpoints(tmp_path).resume()
    made.bridge.connect(3)
    assert same_weights(made.weights(), {name: parameter.detach() for name, parameter in other.named_parameters()})


def test_without_a_checkpoint_training_goes_on_from_what_the_server_has(caplog: pytest.LogCaptureFixture) -> None:
    made = Made(SharingServer(version=17, updates=20))
    assert made.bridge.connect(0) == 17
    (warned,) = [record for record in caplog.records if record.levelname == "WARNING" and record.args == (17,)]
    assert warned.name == shared_weights.__name__
    made.trainer.step(ROLLOUTS, 0, made.bridge.updating)
    assert made.bridge.publish(18).version == 18


@pytest.mark.parametrize("torn", [None, "torn"])
def test_connect_refuses_weights_that_are_no_policys(torn: str | None) -> None:
    server = SharingServer() if torn else SharingServer(version=PROOF_VERSION, updates=1)
    server.torn = torn
    with pytest.raises(BridgeError) as refused:
        Made(server).bridge.connect(0)
    assert "--resume auto" in refused.value.fix and (torn is None or refused.value.got == torn)
    made = Made()
    made.server.info = msgspec.structs.replace(made.server.info, boot_id="other")  # it has restarted
    with refusing(BridgeError, "boot_id", got="other"):
        made.bridge.connect(0)


def test_weights_of_a_checkpoint_that_are_not_finite_are_never_written(tmp_path: Path) -> None:
    spoilt = tiny_qwen(seed=5)
    name = "model.layers.1.mlp.down_proj.weight"
    with torch.no_grad():
        spoilt.get_parameter(name)[0, 0] = float("nan")
    spoilt.save_pretrained(tmp_path)
    made = Made()
    with refusing(ConfigError, "--resume") as refused:
        made.policy.load(tmp_path, {})
    assert name in refused.value.got.split()
    assert made.policy.loaded is None and not made.server.told


# ---------------------------------------------------------------- some layers


def test_only_the_chosen_layers_are_trained() -> None:
    made = Made(train_layer_indices="1")
    before = made.weights()
    made.bridge.connect(0)
    made.trainer.step(ROLLOUTS, 0, made.bridge.updating)
    after = made.weights()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed and all(name.startswith("model.layers.1.") for name in changed)
    with refusing(ModelError, "--train-layer-indices", got="2,3", wanted="0 to 1"):
        Made(train_layer_indices="1-3")
