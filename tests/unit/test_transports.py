"""Which transport an adapter takes for every place of trainer and server; what the server confirms."""

from __future__ import annotations

import itertools
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_trainer.config.bridge import BridgeConfig
from grpo_trainer.errors import BridgeError, ServerError
from grpo_trainer.weights.gpus import TrainerPlace, obstacle
from grpo_trainer.weights.lora_swap import LoraSwap
from grpo_trainer.weights.packed import PackedAdapter
from grpo_trainer.weights.transports import choose as module
from grpo_trainer.weights.transports.choose import OPENERS, open_transport
from grpo_trainer.weights.transports.disk import Disk
from grpo_trainer.weights.transports.transport import Sent
from tests.unit.factories import OURS, refusing, worker
from tests.unit.factories import bridge_info as info
from tests.unit.tiny_lora import tiny_lora
from vllm_server.protocol import BridgeInfo, LoraLoadResponse, Transport, machine_id
from vllm_server.protocol.nccl import NcclError

OTHER = "GPU-other"


def test_disk_begins_with_the_folders_of_a_trainer_before_it_and_leaves_strangers_alone(tmp_path: Path) -> None:
    ours = ["policy-v7", "policy-proof-present-0a1b2c3d", "policy-v8"]
    others = ["policy-vision-v1", "other-v3", "policy-v9-backup", "policy-v5"]
    for number, name in enumerate([*ours, *others, ".policy-v9.0a1b2c3d.tmp", ".other-v9.0a1b2c3d.tmp"]):
        folder = tmp_path / name
        folder.mkdir()
        if name != "policy-v5":  # no adapter in it
            (folder / "adapter_model.safetensors").touch()
        os.utime(folder, (number, number))
    server: Any = Answering()
    disk = Disk(PackedAdapter(tiny_lora(), torch.float32), server, tmp_path, "policy", 2)
    disk.send("policy-v9", 9, activate=True)
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {*others, "policy-v8", "policy-v9", ".other-v9.0a1b2c3d.tmp"}


def logged(caplog: pytest.LogCaptureFixture) -> list[Any]:
    return [record.args for record in caplog.records]


class Answering:
    """A server that takes whatever is published."""

    def load_adapter(self, request: object) -> None: ...


def test_a_folder_of_adapters_that_was_deleted_is_made_again_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = tmp_path / "adapters"

    class Deletes(Answering):
        """A server under which the folder is deleted once."""

        deleted = False

        def load_adapter(self, request: Any) -> None:
            if request.version == 4 and not self.deleted:
                self.deleted = True
                shutil.rmtree(root)
                raise ServerError("no such folder", field="adapter_path")
            assert Path(request.adapter_path).is_dir()

    server: Any = Deletes()
    disk = Disk(PackedAdapter(tiny_lora(), torch.float32), server, root, "policy", 2)
    for version in range(7):
        if version == 2:
            shutil.rmtree(root)
        disk.send(f"policy-v{version}", version, activate=True)
        if version == 5:
            shutil.rmtree(root / "policy-v4")
    named = [{Path(path).name for path in str(args[0]).split(", ")} for args in logged(caplog)]
    assert named == [{"policy-v0", "policy-v1"}, {"policy-v2", "policy-v3", "policy-v4"}, {"policy-v4"}]
    assert {path.name for path in root.iterdir()} == {"policy-v5", "policy-v6"}

    class Refuses(Answering):
        def load_adapter(self, request: Any) -> None:
            raise ServerError("refused", field="rank")

    server = Refuses()
    with refusing(ServerError, "rank"):
        Disk(PackedAdapter(tiny_lora(), torch.float32), server, root, "policy", 2).send("policy-v7", 7, activate=True)
    assert len(caplog.records) == 3


@pytest.mark.parametrize(
    ("trainer", "described", "works"),
    [
        # one machine, one GPU: its memory can be mapped, NCCL takes one rank a GPU
        (OURS, info(worker()), {"cuda_ipc"}),
        # one machine, the server on another GPU, which it sees alone
        (OURS, info(worker(uuid=OTHER)), {"nccl"}),
        # the same, and the server sees the trainer's as well
        (OURS, info(worker(uuid=OTHER, visible=[OTHER, OURS])), {"cuda_ipc", "nccl"}),
        # two workers, one of them on the trainer's GPU
        (OURS, info(worker(visible=[OURS, OTHER]), worker(1, OTHER, [OURS, OTHER])), {"cuda_ipc"}),
        # two workers, one of which does not see the trainer's GPU
        (OURS, info(worker(0, "GPU-2", ["GPU-2", OURS]), worker(1, OTHER, [OTHER])), {"nccl"}),
        # another machine, even though a GPU is said to be the same
        (OURS, info(worker(uuid=OTHER, visible=[OURS, OTHER]), machine="there"), {"nccl"}),
        # a CPU on either side
        ("", info(worker()), set()),
        (OURS, info(worker(uuid="", visible=[])), set()),
        ("", info(worker(uuid="", visible=[])), set()),
        (OURS, info(worker(), worker(1, "", [])), set()),
    ],
)
def test_what_works_where(trainer: str, described: BridgeInfo, works: set[Transport]) -> None:
    place = TrainerPlace(trainer, "here")
    assert {name for name in OPENERS if obstacle(name, place, described) is None} == works | {"memory", "disk"}


@pytest.mark.parametrize("name", ["cuda_ipc", "nccl"])
def test_every_obstacle_is_named(name: Transport) -> None:
    """All combinations: CPU or GPU on both sides, one or two machines, what is visible."""
    found = {}
    for trainer, uuid, machine, sees in itertools.product(
        (OURS, ""), (OURS, OTHER, ""), ("here", "there"), (True, False)
    ):
        visible = [gpu for gpu in (uuid, OURS if sees else "") if gpu]
        described = info(worker(uuid=uuid, visible=visible), machine=machine)
        found[trainer, uuid, machine, sees] = obstacle(name, TrainerPlace(trainer, "here"), described)
    for (trainer, uuid, machine, sees), problem in found.items():
        got = (problem.field, problem.got) if problem is not None else None
        if not trainer:
            assert got == ("trainer", "a CPU")
        elif not uuid:
            assert got == ("server", "a CPU")
        elif name == "nccl":
            assert got == (("server", f"GPU {OURS}") if uuid == OURS else None)
        elif machine == "there":
            assert got == ("server", "machine there")
        elif not sees and uuid != OURS:
            assert problem is not None and (problem.got, problem.wanted) == (OTHER, OURS)
            assert "CUDA_VISIBLE_DEVICES" in problem.field and problem.field.endswith(" 0")
        else:
            assert problem is None


def test_a_trainer_on_a_cpu_finds_itself_there() -> None:
    packed = PackedAdapter(tiny_lora(), torch.float32)
    assert TrainerPlace.of(packed.buffer_E) == TrainerPlace("", machine_id())


class Opened:
    """What a stand-in opener hands out."""

    def __init__(self, name: Transport) -> None:
        self.name = name


@pytest.fixture
def openers(monkeypatch: pytest.MonkeyPatch) -> dict[str, Exception]:
    """On a machine where nothing is in the way: openers that raise what is put in here."""
    failures: dict[str, Exception] = {}

    def opener(name: Transport) -> Any:
        def open_it(*_: object) -> Opened:
            if name in failures:
                raise failures[name]
            return Opened(name)

        return open_it

    monkeypatch.setattr(module, "OPENERS", {name: opener(name) for name in OPENERS})
    monkeypatch.setattr(TrainerPlace, "of", lambda tensor: TrainerPlace(OURS, "here"))
    return failures


def opened(wanted: Transport | None) -> str:
    described = info(worker(uuid=OTHER, visible=[OTHER, OURS]))
    nothing: Any = None
    packed = PackedAdapter(tiny_lora(), torch.float32)
    return open_transport(wanted, packed, nothing, described, Path(), 2).name


def test_auto_takes_the_fastest_that_opens(openers: dict[str, Exception], caplog: pytest.LogCaptureFixture) -> None:
    assert opened(None) == "cuda_ipc"
    openers["cuda_ipc"] = RuntimeError("CUDA error: invalid device context")  # torch's own
    assert opened(None) == "nccl"
    openers["nccl"] = NcclError("absent")
    caplog.set_level("INFO")
    assert opened(None) == "memory"
    logged: list[Any] = [record.args for record in caplog.records if record.name == module.__name__]
    assert logged[-1][0] == "memory"
    assert logged[-1][1] == f" (not cuda_ipc: {openers['cuda_ipc']}; not nccl: absent)"
    openers["memory"] = ServerError("413")
    assert opened(None) == "disk"


def test_a_transport_that_was_asked_for_is_taken_or_refused_with_the_reason(openers: dict[str, Exception]) -> None:
    for name in OPENERS:
        assert opened(name) == name
        openers[name] = ServerError(f"{name} refused")
        with refusing(BridgeError, "--lora-transport", got=name) as refused:
            opened(name)
        (reason,) = refused.value.problems[1:]
        assert (reason.field, reason.summary) == (f"not {name}", f"{name} refused")
    with pytest.raises(BridgeError) as none:
        opened(None)
    assert none.value.got == "auto"
    reasons = [(reason.field, reason.summary) for reason in none.value.problems[1:]]
    assert reasons == [(f"not {name}", f"{name} refused") for name in OPENERS]


LOADED = LoraLoadResponse(
    adapter_path="", adapter_name="policy-v3", adapter_id=1, load_count=1, adapter_config={}, policy_version=3,
    transport="disk", slot=0, replayed=False, load_seconds=0.0, stall_seconds=0.0, unloaded=[],
)  # fmt: skip


class Confirming:
    """A transport whose server confirms version 3, whatever was sent."""

    name: Transport = "disk"

    def send(self, name: str, version: int, *, activate: bool) -> Sent:
        return Sent(LOADED, 0.0)

    def close(self) -> None: ...


@pytest.fixture
def bridge() -> LoraSwap:
    nothing: Any = None
    bridge = LoraSwap(BridgeConfig(weight_bridge_mode="lora_only"), nothing, nothing, Path(), 64)
    bridge.transport = Confirming()
    return bridge


def test_a_confirmed_version_is_published(bridge: LoraSwap) -> None:
    published = bridge.publish(3)
    assert (published.version, published.name) == (3, "policy-v3")


def test_another_version_than_the_published_one_is_refused(bridge: LoraSwap) -> None:
    with pytest.raises(BridgeError) as failed:
        bridge.publish(4)
    assert (failed.value.field, failed.value.got) == ("version", "3 (policy-v3)")
    assert failed.value.wanted == "4 (policy-v4)"


def test_another_name_than_the_sent_one_is_refused(bridge: LoraSwap) -> None:
    with pytest.raises(BridgeError) as failed:
        bridge.send("policy-proof", 3, activate=False)
    assert failed.value.wanted == "3 (policy-proof)"
